"""Which blocks the pool has, which are in use, and which go when room is needed. It decides; it moves no byte.

Not thread-safe: the daemon calls it from its event loop only. Times are seconds on the caller's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from kvsidecar.cache.arrays import Bools, Ints, all_true, first_of_each
from kvsidecar.cache.block import Chain, Lease, LoadGrant, Space, StoreGrant
from kvsidecar.cache.block_table import BlockTable, require
from kvsidecar.cache.eviction import choose_victims
from kvsidecar.cache.leases import LeaseTable
from kvsidecar.cache.slots import SlotAllocator, SlotState
from kvsidecar.errors import InvalidRequest, Refusal
from kvsidecar.types import LookupMode, Namespace

Hashes = Sequence[bytes] | bytes
"""Block hashes; or all of them as one string, as they come over the wire: to split and join 4096 of them takes as long
as to look them up."""
Part = tuple[Space, Hashes]
"""Block hashes of one group, in the order of the prefix. A request has one part per group."""
ShardPart = tuple[Space, int, Hashes]
"""The same with the shard that is stored or loaded."""
SWEEP = 4096
"""Cleared blocks that are freed at once: less than a millisecond."""
PROBE = 512
"""Hashes of a prefix that are looked up before the others: often the first one is a miss."""


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Gauges and counters. ``used + free + reserved + quarantined + wasted`` bytes are the whole pool."""

    total_bytes: int
    used_bytes: int
    """Sealed slots."""
    free_bytes: int
    reserved_bytes: int
    """Slots being filled."""
    quarantined_bytes: int
    """Slots that a store of unknown outcome may still write to; never used again."""
    wasted_bytes: int
    """Tails of slabs that are too short for a slot."""
    evictable_bytes: int
    """The part of ``used_bytes`` that a store could have now."""
    leased_bytes: int
    """The part of ``used_bytes`` that leases and loads pin."""
    blocks: int
    """Blocks that are readable, being filled, or partly sealed."""
    readable_blocks: int
    leases: int
    loads: int
    """Loads that have not ended; one of unknown outcome never does."""
    evicted_blocks: int
    evicted_bytes: int


class BlockCache:
    """The decisions of the daemon about blocks. Every call is O(hashes it is given or has given out).

    A grant is ended exactly once. To end it again, or to close a space more often than it was opened, is an
    AssertionError: from then on a slot could be given out twice.

    Args:
        allocator: of the pool, unused so far.
        seed: a secret that keeps clients from choosing hashes which the index is slow with.
        next_id: source of lease ids. Default: 0, 1, 2, ...; a random source keeps clients from guessing each other's.
    """

    def __init__(
        self,
        allocator: SlotAllocator,
        next_id: Callable[[], int] | None = None,
        seed: int = 0,
    ) -> None:
        self._table = BlockTable(allocator, seed)
        self._leases = LeaseTable(next_id)
        self._stores: set[StoreGrant] = set()
        self._loads: set[LoadGrant] = set()
        self._tick = 0
        """Number of the request; the blocks that it uses have it as their ``last_used``."""

    # -- spaces ------------------------------------------------------------------------------------------------

    @property
    def spaces(self) -> list[Space]:
        """All spaces that have ranks or blocks."""
        return list(self._table.spaces.values())

    def find_space(self, namespace: Namespace, group: int) -> Space | None:
        return self._table.spaces.get((namespace, group))

    def empty_space(self, hash_bytes: int) -> Space:
        """A space that never has blocks: a lookup in it misses, as fast as in any other."""
        return self._table.empty_space(hash_bytes)

    def open_space(self, namespace: Namespace, group: int, num_shards: int, shard: int, shard_bytes: int) -> Space:
        """The space of a namespace and group, for a rank that holds ``shard`` with ``shard_bytes`` bytes per block.

        Each call needs its `close_space`.

        Raises:
            InvalidRequest: the numbers make no sense, or no slab is large enough for the shard.
            NamespaceMismatch: another rank registered another number of shards or another size of this shard.
        """
        return self._table.open_space(namespace, group, num_shards, shard, shard_bytes)

    def close_space(self, space: Space) -> None:
        """A rank has gone. The space and its sizes are forgotten when it has neither ranks nor blocks."""
        self._table.close_space(space)

    # -- lookup and leases -------------------------------------------------------------------------------------

    def lookup(self, space: Space, hashes: Hashes, mode: LookupMode) -> list[bool]:
        """Per hash whether it is readable; with `LookupMode.PREFIX` False from the first that is not.

        Counts hits and misses. It is no use of the blocks: only a lease, a load or a store is.
        """
        _, hits = _find(space, hashes, mode)
        _count(space, hits)
        return _list(hits)

    def lookup_and_lease(
        self, parts: Sequence[Part], mode: LookupMode, now: float, ttl: float, owner: Hashable
    ) -> tuple[Lease | None, list[list[bool]]]:
        """`lookup` of all parts, and a lease on all hits until ``now + ttl``. No lease if there is no hit."""
        chains, answers = [], []
        for space, hashes in parts:
            rows, hits = _find(space, hashes, mode)
            _count(space, hits)
            chains.append(_chain(space, rows[hits]))
            answers.append(_list(hits))
        lease = None
        if any(len(chain.rows) for chain in chains):
            self._table.pin(chains)
            lease = self._leases.add(owner, chains, now + ttl)
        return lease, answers

    def lease(self, lease_id: int, now: float) -> Lease | None:
        """The lease if it is alive."""
        return self._leases.get(lease_id, now)

    def held(self, owner: Hashable) -> tuple[int, int]:
        """Number of leases of an owner, and of blocks in them; a block in two leases counts twice."""
        return self._leases.held(owner)

    def renew(self, lease_id: int, now: float, ttl: float) -> bool:
        """Extend the lease to ``now + ttl``. False if it is not alive any more."""
        return self._leases.renew(lease_id, now, now + ttl)

    def release(self, lease_id: int) -> bool:
        """End a lease. False if there is none (any more)."""
        lease = self._leases.release(lease_id)
        return lease is not None and bool(self._end_leases([lease]))

    def expire(self, now: float) -> list[Lease]:
        """End the leases whose time is over, and return them."""
        return self._end_leases(self._leases.pop_expired(now))

    def drop_owner(self, owner: Hashable) -> list[Lease]:
        """End all leases of an owner that has gone, and return them."""
        return self._end_leases(self._leases.pop_owner(owner))

    # -- store -------------------------------------------------------------------------------------------------

    def begin_store(self, parts: Sequence[ShardPart], node: int | None = None) -> StoreGrant | Refusal:
        """Reserve a slot for every block of which this shard is neither sealed nor being filled.

        All or nothing: `Refusal.POOL_FULL` or ``POOL_FRAGMENTED`` if not every slot can be had, and then nothing was
        evicted or changed.

        Args:
            parts: what to store; a hash may come twice.
            node: NUMA node on which slots are preferred.

        Raises:
            InvalidRequest: no rank with this shard has attached.
            AssertionError: the space is closed.
        """
        for space, shard, _ in parts:
            require(space.users > 0, "the space is closed")
            _check_shard(space, shard)
        table, grant = self._table, StoreGrant()
        keys = [space.blocks.index.keys(hashes) for space, _, hashes in parts]  # before anything has changed
        for (space, shard, _), part_keys in zip(parts, keys, strict=True):
            part, present = table.claim(space, shard, part_keys)
            grant.parts.append(part)
            grant.present += present
            grant.in_flight += len(part_keys) - present - len(part.index)
        needs: dict[int, int] = {}
        for part in grant.parts:
            if len(part.index):
                needs[part.slot_size] = needs.get(part.slot_size, 0) + len(part.index)
        if not needs:
            table.touch(grant.parts, self._next_tick())
            self._stores.add(grant)
            return grant
        if not table.slots.can_allocate(needs) and not self._make_room(needs, grant):
            for part in reversed(grant.parts):
                table.unclaim(part)
            return Refusal.POOL_FRAGMENTED if table.slots.is_fragmented(needs) else Refusal.POOL_FULL
        if node is not None and not table.slots.can_prefer(node, needs):
            node = None  # opening a slab there might take it from another size class of this request: any slot will do
        # The larger size classes first, as `AllocationPlan` counted.
        for part in sorted(grant.parts, key=lambda part: part.slot_size, reverse=True):
            table.reserve(part, node)
        self._stores.add(grant)
        return grant

    def seal_all(self, grant: StoreGrant) -> int:
        """The bytes are there. Returns how many blocks became readable.

        Counts as a use of these blocks and of those that were present.
        """
        self._end_store(grant)
        if not grant.reserved:
            return 0  # its blocks were all present, and used when it began
        tick = self._next_tick()
        readable = sum([self._table.seal(part, tick) for part in reversed(grant.parts)])
        if grant.present:
            self._table.touch(grant.parts, tick)
        return readable

    def abort_all(self, grant: StoreGrant) -> None:
        """The bytes will not come, and nothing writes to the slots any more: free them."""
        self._end_store(grant)
        for part in grant.parts:
            self._table.abort(part, self._next_tick())

    def quarantine_all(self, grant: StoreGrant) -> None:
        """A copy may still write to the slots: never use them again."""
        self._end_store(grant)
        for part in grant.parts:
            self._table.quarantine(part, self._next_tick())

    def _make_room(self, needs: dict[int, int], grant: StoreGrant) -> bool:
        """Evict until the needs of the grant can be met. False, with nothing evicted, if they cannot."""
        table = self._table
        while table.sweep(SWEEP):
            if table.slots.can_allocate(needs):
                return True
        requested = [Chain(part.blocks, part.chain_rows) for part in grant.parts]
        victims = choose_victims(needs, table.slots, table.tables, requested)
        for chain in victims or ():
            table.evict(chain)
        return victims is not None

    def _end_store(self, grant: StoreGrant) -> None:
        _close(grant)
        self._stores.remove(grant)

    # -- load --------------------------------------------------------------------------------------------------

    def begin_load(self, parts: Sequence[ShardPart], lease_id: int | None, now: float) -> LoadGrant | Refusal:
        """Pin all blocks until `end_load`, and say where this shard of each lies.

        All or nothing: `Refusal.STALE_LEASE` if a lease is named whose time is over at ``now`` (or that never was),
        `Refusal.NOT_FOUND` if a block is not readable. A lease that its client has just released is as good as none:
        the release may have overtaken the load, and the client has not waited too long.

        Raises:
            InvalidRequest: no rank with this shard has attached.
        """
        for space, shard, _ in parts:
            _check_shard(space, shard)
        leases = self._leases
        if lease_id is not None and leases.get(lease_id, now) is None and not leases.was_released(lease_id):
            return Refusal.STALE_LEASE
        found = [space.blocks.index.find(space.blocks.index.keys(hashes)) for space, _, hashes in parts]
        for (space, _, _), rows in zip(parts, found, strict=True):
            if not all_true(_readable(space, rows)):
                return Refusal.NOT_FOUND
        chains = [_chain(space, rows) for (space, _, _), rows in zip(parts, found, strict=True)]
        self._table.pin(chains)
        slots = [space.blocks.slots[shard, rows] for (space, shard, _), rows in zip(parts, found, strict=True)]
        grant = LoadGrant(slots, found, chains)
        self._loads.add(grant)
        return grant

    def end_load(self, grant: LoadGrant) -> None:
        """Nothing reads the slots any more."""
        _close(grant)
        self._loads.remove(grant)
        self._table.unpin(grant.chains, self._next_tick())

    def quarantine_load(self, grant: LoadGrant) -> None:
        """A copy may still read the slots: the blocks stay pinned, and readable, for ever."""
        _close(grant)

    def mark_corrupt(self, grant: LoadGrant, part: int, index: int) -> None:
        """A shard that this load is about to read is not what was sealed: its block is a miss from now on, and its
        slot is never used again. The load must still be ended."""
        require(grant.open, "the load has ended before")
        blocks, row, slot = grant.chains[part].blocks, grant.rows[part][index], grant.slots[part][index]
        self._table.mark_corrupt(blocks, int(row), int(slot))

    # -- all of it ---------------------------------------------------------------------------------------------

    def clear(self, namespace: Namespace | None = None, sweep: int = SWEEP) -> int:
        """Forget the blocks of one namespace, or all. The number of blocks that are no longer readable.

        None of them is found from now on, however many there are. The slots of the first ``sweep`` are free at once,
        the others when `sweep` or a store comes to them; slots that a lease, a load or a store needs are freed when
        the last of these ends.
        """
        before = self._table.readable_blocks
        for space in self.spaces:
            if namespace is None or space.namespace == namespace:
                self._table.clear(space)
        self._table.sweep(sweep)
        return before - self._table.readable_blocks

    def sweep(self, limit: int = SWEEP) -> bool:
        """Free the slots of up to ``limit`` cleared blocks, and the memory of blocks that have gone from one namespace.

        False when there is nothing more to do: call it until then, and again from time to time.
        """
        rebuilt = self._table.rebuild_sparse()
        return self._table.sweep(limit) or rebuilt

    def stats(self) -> CacheStats:
        """Gauges and counters of this moment; O(1)."""
        table, slots = self._table, self._table.slots
        evictable = slots.bytes_in(SlotState.EVICTABLE)
        return CacheStats(
            total_bytes=slots.total_bytes,
            used_bytes=slots.bytes_in(SlotState.HELD) + evictable,
            free_bytes=slots.bytes_in(SlotState.FREE),
            reserved_bytes=slots.bytes_in(SlotState.RESERVED),
            quarantined_bytes=slots.bytes_in(SlotState.QUARANTINED),
            wasted_bytes=slots.wasted_bytes,
            evictable_bytes=evictable,
            leased_bytes=table.leased_bytes,
            blocks=table.num_blocks,
            readable_blocks=table.readable_blocks,
            leases=len(self._leases),
            loads=len(self._loads),
            evicted_blocks=table.evicted_blocks,
            evicted_bytes=table.evicted_bytes,
        )

    def _end_leases(self, leases: list[Lease]) -> list[Lease]:
        for lease in leases:
            self._table.unpin(lease.chains, self._next_tick())
        return leases

    def _next_tick(self) -> int:
        self._tick += 1
        return self._tick


def _find(space: Space, hashes: Hashes, mode: LookupMode) -> tuple[Ints, Bools]:
    """Per hash its row, and whether it is a hit in this mode."""
    blocks = space.blocks
    keys = blocks.index.keys(hashes)
    if mode is LookupMode.BITMAP or len(keys) <= PROBE:
        rows = blocks.index.find(keys)
        hits = _readable(space, rows)
        if mode is LookupMode.PREFIX and not all_true(hits):
            hits = np.logical_and.accumulate(hits)
        return rows, hits
    rows, hits = np.full(len(keys), -1, np.int64), np.zeros(len(keys), np.bool_)
    for piece in (slice(PROBE), slice(PROBE, None)):
        rows[piece] = blocks.index.find(keys.take(piece))
        hits[piece] = np.logical_and.accumulate(_readable(space, rows[piece]))
        if not all_true(hits[piece]):
            break
    return rows, hits


def _readable(space: Space, rows: Ints) -> Bools:
    """Whether these blocks are readable; -1 is none."""
    readable: Bools = (rows >= 0) & (space.blocks.missing[rows] == 0)
    return readable


def _list(hits: Bools) -> list[bool]:
    answer: list[bool] = hits.tolist()
    return answer


def _chain(space: Space, rows: Ints) -> Chain:
    return Chain(space.blocks, rows[first_of_each(rows)] if len(rows) > 1 else rows)


def _count(space: Space, hits: Bools) -> None:
    num_hits = int(np.count_nonzero(hits))
    space.hits += num_hits
    space.misses += len(hits) - num_hits


def _check_shard(space: Space, shard: int) -> None:
    if not 0 <= shard < space.num_shards or space.shard_bytes[shard] is None:
        raise InvalidRequest(f"group {space.group}: no rank has registered shard {shard} (of {space.num_shards})")


def _close(grant: StoreGrant | LoadGrant) -> None:
    require(grant.open, "the store or load has ended before")
    grant.open = False
