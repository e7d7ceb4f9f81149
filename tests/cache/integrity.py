"""Recounts everything that the cache counts as it goes. Each check says what it found, and where."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np

from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.block_index import BlockIndex, Keys
from kvsidecar.cache.leases import RELEASED, LeaseTable
from kvsidecar.cache.shares import Share
from kvsidecar.cache.slabs import LEVELS
from kvsidecar.cache.slots import NO_OWNER, SlotAllocator, SlotState
from kvsidecar.cache.space_blocks import FILLING, NO_SLOT, Space, SpaceBlocks
from kvsidecar.types import Priority
from tests.cache.support import rows_in, state_of, table_of

Row = tuple[int, int]
"""Number of the table, row in it."""


def check_integrity(cache: BlockCache) -> None:
    """Raise AssertionError if slots, blocks, references, policies and gauges of the cache do not agree."""
    table = table_of(cache)
    check_slots(table.slots)
    check_leases(cache._leases)
    leased, filling = _references(cache), _filling(cache)
    owners: Counter[Row] = Counter()
    for number, blocks in table.tables.items():
        assert blocks.number == number, f"table {blocks.number} is filed as {number}"
        assert not blocks.marks.any(), f"a plan of an eviction has left marks in table {number}"
        check_index(blocks.index)
        owners += _check_rows(blocks, leased, filling, table.slots)
        assert len(blocks) or not (blocks.cleared or blocks.space.dropped), f"the empty table {number} is still there"
    assert leased.keys() | filling.keys() <= {
        (number, row) for number in table.tables for row in _rows(table.tables[number])
    }
    owned = [owner for slab in table.slots.slabs.by_address().tolist() for owner in table.slots.owners(slab).tolist()]
    assert Counter((owner >> 32, owner & 0xFFFFFFFF) for owner in owned) == owners, "slots are owned by other blocks"
    every = [(name, group, space) for name, spaces in table.groups.items() for group, space in spaces.items()]
    assert all(table.groups.values()), "a namespace without groups was kept"
    for namespace, group, space in every:
        assert (space.namespace, space.group) == (namespace, group), f"the space of {namespace} is filed elsewhere"
        _check_space(space, table.tables)
    _check_gauges(cache, leased)
    _check_shares(cache)


# -- slots ---------------------------------------------------------------------------------------------------------


def check_slots(allocator: SlotAllocator) -> None:
    """Raise AssertionError if slabs overlap, or the counts of their slots are not what their states say."""
    slabs, grid = allocator.slabs, allocator.grid
    nbytes = [0] * len(SlotState)
    wasted = end = 0
    columns: list[range] = []
    runs = [(part.node, *run) for part in allocator._parts for run in zip(part.starts, part.ends, strict=True)]
    cut = slabs.by_address().tolist()
    assert sorted(cut) == slabs.size.nonzero()[0].tolist(), f"the slabs by address are {cut}"
    places = [(int(slabs.head[slab]), int(slabs.head[slab] + slabs.units[slab]), slab) for slab in cut]
    for start, stop, slab in sorted(places + [(start, stop, 0) for _, start, stop in runs]):
        assert start == end, f"slab {slab} starts at unit {start}; what is before it ends at {end}"
        assert stop > start, f"slab {slab} is empty"
        end = stop
        length = grid.nbytes(start, stop)
        assert (slabs.at[start:stop] == slab).all(), f"the units of slab {slab} are {slabs.at[start:stop]}"
        if not slab:
            nbytes[SlotState.FREE] += length
            continue
        size, capacity = int(slabs.size[slab]), int(slabs.capacity[slab])
        assert (slabs.start[slab], slabs.nbytes[slab]) == (start * grid.unit, length), f"slab {slab} lies elsewhere"
        columns.append(range(int(slabs.first[slab]), int(slabs.first[slab]) + capacity))
        for state, count in _check_slab(allocator, slab).items():
            nbytes[state] += count * size
        wasted += length - capacity * size
    assert end == len(grid), f"the slabs and what is not cut end at unit {end}, the pool at {len(grid)}"
    for part in allocator._parts:
        inside = [(start, stop) for start, stop in zip(part.starts, part.ends, strict=True)]
        assert inside == sorted(inside), f"the runs {inside} are not in order"
        assert all(part.start <= start < stop <= part.end for start, stop in inside), f"{inside} leave their part"
        assert all(one[1] < other[0] for one, other in pairwise(inside)), f"the runs {inside} touch"
        for start, stop, slab in places:
            straddles = start < part.end < stop
            assert not straddles, f"slab {slab} lies in two parts of the pool"
    assert wasted == allocator.wasted_bytes, f"wasted bytes are {wasted}, not {allocator.wasted_bytes}"
    assert nbytes == allocator._bytes, f"bytes by state are {nbytes}, not {allocator._bytes}"
    assert sum(nbytes) + wasted == allocator.total_bytes, "bytes do not add up to the pool"
    for capacity, spare in allocator._spare_columns.items():
        columns += [range(first, first + capacity) for first in spare]
    assert sorted(place for each in columns for place in each) == list(range(allocator._columns_used)), (
        f"the columns of slots are used twice or lost: {columns} of {allocator._columns_used}"
    )
    _check_lists(allocator)


def _check_slab(allocator: SlotAllocator, slab: int) -> Counter[int]:
    """The number of its slots by state."""
    slabs = allocator.slabs
    first, size, capacity = int(slabs.first[slab]), int(slabs.size[slab]), int(slabs.capacity[slab])
    states = allocator._states[first : first + capacity].tolist()
    owners = allocator._owners[first : first + capacity].tolist()
    counts = Counter(states)
    name = f"slab {slab}"
    assert capacity == int(slabs.nbytes[slab]) // size, f"{name} is cut into {capacity} slots"
    assert slabs.used[slab] == capacity - counts[SlotState.FREE] > 0, f"{name} counts {slabs.used[slab]} used slots"
    evictable = counts[SlotState.EVICTABLE]
    assert slabs.evictable[slab] == evictable, f"{name} counts {slabs.evictable[slab]} evictable slots"
    lowest = states.index(SlotState.FREE) if SlotState.FREE in counts else capacity
    assert slabs.lowest_free[slab] <= lowest, f"{name} would not find its free slot {lowest}"
    for index, (state, owner) in enumerate(zip(states, owners, strict=True)):
        owned = state not in (SlotState.FREE, SlotState.QUARANTINED)
        assert owned == (owner != NO_OWNER), f"slot {index} of {name} is {SlotState(state).name}, its owner {owner}"
    return counts


def _check_lists(allocator: SlotAllocator) -> None:
    """Each slab is in the lists it belongs to, and in no other."""
    slabs = allocator.slabs
    sizes = Counter(slabs.size.tolist())
    del sizes[0]
    assert allocator._cut_slabs == sizes, f"slabs are cut to {sizes}, not to {allocator._cut_slabs}"
    for number, node in allocator._nodes.items():
        here = [slab for slab in slabs.by_address().tolist() if allocator._part_of(slab).node == number]
        assert node.parts == [part for part in allocator._parts if part.node == number]
        for size in node.partial.keys() | node.free_slots.keys() | {int(slabs.size[slab]) for slab in here}:
            cut = [slab for slab in here if slabs.size[slab] == size]
            partial = {slab for slab in cut if slabs.used[slab] < slabs.capacity[slab]}
            filed = {slab: level for level, filed in enumerate(node.partial.get(size, ())) for slab in filed}
            levels = {slab: int(slabs.used[slab] * LEVELS // slabs.capacity[slab]) for slab in partial}
            assert filed == levels, f"slabs with free slots of {size} are {levels}, filed as {filed}"
            free = sum(int(slabs.capacity[slab] - slabs.used[slab]) for slab in cut)
            assert node.free_slots[size] == free, f"node {number} has {free} free slots of {size}"


# -- blocks --------------------------------------------------------------------------------------------------------


def check_index(index: BlockIndex) -> None:
    """Raise AssertionError if a row is filed twice, or would not be found."""
    rows = np.sort(rows_in(index))
    assert len(index) == len(rows), f"the index counts {len(index)} blocks, and has {len(rows)}"
    assert len(set(rows.tolist())) == len(rows), "a row is filed twice"
    assert (index.find(Keys(index._words[rows], index._tags_of(index._words[rows]))) == rows).all(), (
        "a row is not found under its hash"
    )
    assert not index._tags[index._num_buckets :].any(), "a bucket beyond the last is used"
    assert set(index._overflows.nonzero()[0].tolist()) == set(index._overflow), "buckets that overflow are not marked"
    shared = Counter(map(id, index._overflow.values()))
    assert all(rows or shared[id(rows)] > 1 for rows in index._overflow.values()), "a bucket without overflow is listed"


def _rows(blocks: SpaceBlocks) -> list[int]:
    """Rows of the blocks there are."""
    freed = set(blocks._freed_rows[: blocks._num_freed].tolist())
    assert len(freed) == blocks._num_freed, f"a row of table {blocks.number} was freed twice"
    return [row for row in range(blocks.rows_used) if row not in freed]


def _references(cache: BlockCache) -> Counter[Row]:
    """References by leases, loads and writes to a slower tier."""
    chains = [chain for lease in cache._leases._leases.values() for chain in lease.chains]
    chains += [chain for ended in cache._ended for chain in ended]
    chains += [chain for load in cache._loads for chain in load.chains]
    chains += [write.chain for write in cache.tiers._writes]
    return Counter((chain.blocks.number, row) for chain in chains for row in chain.rows.tolist())


def _filling(cache: BlockCache) -> dict[Row, dict[int, int]]:
    """Slot by shard of each block that stores fill."""
    filling: dict[Row, dict[int, int]] = {}
    for part in (part for grant in cache._stores for part in grant.parts):
        for row, slot in zip(part.rows.tolist(), part.slots.tolist(), strict=True):
            shards = filling.setdefault((part.blocks.number, row), {})
            assert part.shard not in shards, f"shard {part.shard} of row {row} is being filled twice"
            shards[part.shard] = slot
    return filling


def _check_rows(
    blocks: SpaceBlocks, leased: Counter[Row], filling: dict[Row, dict[int, int]], allocator: SlotAllocator
) -> Counter[Row]:
    """Check each block of a table; how many slots it owns."""
    owners: Counter[Row] = Counter()
    rows = _rows(blocks)
    found = set() if blocks.cleared else set(rows_in(blocks.index).tolist())
    assert found <= set(rows), f"table {blocks.number} finds rows that are free"
    for row in rows:
        key, name = (blocks.number, row), f"row {row} of table {blocks.number}"
        refs, open_shards = leased[key], filling.get(key, {})
        assert blocks.refs[row] == refs + len(open_shards), (
            f"{name} has {blocks.refs[row]} references, should have {refs + len(open_shards)}"
        )
        slots = blocks.slots[:, row].tolist()
        sealed = [slot for slot in slots if slot >= 0]
        assert blocks.missing[row] == len(slots) - len(sealed), f"{name} says it misses {blocks.missing[row]} shards"
        assert not refs or blocks.missing[row] == 0, f"{name} is referenced and not readable"
        assert {shard for shard, slot in enumerate(slots) if slot == FILLING} == open_shards.keys(), (
            f"{name} is filled in {slots}, by stores in {open_shards}"
        )
        assert all(slot in (NO_SLOT, FILLING) for slot in slots if slot < 0), f"{name} has the slots {slots}"
        assert sealed or open_shards, f"{name} has no slot, and should have gone"
        detached = blocks.cleared or bool(blocks.detached[row])
        assert detached == (row not in found), f"{name} is detached: {detached}, but found: {row in found}"
        evictable = bool(blocks.evictable[row])
        waits_for_sweep = blocks.cleared and row >= blocks.swept
        assert evictable <= (not blocks.refs[row]), f"{name} is evictable and referenced"
        assert evictable or blocks.refs[row], f"{name} is needed by nobody, and not evictable"
        assert not (evictable and detached) or waits_for_sweep, f"{name} is detached, unused, and still there"
        for shard, slot in [*enumerate(slots), *open_shards.items()]:
            if slot < 0:
                continue
            state = state_of(allocator, slot)
            busy = SlotState.RESERVED if shard in open_shards else SlotState.IN_USE
            expected = SlotState.EVICTABLE if evictable else busy
            assert state == expected, f"slot {slot} of {name} is {state.name}; it should be {expected.name}"
            slab = int(allocator.slabs.at[slot // allocator.grid.unit])
            size = int(allocator.slabs.size[slab])
            assert size == blocks.space.slot_sizes[shard], f"shard {shard} of {name} is in a slot of {size} bytes"
            place = allocator.slabs.first[slab] + (slot - allocator.slabs.start[slab]) // size
            owner = int(allocator._owners[place])
            assert (owner >> 32, owner & 0xFFFFFFFF) == key, f"slot {slot} of {name} is owned by {owner:#x}"
            if evictable:
                assert blocks.last_used[row] <= allocator.slabs.touched[slab], f"{name} was used after slab {slab}"
            owners[key] += 1
    readable = sum(not blocks.missing[row] for row in found)
    assert blocks.readable == readable or blocks.cleared, f"{readable} blocks are readable, not {blocks.readable}"
    return owners


def _check_space(space: Space, tables: dict[int, SpaceBlocks]) -> None:
    blocks = space.blocks
    assert space.users > 0 or len(blocks.index), f"the space of group {space.group} should have been dropped"
    assert not space.dropped, f"the space of group {space.group} was dropped and is still there"
    assert tables.get(blocks.number) is blocks, f"the blocks of group {space.group} are not listed"
    assert blocks.space is space, f"the blocks of group {space.group} are of another space"
    assert not blocks.cleared, f"the blocks of group {space.group} were cleared"
    evictable = set(blocks.evictable.nonzero()[0].tolist())
    for priority in Priority:
        candidates = [row for rows in blocks.candidates(priority) for row in rows.tolist()]
        expected = {row for row in evictable if blocks.priority[row] == priority}
        assert len(candidates) == len(expected), f"the policy has {candidates}; evictable are {expected}"
        assert set(candidates) == expected, f"the policy has {candidates}; evictable are {expected}"
        ranks = blocks.ranks(np.array(candidates, np.int64)).tolist()
        assert ranks == sorted(ranks), f"the candidates for eviction are not in the order of their ranks: {ranks}"
        by_use = [row for rows in blocks.candidates(priority, by_use=True) for row in rows.tolist()]
        used = blocks.last_used[by_use].tolist()
        assert set(by_use) == expected, f"by use, the policy has {by_use}; evictable are {expected}"
        assert used == sorted(used), f"the candidates for eviction are not in the order of their use: {used}"


# -- leases --------------------------------------------------------------------------------------------------------


def check_leases(table: LeaseTable) -> None:
    """Raise AssertionError if the three views of the leases differ."""
    by_owner = {lease_id: lease for leases in table._by_owner.values() for lease_id, lease in leases.items()}
    assert by_owner == table._leases, "leases by owner and by id differ"
    assert all(table._by_owner.values()), "an owner without leases was kept"
    for owner, leases in table._by_owner.items():
        assert table._room_of[owner] == sum(lease.room for lease in leases.values()), "blocks miscounted"
    assert table._room_of.keys() == table._by_owner.keys(), "blocks of an owner without leases"
    assert not table._released.keys() & table._leases.keys(), "a lease is alive and released"
    assert len(table._released) <= RELEASED, "too many released leases are remembered"
    entries = set(table._expiries)
    for lease_id, lease in table._leases.items():
        assert lease.num_blocks == sum(len(chain.rows) for chain in lease.chains), f"lease {lease_id} miscounts"
        assert lease.id == lease_id, f"lease {lease.id} is filed as {lease_id}"
        assert (lease.expires_at, lease_id) in entries, f"lease {lease_id} would never expire"


# -- shares --------------------------------------------------------------------------------------------------------


def _check_shares(cache: BlockCache) -> None:
    table, shares = table_of(cache), table_of(cache).shares
    used: Counter[Share] = Counter()
    evictable: Counter[Share] = Counter()
    states: Counter[SlotState] = Counter()
    for blocks in table.tables.values():
        share = blocks.space.share
        assert share.retired or share is shares.of(blocks.space.namespace), f"{share.name} pays for {blocks.number}"
        assert blocks in blocks.space.tables, f"table {blocks.number} is not of its space"
        before = (used[share], evictable[share])
        for slab in table.slots.slabs.by_address().tolist():
            size, first = int(table.slots.slabs.size[slab]), int(table.slots.slabs.first[slab])
            for at in range(first, first + int(table.slots.slabs.capacity[slab])) if size else ():
                state = SlotState(int(table.slots._states[at]))
                if int(table.slots._owners[at]) >> 32 == blocks.number and state is not SlotState.FREE:
                    states[state] += size
                    if state is SlotState.EVICTABLE and blocks.cleared:
                        continue  # nobody pays for it
                    used[share] += size
                    evictable[share] += size * (state is SlotState.EVICTABLE)
        counted = (used[share] - before[0], evictable[share] - before[1])
        assert counted == (blocks.used_bytes, blocks.evictable_bytes), f"table {blocks.number} miscounts its bytes"
        for priority, order in share.orders.items():
            listed = blocks.number in order._listed
            others = [each for each in shares if each is not share and blocks.number in each.orders[priority]._listed]
            assert not others, f"table {blocks.number} is in the order of another share, too"
            there = bool(blocks.evictable_bytes) and next(blocks.candidates(priority), None) is not None
            assert listed or not there, f"table {blocks.number} would not be evicted"
    for share in shares:
        assert (share.used, share.evictable) == (used[share], evictable[share]), f"the share {share.name} miscounts"
        for order in (*share.orders.values(), *share.by_use.values()):
            entries = {(number, age): (priority, blocks) for age, number, priority, blocks in order._heap}
            assert order._listed.items() <= entries.keys(), "tables are lost"
            for (number, age), (priority, blocks) in entries.items():
                oldest = blocks.oldest_use(priority, by_use=order._by_use)
                right = oldest is None or age <= oldest or order._listed.get(number) != age
                assert right, f"table {number} would be looked at too late"
    for state in (SlotState.RESERVED, SlotState.IN_USE, SlotState.EVICTABLE):
        assert table.slots.bytes_in(state) == states[state], f"{state.name} slots belong to nobody"
    if not shares.limited:
        return
    committed = sum(max(share.guaranteed, share.busy) for share in shares)
    assert shares.committed == committed, f"{committed} bytes are guaranteed or busy, not {shares.committed}"


# -- gauges --------------------------------------------------------------------------------------------------------


def _check_gauges(cache: BlockCache, leased: Counter[Row]) -> None:
    table = table_of(cache)
    current = [space.blocks for space in cache.spaces]
    found, readable = sum(len(blocks.index) for blocks in current), sum(blocks.readable for blocks in current)
    assert table.num_blocks == found, f"there are {found} blocks, not {table.num_blocks}"
    assert table.readable_blocks == readable, f"{readable} blocks are readable, not {table.readable_blocks}"
    leased_bytes = sum(table.tables[number].space.block_bytes for number, _ in leased)
    assert table.leased_bytes == leased_bytes, f"leased bytes are {leased_bytes}, not {table.leased_bytes}"
    cleared = sum(
        blocks.bytes_of(np.flatnonzero(blocks.evictable[: blocks.rows_used]))
        for blocks in table.tables.values()
        if blocks.cleared
    )
    assert table.cleared_bytes == cleared, f"cleared bytes are {cleared}, not {table.cleared_bytes}"
    stats = cache.stats()
    parts = stats.used_bytes + stats.free_bytes + stats.reserved_bytes + stats.quarantined_bytes + stats.wasted_bytes
    assert parts == stats.total_bytes, f"the gauges add up to {parts} of {stats.total_bytes} bytes"
    assert stats.leased_bytes + stats.evictable_bytes <= stats.used_bytes, "leased and evictable bytes overlap"
