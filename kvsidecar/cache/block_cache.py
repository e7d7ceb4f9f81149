"""Which blocks the pool has, who needs them now, and which go when room is needed. It decides; it moves no byte.

Not thread-safe: the daemon calls it from its event loop only. Times are seconds on one clock of the caller's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from kvsidecar.cache.block import NO_SLOT, Block, Lease, LoadGrant, Reservation, Space, StoreGrant
from kvsidecar.cache.eviction import EvictionPolicy, LruPolicy, choose_victims
from kvsidecar.cache.integrity import check_integrity
from kvsidecar.cache.leases import LeaseTable
from kvsidecar.cache.slots import SlotAllocator, SlotState, size_class
from kvsidecar.errors import InvalidRequest, NamespaceMismatch
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
    """The decisions of the daemon about blocks.

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
        self._slots = allocator
        self._policy = policy
        self._spaces: dict[tuple[Namespace, int], Space] = {}
        self._leases = LeaseTable(next_id)
        self._loads: set[LoadGrant] = set()
        self._tick = 0
        """Number of the request: blocks of one request share it."""
        self._leased_bytes = 0
        self._num_blocks = 0
        self._readable_blocks = 0
        self._evicted_blocks = 0
        self._evicted_bytes = 0

    # -- spaces ------------------------------------------------------------------------------------------------

    @property
    def spaces(self) -> list[Space]:
        return list(self._spaces.values())

    def find_space(self, namespace: Namespace, group: int) -> Space | None:
        return self._spaces.get((namespace, group))

    def open_space(self, namespace: Namespace, group: int, num_shards: int, shard: int, shard_bytes: int) -> Space:
        """The space of a namespace and group, for a rank that holds ``shard`` with ``shard_bytes`` bytes per block.

        Each call needs its `close_space`.

        Raises:
            InvalidRequest: the numbers make no sense, or no slab is large enough for the shard.
            NamespaceMismatch: another rank registered another number of shards or another size of this shard.
        """
        if not 0 <= shard < num_shards:
            raise InvalidRequest(f"group {group}: shard is {shard}; it must be 0 to num_shards - 1 ({num_shards - 1})")
        if shard_bytes <= 0:
            raise InvalidRequest(f"group {group}: shard {shard} has {shard_bytes} bytes per block; it must have some")
        if not self._slots.fits(shard_bytes):
            raise InvalidRequest(
                f"group {group}: one block of shard {shard} has {shard_bytes} bytes, but the largest slot of this pool "
                f"has {self._slots.largest_slot}; the daemon needs a larger --slab-size (and pool)"
            )
        space = self._spaces.get((namespace, group))
        if space is None:
            space = Space(namespace, group, num_shards, self._policy())
            self._spaces[namespace, group] = space
        _check_geometry(space, num_shards, shard, shard_bytes)
        space.shard_bytes[shard] = shard_bytes
        space.slot_sizes[shard] = size_class(shard_bytes)
        space.users += 1
        return space

    def close_space(self, space: Space) -> None:
        """A rank has gone. The space and its sizes are forgotten when it has neither ranks nor blocks."""
        _require(space.users > 0, "the space was closed more often than opened")
        space.users -= 1
        self._drop_if_unused(space)

    # -- lookup and leases -------------------------------------------------------------------------------------

    def lookup(self, space: Space, hashes: Sequence[bytes], mode: LookupMode) -> list[bool]:
        """Per hash whether it is readable; with `LookupMode.PREFIX` False from the first that is not.

        Counts hits and misses. It is no use of the blocks: only a lease, a load or a store is.
        """
        hits = [block is not None for block in self._find(space, hashes, mode)]
        _count(space, hits)
        return hits

    def lookup_and_lease(
        self, parts: Sequence[Part], mode: LookupMode, now: float, ttl: float, owner: Hashable
    ) -> tuple[Lease | None, list[list[bool]]]:
        """`lookup` of all parts, and a lease on all hits until ``now + ttl`` seconds. No lease if there is no hit."""
        found = [self._find(space, hashes, mode) for space, hashes in parts]
        hits = [[block is not None for block in blocks] for blocks in found]
        for (space, _), part_hits in zip(parts, hits, strict=True):
            _count(space, part_hits)
        chains = [[block for block in blocks if block is not None] for blocks in found]
        if not any(chains):
            return None, hits
        for chain in chains:
            for block in chain:
                self._pin(block)
        return self._leases.add(owner, chains, now + ttl), hits

    def lease(self, lease_id: int, now: float) -> Lease | None:
        """The lease if it is alive."""
        return self._leases.get(lease_id, now)

    def renew(self, lease_id: int, now: float, ttl: float) -> bool:
        """Let the lease end at ``now + ttl``. False if it is not alive any more."""
        return self._leases.renew(lease_id, now, now + ttl)

    def release(self, lease_id: int) -> bool:
        """End a lease. False if there is none (any more)."""
        lease = self._leases.pop(lease_id)
        if lease is not None:
            self._end_leases([lease])
        return lease is not None

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
        """
        for space, shard, _ in parts:
            _require(space.users > 0, "the space was closed")
            _check_shard(space, shard)
        grant, created = self._plan_store(parts)
        needs = Counter(map(_slot_size, grant.reservations))
        if not self._make_room(needs, grant):
            return Refusal.POOL_FULL
        if node is not None and self._slots.supply(needs, node).unmet() is not None:
            node = None  # opening a slab there might take it from another size class of this request: any slot will do
        for block in created:
            block.space.blocks[block.hash] = block
        self._num_blocks += len(created)
        self._reserve(grant.reservations, node)
        if not grant.reservations:
            self._touch(grant.chains, self._next_tick())
        return grant

    def seal(self, reservation: Reservation) -> bool:
        """The shard is complete. True if its block became readable.

        A block that is sealed later counts as used later; of a whole request use `seal_all`.

        Raises:
            AssertionError: the reservation has ended before.
        """
        return self._seal(reservation, self._next_tick())

    def seal_all(self, grant: StoreGrant) -> int:
        """Seal what is still open, and use the blocks that were present too. The number that became readable."""
        tick = self._next_tick()
        unsealed = [reservation for reservation in reversed(grant.reservations) if reservation.open]
        readable = sum([self._seal(reservation, tick) for reservation in unsealed])
        if grant.present:
            self._touch(grant.chains, tick)
        return readable

    def abort(self, reservation: Reservation) -> None:
        """The shard will not come, and nothing writes to its slot any more: the slot is free.

        Raises:
            AssertionError: the reservation has ended before.
        """
        self._slots.free(self._end_reservation(reservation))
        self._settle(reservation.block, self._next_tick())

    def abort_all(self, grant: StoreGrant) -> None:
        """Abort what is still open."""
        for reservation in grant.reservations:
            if reservation.open:
                self.abort(reservation)

    def quarantine(self, reservation: Reservation) -> None:
        """Nobody knows whether something still writes to the slot: it is never used again.

        Raises:
            AssertionError: the reservation has ended before.
        """
        self._slots.quarantine(self._end_reservation(reservation))
        self._settle(reservation.block, self._next_tick())

    def quarantine_all(self, grant: StoreGrant) -> None:
        """Quarantine what is still open."""
        for reservation in grant.reservations:
            if reservation.open:
                self.quarantine(reservation)

    # -- load --------------------------------------------------------------------------------------------------

    def begin_load(self, parts: Sequence[ShardPart], lease_id: int | None, now: float) -> LoadGrant | Refusal:
        """Pin all blocks until `end_load`, and say where this shard of each lies.

        All or nothing: `Refusal.STALE_LEASE` if a lease is named that is not alive at ``now``, `Refusal.NOT_FOUND` if
        a block is not readable.

        Raises:
            InvalidRequest: no rank with this shard has attached.
        """
        if lease_id is not None and self._leases.get(lease_id, now) is None:
            return Refusal.STALE_LEASE
        chains: list[list[Block]] = []
        for space, shard, hashes in parts:
            _check_shard(space, shard)
            chain = [block for block in self._find(space, hashes, LookupMode.PREFIX) if block is not None]
            if len(chain) < len(hashes):
                return Refusal.NOT_FOUND
            chains.append(chain)
        for chain in chains:
            for block in chain:
                self._pin(block)
        slots = [[block.slot_of(shard) for block in chain] for (_, shard, _), chain in zip(parts, chains, strict=True)]
        grant = LoadGrant(slots, chains)
        self._loads.add(grant)
        return grant

    def end_load(self, grant: LoadGrant) -> None:
        """Nothing reads the slots any more.

        Raises:
            AssertionError: the load has ended before.
        """
        self._end_load(grant)
        self._loads.remove(grant)
        self._unpin(grant.chains, self._next_tick())

    def quarantine_load(self, grant: LoadGrant) -> None:
        """Nobody knows whether something still reads the slots: the blocks stay pinned, and readable, for ever.

        Raises:
            AssertionError: the load has ended before.
        """
        self._end_load(grant)

    # -- all of it ---------------------------------------------------------------------------------------------

    def clear(self, namespace: Namespace | None = None) -> int:
        """Forget the blocks of one namespace, or all. The number of blocks that are no longer readable.

        None of them is found from now on. Slots that a lease, a load or a store needs are freed when the last of these
        ends. Takes time in proportion to the number of blocks.
        """
        spaces = [space for space in self._spaces.values() if namespace is None or space.namespace == namespace]
        before = self._readable_blocks
        for space in spaces:
            for block in list(space.blocks.values()):
                self._forget(block)
            self._drop_if_unused(space)
        return before - self._readable_blocks

    def stats(self) -> CacheStats:
        slots = self._slots
        evictable = slots.bytes_in(SlotState.EVICTABLE)
        return CacheStats(
            total_bytes=slots.total_bytes,
            used_bytes=slots.bytes_in(SlotState.HELD) + evictable,
            free_bytes=slots.free_bytes,
            reserved_bytes=slots.bytes_in(SlotState.RESERVED),
            quarantined_bytes=slots.bytes_in(SlotState.QUARANTINED),
            wasted_bytes=slots.wasted_bytes,
            evictable_bytes=evictable,
            leased_bytes=self._leased_bytes,
            blocks=self._num_blocks,
            readable_blocks=self._readable_blocks,
            leases=len(self._leases),
            loads=len(self._loads),
            evicted_blocks=self._evicted_blocks,
            evicted_bytes=self._evicted_bytes,
        )

    def check_integrity(self) -> None:
        """Recount everything. For tests and for ``doctor``: it looks at every slot.

        Raises:
            AssertionError: with what does not add up.
        """
        check_integrity(self)

    # -- inside: store -----------------------------------------------------------------------------------------

    def _plan_store(self, parts: Sequence[ShardPart]) -> tuple[StoreGrant, list[Block]]:
        """What a store needs, and the blocks it would add to the cache. Nothing changes yet."""
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

    def _make_room(self, needs: Counter[int], grant: StoreGrant) -> bool:
        """Evict until the needs of the grant can be met. False, with nothing evicted, if they cannot."""
        if self._slots.supply(needs).unmet() is None:
            return True
        protected = {block for chain in grant.chains for block in chain}
        victims = choose_victims(needs, self._slots, self._spaces.values(), protected)
        for block in victims or ():
            self._evict(block)
        return victims is not None

    def _reserve(self, reservations: Sequence[Reservation], node: int | None) -> None:
        # The larger classes first, as `Supply` counted.
        for reservation in sorted(reservations, key=_slot_size, reverse=True):
            block = reservation.block
            if block.evictable:
                self._hold(block)
            slot = self._slots.allocate(_slot_size(reservation), block, node)
            assert slot is not None, "there were fewer slots than planned"
            reservation.slot = slot
            block.set_slot(reservation.shard, slot)

    def _seal(self, reservation: Reservation, tick: int) -> bool:
        _require(reservation.open, "the reservation has ended before")
        reservation.open = False
        block = reservation.block
        block.sealed |= 1 << reservation.shard
        self._slots.seal(reservation.slot)
        self._settle(block, tick)
        if block.detached or not block.readable:
            return False
        block.space.readable += 1
        self._readable_blocks += 1
        return True

    def _end_reservation(self, reservation: Reservation) -> int:
        _require(reservation.open, "the reservation has ended before")
        reservation.open = False
        reservation.block.set_slot(reservation.shard, NO_SLOT)
        return reservation.slot

    # -- inside: the life of a block ---------------------------------------------------------------------------

    def _next_tick(self) -> int:
        self._tick += 1
        return self._tick

    def _find(self, space: Space, hashes: Sequence[bytes], mode: LookupMode) -> list[Block | None]:
        blocks: list[Block | None] = []
        find, all_sealed = space.blocks.get, space.all_sealed
        for block_hash in hashes:
            block = find(block_hash)
            if block is not None and block.sealed != all_sealed:
                block = None
            if block is None and mode is LookupMode.PREFIX:
                break
            blocks.append(block)
        blocks.extend([None] * (len(hashes) - len(blocks)))
        return blocks

    def _pin(self, block: Block) -> None:
        if not block.pins:
            self._hold(block)
            self._leased_bytes += block.space.block_bytes
        block.pins += 1

    def _unpin(self, chains: Iterable[Sequence[Block]], tick: int) -> None:
        for chain in chains:
            for block in reversed(chain):
                block.pins -= 1
                if not block.pins:
                    self._leased_bytes -= block.space.block_bytes
                    self._settle(block, tick)

    def _end_leases(self, leases: list[Lease]) -> list[Lease]:
        for lease in leases:
            self._unpin(lease.chains, self._next_tick())
        return leases

    def _end_load(self, grant: LoadGrant) -> None:
        _require(grant.open, "the load has ended before")
        grant.open = False

    def _touch(self, chains: Iterable[Sequence[Block]], tick: int) -> None:
        """The blocks were used; the deepest first, so that it is the oldest of them."""
        for block in (block for chain in chains for block in reversed(chain) if block.evictable):
            block.space.policy.remove(block)
            block.last_used = tick
            block.space.policy.insert(block)
            for slot in block.held_slots():
                self._slots.touch(slot, tick)

    def _hold(self, block: Block) -> None:
        """An evictable block is needed now."""
        block.space.policy.remove(block)
        for slot in block.held_slots():
            self._slots.hold(slot)

    def _settle(self, block: Block, tick: int) -> None:
        """A pin or a reservation of the block has ended, and it is not evictable yet."""
        if block.pins or block.filling:
            return
        if block.detached:
            self._free(block)
        elif block.sealed:
            block.last_used = tick
            block.space.policy.insert(block)
            for slot in block.held_slots():
                self._slots.let_go(slot, tick)
        else:
            self._forget(block)
            self._drop_if_unused(block.space)

    def _evict(self, block: Block) -> None:
        self._evicted_blocks += 1
        self._evicted_bytes += sum(self._slots.slab_of(slot).size for slot in block.held_slots())
        self._forget(block)
        self._drop_if_unused(block.space)

    def _forget(self, block: Block) -> None:
        """Nothing finds the block from now on. Its slots are freed now if nobody needs them."""
        space = block.space
        del space.blocks[block.hash]
        self._num_blocks -= 1
        if block.readable:
            space.readable -= 1
            self._readable_blocks -= 1
        if block.evictable:
            space.policy.remove(block)
            self._free(block)
        block.hash = b""

    def _free(self, block: Block) -> None:
        for slot in block.held_slots():
            self._slots.free(slot)
        block.slots = NO_SLOT if block.space.num_shards == 1 else [NO_SLOT] * block.space.num_shards
        block.sealed = 0

    def _drop_if_unused(self, space: Space) -> None:
        if not space.users and not space.blocks and not space.dropped:
            space.dropped = True
            del self._spaces[space.namespace, space.group]


def _check_geometry(space: Space, num_shards: int, shard: int, shard_bytes: int) -> None:
    hint = (
        "Instances whose KV differs in layout or dtype must differ in kv_layout or dtype of the namespace; "
        "if the blocks of the other kind are not wanted any more, clear the namespace"
    )
    if space.num_shards != num_shards:
        raise NamespaceMismatch(
            f"group {space.group}: this rank says a block has {num_shards} shards, but {space.num_shards} are registered "
            f"in this namespace. {hint}"
        )
    if space.shard_bytes[shard] not in (None, shard_bytes):
        raise NamespaceMismatch(
            f"group {space.group}: this rank says shard {shard} has {shard_bytes} bytes per block, but "
            f"{space.shard_bytes[shard]} are registered in this namespace. {hint}"
        )


def _check_shard(space: Space, shard: int) -> None:
    if not 0 <= shard < space.num_shards or space.shard_bytes[shard] is None:
        raise InvalidRequest(f"group {space.group}: no rank has registered shard {shard} (of {space.num_shards})")


def _slot_size(reservation: Reservation) -> int:
    return reservation.block.space.slot_sizes[reservation.shard]


def _count(space: Space, hits: list[bool]) -> None:
    num_hits = sum(hits)
    space.hits += num_hits
    space.misses += len(hits) - num_hits


def _require(condition: bool, otherwise: str) -> None:
    """An assertion that ``python -O`` keeps: it guards other people's memory."""
    if not condition:
        raise AssertionError(otherwise)
