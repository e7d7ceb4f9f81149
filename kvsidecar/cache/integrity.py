"""Recount of everything that the cache counts as it goes. Each check says what it found, and where."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvsidecar.cache.block import Block, Space
from kvsidecar.cache.slots import Slab, SlotAllocator, SlotState

if TYPE_CHECKING:
    from kvsidecar.cache.block_cache import BlockCache


def check_integrity(cache: BlockCache) -> None:
    """Raise AssertionError if slots, blocks, pins, policies and gauges of the cache do not agree."""
    check_slots(cache._table.slots)
    cache._leases.check_integrity()
    pins = _pins(cache)
    blocks = _all_blocks(cache, pins)
    _check_owners(cache._table.slots, blocks)
    for block in blocks:
        _check_block(block, pins[block], cache._table.slots)
    for (namespace, group), space in cache._table.spaces.items():
        assert (space.namespace, space.group) == (namespace, group), f"the space of {namespace} is filed elsewhere"
        _check_space(space)
    _check_gauges(cache, blocks)


def check_slots(allocator: SlotAllocator[Block]) -> None:
    """Raise AssertionError if slabs overlap, or the counts of their slots are not what their states say."""
    nbytes = [0] * len(SlotState)
    wasted = end = 0
    for slab in allocator._slabs:
        assert slab.start == end, f"slab {slab.index} starts at {slab.start}; the one before it ends at {end}"
        end += slab.nbytes
        _check_slab(slab, allocator)
        states = Counter(slab.states)
        for state, count in states.items():
            nbytes[state] += count * slab.size
        if not slab.size:
            nbytes[SlotState.FREE] += slab.nbytes
        else:
            wasted += slab.nbytes - slab.capacity * slab.size
    assert end == allocator.total_bytes, f"the slabs end at {end}, the pool at {allocator.total_bytes}"
    assert wasted == allocator.wasted_bytes, f"wasted bytes are {wasted}, not {allocator.wasted_bytes}"
    assert nbytes == allocator._bytes, f"bytes by state are {nbytes}, not {allocator._bytes}"
    assert sum(nbytes) + wasted == allocator.total_bytes, "bytes do not add up to the pool"
    _check_lists(allocator)


def _check_slab(slab: Slab[Block], allocator: SlotAllocator[Block]) -> None:
    name = f"slab {slab.index}"
    states = Counter(slab.states)
    assert len(slab.states) == len(slab.owners) == slab.capacity, f"{name} has {slab.capacity} slots, but other lists"
    assert slab.capacity == (slab.nbytes // slab.size if slab.size else 0), f"{name} is cut into {slab.capacity} slots"
    assert (slab.used > 0) == (slab.size > 0), f"{name} has {slab.used} used slots and is cut to {slab.size}"
    assert slab.used == slab.capacity - states[SlotState.FREE], f"{name} counts {slab.used} used slots"
    assert slab.evictable == states[SlotState.EVICTABLE], f"{name} counts {slab.evictable} evictable slots"
    free = set(slab.returned) | set(range(slab.fresh, slab.capacity))
    assert len(free) == len(slab.returned) + slab.capacity - slab.fresh, f"{name} lists a free slot twice"
    for index, (state, owner) in enumerate(zip(slab.states, slab.owners, strict=True)):
        slot = slab.start + index * slab.size
        assert (state == SlotState.FREE) == (index in free), f"slot {slot} is {SlotState(state).name}, or is it free?"
        owned = state not in (SlotState.FREE, SlotState.QUARANTINED)
        assert owned == (owner is not None), f"slot {slot} is {SlotState(state).name}, its owner {owner}"
    assert slab.touched <= allocator._tick, f"{name} was touched in the future"


def _check_lists(allocator: SlotAllocator[Block]) -> None:
    """Each slab is in the lists it belongs to, and in no other."""
    for number, node in allocator._nodes.items():
        here = [slab for slab in allocator._slabs if slab.node == number]
        whole = {slab.index for slab in here if not slab.size}
        assert {slab.index for slab in node.whole} == whole, f"whole slabs of node {number} are {whole}"
        assert len(node.whole) == len(whole), f"node {number} lists a whole slab twice"
        for slab in list(node.whole)[1:]:
            assert slab.nbytes == allocator.slab_bytes, f"the short slab {slab.index} is not the last to be taken"
        for size in node.partial.keys() | node.free_slots.keys() | {slab.size for slab in here if slab.size}:
            partial = {slab.index for slab in here if slab.size == size and slab.used < slab.capacity}
            assert set(node.partial.get(size, ())) == partial, f"slabs with free slots of {size} are {partial}"
            free = sum(slab.capacity - slab.used for slab in here if slab.size == size)
            assert node.free_slots[size] == free, f"node {number} has {free} free slots of {size}"
    for size in allocator._reclaimable.keys() | {slab.size for slab in allocator._slabs if slab.size}:
        listed = list(allocator._reclaimable.get(size, {}).values())
        expected = {slab.index for slab in allocator._slabs if slab.size == size and slab.reclaimable}
        assert {slab.index for slab in listed} == expected, f"reclaimable slabs of {size} are {expected}"
        touched = [slab.touched for slab in listed]
        assert touched == sorted(touched), f"reclaimable slabs of {size} are not in the order of their use: {touched}"


def _pins(cache: BlockCache) -> Counter[Block]:
    pins: Counter[Block] = Counter()
    for lease in cache._leases.all():
        for chain in lease.chains:
            pins.update(chain)
    for load in cache._loads:
        for chain in load.chains:
            pins.update(chain)
    return pins


def _all_blocks(cache: BlockCache, pins: Counter[Block]) -> set[Block]:
    """Findable and detached ones: every block with a slot is the owner of it."""
    blocks = {block for space in cache._table.spaces.values() for block in space.blocks}
    blocks.update(owner for slab in cache._table.slots._slabs for owner in slab.blocks())
    blocks.update(pins)
    return blocks


def _check_owners(allocator: SlotAllocator[Block], blocks: set[Block]) -> None:
    held = Counter(slot for block in blocks for slot in block.held_slots())
    twice = [slot for slot, count in held.items() if count > 1]
    assert not twice, f"slots {twice} hold two shards"
    for block in blocks:
        for slot in block.held_slots():
            slab = allocator.slab_of(slot)
            assert slab.size, f"slot {slot} of a block lies in a slab that is not cut"
            assert (slot - slab.start) % slab.size == 0, f"slot {slot} of a block is no slot of its slab"
            assert slab.owners[slab.index_of(slot)] is block, f"slot {slot} of a block is owned by another, or by none"
    owned = sum(1 for slab in allocator._slabs for _ in slab.blocks())
    assert owned == len(held), f"{owned} slots have an owner, but blocks hold {len(held)}"


def _check_block(block: Block, pins: int, allocator: SlotAllocator[Block]) -> None:
    name = f"block {block.hash.hex() or 'without hash'}"
    found = block.space.blocks.get(block.hash)
    assert block.detached == (found is not block), f"{name} is detached: {block.detached}, but found is {found}"
    assert block.pins == pins, f"{name} has {block.pins} pins; leases and loads hold {pins}"
    assert not pins or block.readable, f"{name} is pinned and not readable"
    slots = [block.slot_of(shard) for shard in range(block.space.num_shards)]
    assert any(slot >= 0 for slot in slots), f"{name} has no slot, and should have gone"
    for shard, slot in enumerate(slots):
        sealed = bool(block.sealed >> shard & 1)
        if slot < 0:
            assert not sealed, f"shard {shard} of {name} is sealed and has no slot"
            continue
        slab = allocator.slab_of(slot)
        assert slab.size == block.space.slot_sizes[shard], f"shard {shard} of {name} is in a slot of {slab.size} bytes"
        state = SlotState(slab.states[slab.index_of(slot)])
        busy = SlotState.HELD if sealed else SlotState.RESERVED
        expected = SlotState.EVICTABLE if block.evictable else busy
        assert state == expected, f"slot {slot} of {name} is {state.name}; it should be {expected.name}"
        if expected is SlotState.EVICTABLE:
            assert block.last_used <= slab.touched, f"{name} was used after its slab {slab.index}"
    assert not block.detached or block.pins or block.filling, f"{name} is detached, unused, and still there"


def _check_space(space: Space) -> None:
    assert space.users > 0 or space.blocks, f"the space of group {space.group} should have been dropped"
    assert not space.dropped, f"the space of group {space.group} was dropped and is still there"
    readable = sum(block.readable for block in space.blocks)
    assert space.readable == readable, f"group {space.group} has {readable} readable blocks, not {space.readable}"
    assert len(space.blocks) == sum(1 for _ in space.blocks), f"the index counts {len(space.blocks)} blocks"
    for block in space.blocks:
        assert space.blocks.get(block.hash) is block, f"block {block.hash.hex()} is filed under another hash"
        assert block.space is space, f"block {block.hash.hex()} is of another space"
    candidates = list(space.policy.candidates())
    evictable = {block for block in space.blocks if block.evictable}
    assert len(candidates) == len(set(candidates)), "the eviction policy has a block twice"
    assert set(candidates) == evictable, f"the policy has {len(candidates)} blocks; {len(evictable)} are evictable"
    used = [block.last_used for block in candidates]
    assert used == sorted(used), f"the candidates for eviction are not in the order of their use: {used}"


def _check_gauges(cache: BlockCache, blocks: set[Block]) -> None:
    found = [block for block in blocks if not block.detached]
    readable = sum(block.readable for block in found)
    leased = sum(block.space.block_bytes for block in blocks if block.pins)
    assert cache._table.num_blocks == len(found), f"there are {len(found)} blocks, not {cache._table.num_blocks}"
    assert cache._table.readable_blocks == readable, (
        f"{readable} blocks are readable, not {cache._table.readable_blocks}"
    )
    assert cache._table.leased_bytes == leased, f"leased bytes are {leased}, not {cache._table.leased_bytes}"
    stats = cache.stats()
    parts = stats.used_bytes + stats.free_bytes + stats.reserved_bytes + stats.quarantined_bytes + stats.wasted_bytes
    assert parts == stats.total_bytes, f"the gauges add up to {parts} of {stats.total_bytes} bytes"
    assert stats.leased_bytes + stats.evictable_bytes <= stats.used_bytes, "leased and evictable bytes overlap"
