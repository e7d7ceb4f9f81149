"""Which blocks the pool has, who needs them now, and which go when room is needed. It decides; it moves no byte.

Not thread-safe: the daemon calls it from its event loop only. Times are seconds on one clock of the caller's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from kvsidecar.cache.block import NO_SLOT, Block, Lease, LoadGrant, Reservation, Space, StoreGrant
from kvsidecar.cache.block_table import BlockTable, require
from kvsidecar.cache.eviction import EvictionPolicy, LruPolicy, choose_victims
from kvsidecar.cache.integrity import check_integrity
from kvsidecar.cache.leases import LeaseTable
from kvsidecar.cache.slots import SlotAllocator, SlotState
from kvsidecar.errors import InvalidRequest
from kvsidecar.types import LookupMode, Namespace, Refusal

Part = tuple[Space, Sequence[bytes]]
"""Block hashes of one group, in the order of the prefix. A request has one part per group."""
ShardPart = tuple[Space, int, Sequence[bytes]]
"""The same with the shard that is stored or loaded."""


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
    """The decisions of the daemon about blocks. Every call but `clear` is O(hashes it is given or has given out).

    Args:
        allocator: of the pool, unused so far.
        policy: makes the eviction policy of a new space.
        next_id: source of lease ids. Default: 0, 1, 2, ...; a random source keeps clients from guessing each other's.
    """

    def __init__(
        self,
        allocator: SlotAllocator[Block],
        policy: Callable[[], EvictionPolicy] = LruPolicy,
        next_id: Callable[[], int] | None = None,
    ) -> None:
        self._table = BlockTable(allocator, policy)
        self._leases = LeaseTable(next_id)
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

    def open_space(self, namespace: Namespace, group: int, num_shards: int, shard: int, shard_bytes: int) -> Space:
        """The space of a namespace and group, for a rank that holds ``shard`` with ``shard_bytes`` bytes per block.

        Each call needs its `close_space`.

        Raises:
            InvalidRequest: the numbers make no sense, or no slab is large enough for the shard.
            NamespaceMismatch: another rank registered another number of shards or another size of this shard.
        """
        return self._table.open_space(namespace, group, num_shards, shard, shard_bytes)

    def close_space(self, space: Space) -> None:
        """A rank has gone. The space and its sizes are forgotten when it has neither ranks nor blocks.

        Raises:
            AssertionError: it was closed more often than opened.
        """
        self._table.close_space(space)

    # -- lookup and leases -------------------------------------------------------------------------------------

    def lookup(self, space: Space, hashes: Sequence[bytes], mode: LookupMode) -> list[bool]:
        """Per hash whether it is readable; with `LookupMode.PREFIX` False from the first that is not.

        Counts hits and misses. It is no use of the blocks: only a lease, a load or a store is.
        """
        _, hits = _find(space, hashes, mode)
        _count(space, hits)
        return hits

    def lookup_and_lease(
        self, parts: Sequence[Part], mode: LookupMode, now: float, ttl: float, owner: Hashable
    ) -> tuple[Lease | None, list[list[bool]]]:
        """`lookup` of all parts, and a lease on all hits until ``now + ttl``. No lease if there is no hit."""
        found = [_find(space, hashes, mode) for space, hashes in parts]
        for (space, _), (_, hits) in zip(parts, found, strict=True):
            _count(space, hits)
        chains = [chain for chain, _ in found]
        lease = None
        if any(chains):
            self._table.pin(chains)
            lease = self._leases.add(owner, chains, now + ttl)
        return lease, [hits for _, hits in found]

    def lease(self, lease_id: int, now: float) -> Lease | None:
        """The lease if it is alive."""
        return self._leases.get(lease_id, now)

    def renew(self, lease_id: int, now: float, ttl: float) -> bool:
        """Let the lease end at ``now + ttl``. False if it is not alive any more."""
        return self._leases.renew(lease_id, now, now + ttl)

    def release(self, lease_id: int) -> bool:
        """End a lease. False if there is none (any more)."""
        lease = self._leases.pop(lease_id)
        return lease is not None and bool(self._end_leases([lease]))

    def expire(self, now: float) -> list[Lease]:
        """End the leases whose time is over, and return them."""
        return self._end_leases(self._leases.pop_expired(now))

    def next_expiry(self) -> float | None:
        """`expire` need not be called before this time; None while there is nothing to expire."""
        return self._leases.next_expiry()

    def drop_owner(self, owner: Hashable) -> list[Lease]:
        """End all leases of an owner that has gone, and return them."""
        return self._end_leases(self._leases.pop_owner(owner))

    # -- store -------------------------------------------------------------------------------------------------

    def begin_store(self, parts: Sequence[ShardPart], node: int | None = None) -> StoreGrant | Refusal:
        """Reserve a slot for every block of which this shard is neither sealed nor being filled.

        All or nothing: `Refusal.POOL_FULL` if not every slot can be had, and then nothing was evicted or changed.

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
        grant, created = _plan_store(parts)
        slots = self._table.slots
        needs = Counter([reservation.slot_size for reservation in grant.reservations])
        if slots.supply(needs).unmet() is not None and not self._make_room(needs, grant):
            return Refusal.POOL_FULL
        if node is not None and not slots.can_prefer(node, needs):
            node = None  # opening a slab there might take it from another size class of this request: any slot will do
        for block in created:
            self._table.file(block)
        # The larger size classes first, as `Supply` counted.
        for reservation in sorted(grant.reservations, key=lambda reservation: reservation.slot_size, reverse=True):
            self._table.reserve(reservation, node)
        if not grant.reservations:
            self._table.touch(grant.chains, self._next_tick())
        return grant

    def seal(self, reservation: Reservation) -> bool:
        """The shard is complete. True if its block became readable.

        A block that is sealed later counts as used later; for a whole request use `seal_all`.

        Raises:
            AssertionError: the reservation has ended before.
        """
        return self._table.seal(reservation, self._next_tick())

    def seal_all(self, grant: StoreGrant) -> int:
        """Seal what is still open, and use the blocks that were present too. The number that became readable."""
        tick = self._next_tick()
        readable = sum([self._table.seal(reservation, tick) for reservation in reversed(_open_ones(grant))])
        if grant.present:
            self._table.touch(grant.chains, tick)
        return readable

    def abort(self, reservation: Reservation) -> None:
        """The shard will not come, and nothing writes to its slot any more: the slot is free.

        Raises:
            AssertionError: the reservation has ended before.
        """
        self._table.abort(reservation, self._next_tick())

    def abort_all(self, grant: StoreGrant) -> None:
        """Abort what is still open."""
        for reservation in _open_ones(grant):
            self.abort(reservation)

    def quarantine(self, reservation: Reservation) -> None:
        """Nobody knows whether something still writes to the slot: it is never used again.

        Raises:
            AssertionError: the reservation has ended before.
        """
        self._table.quarantine(reservation, self._next_tick())

    def quarantine_all(self, grant: StoreGrant) -> None:
        """Quarantine what is still open."""
        for reservation in _open_ones(grant):
            self.quarantine(reservation)

    def _make_room(self, needs: Counter[int], grant: StoreGrant) -> bool:
        """Evict until the needs of the grant can be met. False, with nothing evicted, if they cannot."""
        protected = {block for chain in grant.chains for block in chain}
        victims = choose_victims(needs, self._table.slots, self._table.spaces.values(), protected)
        for block in victims or ():
            self._table.evict(block)
        return victims is not None

    # -- load --------------------------------------------------------------------------------------------------

    def begin_load(self, parts: Sequence[ShardPart], lease_id: int | None, now: float) -> LoadGrant | Refusal:
        """Pin all blocks until `end_load`, and say where this shard of each lies.

        All or nothing: `Refusal.STALE_LEASE` if a lease is named that is not alive at ``now``, `Refusal.NOT_FOUND` if
        a block is not readable.

        Raises:
            InvalidRequest: no rank with this shard has attached.
        """
        for space, shard, _ in parts:
            _check_shard(space, shard)
        if lease_id is not None and self._leases.get(lease_id, now) is None:
            return Refusal.STALE_LEASE
        found = [_find(space, hashes, LookupMode.PREFIX) for space, _, hashes in parts]
        if not all(all(hits) for _, hits in found):
            return Refusal.NOT_FOUND
        chains = [chain for chain, _ in found]
        self._table.pin(chains)
        slots = [[block.slot_of(shard) for block in chain] for (_, shard, _), chain in zip(parts, chains, strict=True)]
        grant = LoadGrant(slots, chains)
        self._loads.add(grant)
        return grant

    def end_load(self, grant: LoadGrant) -> None:
        """Nothing reads the slots any more.

        Raises:
            AssertionError: the load has ended before.
        """
        _end_load(grant)
        self._loads.remove(grant)
        self._table.unpin(grant.chains, self._next_tick())

    def quarantine_load(self, grant: LoadGrant) -> None:
        """Nobody knows whether something still reads the slots: the blocks stay pinned, and readable, for ever.

        Raises:
            AssertionError: the load has ended before.
        """
        _end_load(grant)

    def condemn(self, grant: LoadGrant, part: int, index: int) -> None:
        """A shard that this load was about to read is not what was sealed: its block is a miss from now on, and its
        slot is never used again. The load must still be ended.

        Raises:
            AssertionError: the load has ended before.
        """
        require(grant.open, "the load has ended before")
        self._table.condemn(grant.chains[part][index], grant.slots[part][index])

    # -- all of it ---------------------------------------------------------------------------------------------

    def clear(self, namespace: Namespace | None = None) -> int:
        """Forget the blocks of one namespace, or all. The number of blocks that are no longer readable.

        None of them is found from now on. Slots that a lease, a load or a store needs are freed when the last of these
        ends. O(blocks).
        """
        before = self._table.readable_blocks
        for space in self.spaces:
            if namespace is None or space.namespace == namespace:
                self._table.clear(space)
        return before - self._table.readable_blocks

    def stats(self) -> CacheStats:
        """Gauges and counters of this moment; O(1)."""
        table, slots = self._table, self._table.slots
        evictable = slots.bytes_in(SlotState.EVICTABLE)
        return CacheStats(
            total_bytes=slots.total_bytes,
            used_bytes=slots.bytes_in(SlotState.HELD) + evictable,
            free_bytes=slots.free_bytes,
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

    def check_integrity(self) -> None:
        """Recount everything: for tests, since it looks at every slot.

        Raises:
            AssertionError: with what does not add up.
        """
        check_integrity(self)

    def _end_leases(self, leases: list[Lease]) -> list[Lease]:
        for lease in leases:
            self._table.unpin(lease.chains, self._next_tick())
        return leases

    def _next_tick(self) -> int:
        self._tick += 1
        return self._tick


def _find(space: Space, hashes: Sequence[bytes], mode: LookupMode) -> tuple[list[Block], list[bool]]:
    """The readable ones of these blocks, and per hash whether it is among them."""
    chain: list[Block] = []
    hits: list[bool] = []
    find, all_sealed = space.blocks.get, space.all_sealed
    for block_hash in hashes:
        block = find(block_hash)
        if block is not None and block.sealed == all_sealed:
            chain.append(block)
            hits.append(True)
        elif mode is LookupMode.PREFIX:
            break
        else:
            hits.append(False)
    hits.extend([False] * (len(hashes) - len(hits)))
    return chain, hits


def _count(space: Space, hits: list[bool]) -> None:
    num_hits = sum(hits)
    space.hits += num_hits
    space.misses += len(hits) - num_hits


def _check_shard(space: Space, shard: int) -> None:
    if not 0 <= shard < space.num_shards or space.shard_bytes[shard] is None:
        raise InvalidRequest(f"group {space.group}: no rank has registered shard {shard} (of {space.num_shards})")


def _plan_store(parts: Sequence[ShardPart]) -> tuple[StoreGrant, list[Block]]:
    """What a store needs, and the blocks it would add. Nothing changes yet, and no reservation has a slot."""
    grant = StoreGrant(chains=[[] for _ in parts])
    created: dict[tuple[Space, bytes], Block] = {}
    wanted: dict[Block, int] = {}  # bits of the shards that this request reserves
    for part, (space, shard, hashes) in enumerate(parts):
        bit = 1 << shard
        for index, block_hash in enumerate(hashes):
            block = space.blocks.get(block_hash) or created.get((space, block_hash))
            if block is None:
                block = created[space, block_hash] = Block(space, block_hash)
            if block.sealed & bit:
                grant.present += 1
            elif block.slot_of(shard) != NO_SLOT or wanted.get(block, 0) & bit:
                grant.in_flight += 1
                continue
            else:
                wanted[block] = wanted.get(block, 0) | bit
                grant.reservations.append(Reservation(block, shard, part, index))
            grant.chains[part].append(block)
    return grant, list(created.values())


def _open_ones(grant: StoreGrant) -> list[Reservation]:
    return [reservation for reservation in grant.reservations if reservation.open]


def _end_load(grant: LoadGrant) -> None:
    require(grant.open, "the load has ended before")
    grant.open = False
