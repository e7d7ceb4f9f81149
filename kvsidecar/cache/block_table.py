"""The blocks of all spaces, and the life of a block: filed, filled, pinned, evictable, forgotten, freed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvsidecar.cache.block import NO_SLOT, Block, Reservation, Space
from kvsidecar.cache.eviction import EvictionPolicy
from kvsidecar.cache.slots import SlotAllocator, size_class
from kvsidecar.errors import InvalidRequest, NamespaceMismatch
from kvsidecar.types import Namespace

MISMATCH_HINT = (
    "Instances whose KV differs in layout or type must differ in kv_layout or dtype of the namespace; if the blocks of "
    "the other kind are not wanted any more, clear the namespace"
)


def require(condition: bool, otherwise: str) -> None:
    """An assertion that ``python -O`` keeps: it guards the contents of slots.

    Raises:
        AssertionError: a caller broke the order of calls.
    """
    if not condition:
        raise AssertionError(otherwise)


class BlockTable:
    """Files blocks and moves them between the states of their slots. `BlockCache` decides when.

    A block is evictable, and then the policy of its space has it and its sealed slots are EVICTABLE; or it is not,
    and they are HELD. Every method leaves it in one of the two.
    """

    def __init__(self, allocator: SlotAllocator[Block], policy: Callable[[], EvictionPolicy]) -> None:
        self.slots = allocator
        self._policy = policy
        self.spaces: dict[tuple[Namespace, int], Space] = {}
        self.num_blocks = 0
        self.readable_blocks = 0
        self.leased_bytes = 0
        """Bytes of the slots of pinned blocks."""
        self.evicted_blocks = 0
        self.evicted_bytes = 0
        self._condemned: set[int] = set()
        """Slots to withdraw when their blocks are freed."""

    # -- spaces ------------------------------------------------------------------------------------------------

    def open_space(self, namespace: Namespace, group: int, num_shards: int, shard: int, shard_bytes: int) -> Space:
        """See `BlockCache.open_space`."""
        if not 0 <= shard < num_shards:
            raise InvalidRequest(f"group {group}: shard is {shard}; it must be 0 to num_shards - 1 ({num_shards - 1})")
        if shard_bytes <= 0:
            raise InvalidRequest(f"group {group}: shard {shard} has {shard_bytes} bytes per block; it must have some")
        if not self.slots.fits(shard_bytes):
            raise InvalidRequest(
                f"group {group}: one block of shard {shard} has {shard_bytes} bytes, but the largest slot of this pool "
                f"has {self.slots.largest_slot}; the daemon needs a larger --slab-size (and pool)"
            )
        space = self.spaces.get((namespace, group)) or Space(namespace, group, num_shards, self._policy())
        _check_geometry(space, num_shards, shard, shard_bytes)
        self.spaces[namespace, group] = space
        space.shard_bytes[shard] = shard_bytes
        space.slot_sizes[shard] = size_class(shard_bytes)
        space.users += 1
        return space

    def close_space(self, space: Space) -> None:
        """See `BlockCache.close_space`."""
        require(space.users > 0, "the space was closed more often than opened")
        space.users -= 1
        self._drop_if_unused(space)

    # -- being filled ------------------------------------------------------------------------------------------

    def file(self, block: Block) -> None:
        """Make a new block findable."""
        block.space.blocks.add(block)
        self.num_blocks += 1

    def reserve(self, reservation: Reservation, node: int | None) -> None:
        """Give the reservation a slot; there must be one."""
        block = reservation.block
        if block.evictable:
            self._hold(block)
        slot = self.slots.allocate(reservation.slot_size, block, node)
        if slot is None:
            raise AssertionError("there were fewer free slots than planned")
        reservation.slot = slot
        block.set_slot(reservation.shard, slot)

    def seal(self, reservation: Reservation, tick: int) -> bool:
        """The shard is complete. True if its block became readable."""
        _end(reservation)
        block = reservation.block
        block.sealed |= 1 << reservation.shard
        self.slots.seal(reservation.slot)
        became_readable = block.readable and not block.detached
        if became_readable:
            block.space.readable += 1
            self.readable_blocks += 1
        self._settle(block, tick)
        return became_readable

    def abort(self, reservation: Reservation, tick: int) -> None:
        """The shard will not come: free its slot."""
        _end(reservation)
        self.slots.free(reservation.slot)
        self._lose_shard(reservation, tick)

    def quarantine(self, reservation: Reservation, tick: int) -> None:
        """The shard may still be written: give its slot up for ever."""
        _end(reservation)
        self.slots.quarantine(reservation.slot)
        self._lose_shard(reservation, tick)

    # -- being used --------------------------------------------------------------------------------------------

    def pin(self, chains: Iterable[Sequence[Block]]) -> None:
        """Readable blocks must stay until `unpin`. One that comes twice is pinned twice."""
        for chain in chains:
            for block in chain:
                if not block.pins:
                    self._hold(block)
                    self.leased_bytes += block.space.block_bytes
                block.pins += 1

    def unpin(self, chains: Iterable[Sequence[Block]], tick: int) -> None:
        """The blocks were used until now; the deepest first, so that it is the oldest of them."""
        for chain in chains:
            for block in reversed(chain):
                block.pins -= 1
                if not block.pins:
                    self.leased_bytes -= block.space.block_bytes
                    self._settle(block, tick)

    def touch(self, chains: Iterable[Sequence[Block]], tick: int) -> None:
        """The evictable ones of the blocks were used; the deepest first, so that it is the oldest of them."""
        for block in (block for chain in chains for block in reversed(chain) if block.evictable):
            block.space.policy.remove(block)
            block.last_used = tick
            block.space.policy.insert(block)
            for slot in block.held_slots():
                self.slots.touch(slot, tick)

    # -- going -------------------------------------------------------------------------------------------------

    def evict(self, block: Block) -> None:
        """Make room: forget an evictable block."""
        require(block.evictable, "a block was chosen for eviction that is in use")
        self.evicted_blocks += 1
        self.evicted_bytes += sum(self.slots.slab_of(slot).size for slot in block.held_slots())
        self._forget(block)
        self._drop_if_unused(block.space)

    def clear(self, space: Space) -> None:
        """Forget all blocks of the space; slots that are in use are freed when they are not any more."""
        for block in space.blocks:
            self._forget(block)
        self._drop_if_unused(space)

    def condemn(self, block: Block, slot: int) -> None:
        """The slot of a readable block holds wrong bytes: forget the block, and never use the slot again.

        Others may be reading it now; it is withdrawn when they have ended.
        """
        self._condemned.add(slot)
        if not block.detached:
            self._forget(block)
            self._drop_if_unused(block.space)

    # -- inside ------------------------------------------------------------------------------------------------

    def _hold(self, block: Block) -> None:
        """An evictable block is needed now."""
        block.space.policy.remove(block)
        for slot in block.held_slots():
            self.slots.hold(slot)

    def _settle(self, block: Block, tick: int) -> None:
        """A pin or a reservation of the block has ended: what becomes of it if that was the last?"""
        if block.pins or block.filling:
            return
        if block.detached:
            self._free(block)
        elif block.sealed:
            block.last_used = tick
            block.space.policy.insert(block)
            for slot in block.held_slots():
                self.slots.let_go(slot, tick)
        else:
            self._forget(block)
            self._drop_if_unused(block.space)

    def _lose_shard(self, reservation: Reservation, tick: int) -> None:
        reservation.block.set_slot(reservation.shard, NO_SLOT)
        self._settle(reservation.block, tick)

    def _forget(self, block: Block) -> None:
        """Nothing finds the block from now on. If nobody needs it, its slots are freed now."""
        space = block.space
        space.blocks.remove(block)
        self.num_blocks -= 1
        if block.readable:
            space.readable -= 1
            self.readable_blocks -= 1
        if block.evictable:
            space.policy.remove(block)
            self._free(block)
        block.hash = b""

    def _free(self, block: Block) -> None:
        for slot in block.held_slots():
            if slot in self._condemned:
                self._condemned.remove(slot)
                self.slots.condemn(slot)
            else:
                self.slots.free(slot)
        block.slots = NO_SLOT  # whoever still names the block finds it empty
        block.sealed = 0

    def _drop_if_unused(self, space: Space) -> None:
        if not space.users and not space.blocks and not space.dropped:
            space.dropped = True
            del self.spaces[space.namespace, space.group]


def _end(reservation: Reservation) -> None:
    require(reservation.open, "the reservation has ended before")
    reservation.open = False


def _check_geometry(space: Space, num_shards: int, shard: int, shard_bytes: int) -> None:
    if space.num_shards != num_shards:
        raise NamespaceMismatch(
            f"group {space.group}: this rank says a block has {num_shards} shards, but in this namespace "
            f"{space.num_shards} are registered. {MISMATCH_HINT}"
        )
    if space.shard_bytes[shard] not in (None, shard_bytes):
        raise NamespaceMismatch(
            f"group {space.group}: this rank says shard {shard} has {shard_bytes} bytes per block, but in this "
            f"namespace {space.shard_bytes[shard]} are registered. {MISMATCH_HINT}"
        )
