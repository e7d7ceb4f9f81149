"""The blocks of all spaces, and the states of a block: created, filling, referenced, evictable, detached, deleted."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from kvsidecar.cache.arrays import NO_INTS, Ints, all_true, first_of_each
from kvsidecar.cache.block_index import Keys
from kvsidecar.cache.change_log import Outlet
from kvsidecar.cache.eviction_rhythm import Rhythm
from kvsidecar.cache.grants import Chain, StorePart
from kvsidecar.cache.left_spaces import LOOKED_AT, LeftSpaces
from kvsidecar.cache.records import Records
from kvsidecar.cache.shares import Shares
from kvsidecar.cache.slabs import LARGEST_SHARE
from kvsidecar.cache.slots import SLOT_ALIGN, SlotAllocator, SlotState, size_class
from kvsidecar.cache.space_blocks import FILLING, NO_SLOT, Space, SpaceBlocks
from kvsidecar.cache.use_times import UseTimes
from kvsidecar.errors import InvalidRequest, LimitExceeded
from kvsidecar.types import Eviction, Namespace, Residency

LIST_PART = 64
"""One part in so many of a block's smallest shard is the most that the list of its slots may take: a list is in the
daemon's own memory, and is paid for with the slot that every block has."""
LIST_ENTRY = 8
"""Bytes of such a list for each shard, `SpaceBlocks.slots`."""
SPARE_ROWS = 65536
"""Rows beyond the slots of the pool: a store creates its blocks before it evicts others."""


def require(condition: bool, otherwise: str) -> None:
    """An assertion that stays on under ``python -O``: it protects the contents of slots.

    Raises:
        AssertionError: a caller broke the order of calls.
    """
    if not condition:
        raise AssertionError(otherwise)


class BlockTable:
    """Creates and deletes blocks and changes the states of their slots. `BlockCache` decides when.

    An evictable block is in the policy of its space, and its sealed slots are EVICTABLE. The sealed slots of any other
    block are IN_USE. Every method leaves each block in one of these two states.
    """

    def __init__(self, allocator: SlotAllocator, seed: int, eviction: Eviction = Eviction.LRU) -> None:
        self.slots = allocator
        self.seed = seed
        self.times = UseTimes()
        self.rhythm = Rhythm(self.times, self._look_again) if eviction is Eviction.RHYTHM else None
        self.shares = Shares()
        """Every change of a slot that a block has is accounted for here, too."""
        self.records: Records | None = None
        """Where the sealed slots are recorded, from `start_with` on."""
        self.groups: dict[Namespace, dict[int, Space]] = {}
        """The space of each group."""
        self.tables: dict[int, SpaceBlocks] = {}
        """Every table that has rows or a space, by number, including cleared ones."""
        self.left = LeftSpaces()
        """The spaces that no rank has open."""
        self._num_tables = 0
        self._cleared: deque[SpaceBlocks] = deque()
        """Cleared tables that are not completely swept."""
        self._sparse: dict[int, SpaceBlocks] = {}
        """Tables with many more rows than blocks."""
        self._dropped: list[object] = []
        """Columns of dropped tables, whose memory `free_dropped` frees."""
        self.num_blocks = 0
        self.readable_blocks = 0
        self.cleared_bytes = 0
        """Bytes of cleared blocks that nobody uses and `sweep` has not freed yet."""
        self.leased_bytes = 0
        """Bytes of the blocks that leases and loads reference."""
        self.evicted_blocks = 0
        self.evicted_bytes = 0
        self.expired_blocks = 0
        """Part of ``evicted_blocks``: those that had expired."""
        self.corrupt: set[int] = set()
        """Slots to quarantine when their blocks are freed."""
        self.outlets: dict[Namespace, Outlet] = {}
        """For the namespaces of which somebody wants to know."""

    # -- spaces ------------------------------------------------------------------------------------------------

    def start_with(self, records: Records, adopted: Sequence[SpaceBlocks]) -> None:
        """Begin with these blocks of an earlier run, all of them evictable, and record what happens from now on."""
        require(not self.tables, "the table is in use")
        self.records = records
        self.slots.new_slabs = []
        self._num_tables = records.last_number
        for blocks in adopted:
            space = blocks.space
            self.groups.setdefault(space.namespace, {})[space.group] = space
            self.tables[blocks.number] = blocks
            space.tables.append(blocks)
            self.num_blocks += len(blocks.index)
            self.readable_blocks += blocks.readable
        self.shares.adopt(adopted)

    def set_shares(self, shares: Shares) -> None:
        """Divide the pool again. What there is stays, until a store needs its slots. Of many spaces, some are divided
        at once, and the others by `Shares.move`."""
        shares.follow(self.shares, list(self.tables.values()))
        self.shares = shares
        shares.move()

    def _look_again(self) -> None:
        """The policy has another order from now on."""
        for share in self.shares:
            for order in share.orders.values():
                order.look_again()

    def open_space(
        self, namespace: Namespace, group: int, num_shards: int, shard: int, shard_bytes: int, user: Hashable = None
    ) -> Space:
        if not 0 <= shard < num_shards:
            raise InvalidRequest(f"group {group}: shard is {shard}; it must be 0 to num_shards - 1 ({num_shards - 1})")
        if shard_bytes <= 0:
            raise InvalidRequest(f"group {group}: shard {shard} has {shard_bytes} bytes per block; it must have some")
        if size_class(shard_bytes) > self.slots.largest_slot:
            raise InvalidRequest(
                f"group {group}: one block of shard {shard} has {shard_bytes} bytes, but a slot of this pool can have "
                f"no more than {self.slots.largest_slot}: set --pool-size to at least {LARGEST_SHARE} times the block"
            )
        if size_class(shard_bytes) < (least := size_class(num_shards * LIST_ENTRY * LIST_PART)):
            raise InvalidRequest(
                f"group {group}: one block of shard {shard} has {shard_bytes} bytes; as one of {num_shards} shards it "
                f"needs at least {least - SLOT_ALIGN + 1}: the daemon keeps a list of the shards of each block"
            )
        known = self.groups.get(namespace, {}).get(group)
        space = known or Space(namespace, group, num_shards)
        new_shard = space.register_shard(num_shards, shard, shard_bytes)
        if known:
            space.blocks.capacity = max(space.blocks.capacity, self.capacity(space))
            if new_shard and self.records is not None:
                self.records.open_space(space.blocks.number, namespace, group, space.shard_bytes)
        else:
            space.share = self.shares.of(namespace)
            holder = user, space.share.name
            if self.left.full(holder) and (oldest := self.left.oldest(holder)) is not None:
                self._clear_left(oldest)
            if self.left.full(holder):
                raise LimitExceeded(
                    "this user has left very many KV cache groups without engines in one share, and all of them are in "
                    "use: release the leases on their blocks, or remove the pins"
                )
            space.blocks = self._new_blocks(space)
            self.groups.setdefault(namespace, {})[group] = space
        space.users += 1
        space.user = user
        self.left.remove(space)
        return space

    def empty_space(self, hash_bytes: int) -> Space:
        space = Space(Namespace("", "", "", 0, 0, 0, "", hash_bytes), 0, 1)
        space.blocks = SpaceBlocks(space, 0, 0, self.seed)
        return space

    def close_space(self, space: Space) -> None:
        require(space.users > 0, "the space was closed more often than opened")
        space.users -= 1
        if not space.users:
            self.left.add(space)
            self._drop_if_unused(space)

    # -- store -------------------------------------------------------------------------------------------------

    def claim(self, space: Space, shard: int, keys: Keys) -> tuple[StorePart, int]:
        """Create the missing blocks, and mark this shard FILLING where this store has to fill it.

        A block whose shard is already sealed counts as present. A block whose shard is FILLING is skipped: another
        store fills it, or the same hash came earlier in this one. `reserve` assigns the slots; `unclaim` undoes this.

        Returns:
            The blocks to fill, and the number of blocks that are present.
        """
        blocks = space.blocks
        rows = blocks.index.find(keys)
        created = create_unknown(blocks, keys, rows)
        if len(created) == len(rows):  # every block is new and no hash comes twice
            blocks.slots[shard, rows] = FILLING
            return StorePart(blocks, shard, np.arange(len(rows)), rows, created, keys, rows), 0
        slots = blocks.slots[shard, rows]
        present = slots >= 0
        to_fill = (slots == NO_SLOT) & first_of_each(rows)
        index = to_fill.nonzero()[0]
        blocks.slots[shard, rows[index]] = FILLING
        used = (to_fill | present).nonzero()[0]
        part = StorePart(blocks, shard, index, rows[index], created, keys.take(used), rows[used])
        return part, int(np.count_nonzero(present))

    def unclaim(self, part: StorePart) -> None:
        """Undo `claim`. Several claims are undone in reverse order."""
        part.blocks.slots[part.shard, part.rows] = NO_SLOT
        part.blocks.index.remove(part.created)
        part.blocks.recycle(part.created)
        self._retire(part.blocks)

    def reserve(self, part: StorePart, node: int | None) -> None:
        """Allocate the slots of claimed blocks. There must be enough free ones. Call `record_cuts` after the last."""
        blocks, rows = part.blocks, part.rows
        self.num_blocks += len(part.created)
        self._mark_in_use(blocks, blocks.add_refs(rows))
        part.slots = self.slots.allocate(part.slot_size, blocks.owners(rows), node)
        self.shares.change(blocks, part.slot_size * len(rows), 0)

    def record_cuts(self) -> bool:
        """Record the slabs that `reserve` has cut. False if the records of their slots find no memory: these slots must
        be freed at once then, with which these slabs are whole again."""
        cuts, records = self.slots.new_slabs, self.records
        if not cuts or records is None:
            return True
        self.slots.new_slabs = []
        if not records.have_room(cuts):
            return False
        for cut in cuts:
            records.cut(*cut)
        return True

    def seal(self, part: StorePart, tick: int, expires: int = 0, idle: int = 0) -> int:
        """Record that the shards are complete. Returns the number of blocks that became readable.

        Args:
            expires: second; for their records only.
            idle: seconds; the same.
        """
        blocks, rows = part.blocks, part.rows
        if self.records is not None:
            words, places = blocks.index.words_of(rows), self.slots.places(part.slots)
            self.records.seal(
                blocks.number,
                part.shard,
                part.slot_size,
                part.slots,
                words,
                places,
                tick,
                expires,
                blocks.priorities_of(rows),
                idle,
            )
        blocks.slots[part.shard, rows] = part.slots
        blocks.missing[rows] -= 1
        if blocks.space.num_shards > 1:
            self.slots.seal(part.slots)
        readable = 0
        if not blocks.cleared:
            # Blocks with a missing shard are never leased or loaded, so none of these was detached individually.
            whole = blocks.missing[rows] == 0
            readable = int(np.count_nonzero(whole))
            blocks.readable += readable
            self.readable_blocks += readable
            if readable and self.outlets and (outlet := self.outlets.get(blocks.space.namespace)):
                outlet(Residency.STORED, blocks.space.group, blocks.index.hashes_of(rows[whole]))
        self._drop_refs(blocks, rows, tick, SlotState.IN_USE if blocks.space.num_shards > 1 else SlotState.RESERVED)
        return readable

    def discard(self, part: StorePart, tick: int) -> None:
        """Remove shards that will never be complete. Their slots have been freed."""
        part.blocks.slots[part.shard, part.rows] = NO_SLOT
        self.shares.change(part.blocks, -part.slot_size * len(part.rows), 0)
        self._drop_refs(part.blocks, part.rows, tick)

    # -- use ---------------------------------------------------------------------------------------------------

    def add_refs(self, chains: Iterable[Chain]) -> None:
        """Prevent the eviction of readable blocks until `drop_refs`."""
        for chain in chains:
            blocks, rows = chain.blocks, chain.rows
            idle = blocks.add_refs(rows)
            self._mark_in_use(blocks, idle)
            if self.rhythm is not None and len(idle):
                self.rhythm.use(blocks.gaps, blocks.last_used, idle)
            self.leased_bytes += len(idle) * blocks.space.block_bytes

    def drop_refs(self, chains: Iterable[Chain], tick: int) -> None:
        """Drop one reference to each block. The blocks count as used now, the deepest of a prefix as the oldest."""
        for chain in chains:
            # Of those that others still need, too: see `TierCopies.end_write`.
            chain.blocks.last_used[chain.rows] = tick
            idle = self._drop_refs(chain.blocks, chain.rows, tick)
            self.leased_bytes -= idle * chain.blocks.space.block_bytes
            if chain.blocks.space.left_by is not None:
                self.left.use(chain.blocks.space)

    def touch(self, parts: Iterable[StorePart], tick: int) -> None:
        """Count the evictable ones of these blocks as used now, the deepest of a prefix as the oldest."""
        for part in parts:
            if not part.blocks.cleared:
                # Blocks that were present at the start of the store may be gone.
                self.touch_rows(part.blocks, part.blocks.index.find(part.chain), tick)

    def touch_rows(self, blocks: SpaceBlocks, rows: Ints, tick: int) -> None:
        """`touch`; rows that are -1 are none."""
        rows = rows[rows >= 0]
        blocks.last_used[rows] = tick
        rows = rows[blocks.evictable[rows]]
        rows = rows[first_of_each(rows)][::-1]
        blocks.remove(rows)
        blocks.insert(rows)
        if len(rows) and blocks.space.left_by is not None:
            self.left.use(blocks.space)
        slots = blocks.sealed_slots(rows)
        self.slots.touch(slots, tick)
        if self.records is not None:
            self.records.touch(self.slots.places(slots), tick)

    # -- deletion ----------------------------------------------------------------------------------------------

    def evict(self, chain: Chain) -> None:
        """Delete evictable blocks to make room."""
        blocks, rows = chain.blocks, chain.rows
        require(all_true(blocks.evictable[rows]), "a block was chosen for eviction that is in use")
        self._detach(blocks, rows)
        blocks.remove(rows)
        nbytes = self._free(blocks, rows, evictable=True)
        self.evicted_blocks += len(rows)
        self.evicted_bytes += nbytes
        blocks.space.share.evicted += nbytes
        self._drop_if_unused(blocks.space)

    def mark_corrupt(self, blocks: SpaceBlocks, row: int, slot: int) -> None:
        """`forget` a block whose slot holds wrong bytes. The slot is quarantined when its last reader ends."""
        self.corrupt.add(slot)
        self.forget(blocks, np.array([row]))

    def forget(self, blocks: SpaceBlocks, rows: Ints) -> None:
        """Detach referenced blocks, or some that are detached: nothing may load them any more."""
        blocks.forget_old(rows)
        if self.records is not None:
            self.records.unseal(self.slots.places(blocks.sealed_slots(rows)))
        if not blocks.cleared and len(rows := rows[~blocks.detached[rows]]):
            self._detach(blocks, rows)
            self._drop_if_unused(blocks.space)

    def clear(self, space: Space) -> None:
        """Detach all blocks of the space in O(1). `sweep` frees those without a reference."""
        blocks = space.blocks
        if not len(blocks):
            return
        self.num_blocks -= len(blocks.index)
        self.readable_blocks -= blocks.readable
        if blocks.readable and (outlet := self.outlets.get(space.namespace)):
            outlet(Residency.CLEARED, space.group, b"")
        blocks.cleared = True
        # Whoever needs these slots sweeps them: nobody pays for them any more.
        self.cleared_bytes += blocks.evictable_bytes
        self.shares.change(blocks, -blocks.evictable_bytes, -blocks.evictable_bytes)
        if self.records is not None:
            self.records.close_space(blocks.number)
        self._cleared.append(blocks)
        space.blocks = self._new_blocks(space)
        self._drop_if_unused(space)

    def clear_left(self) -> bool:
        """Clear a namespace of a user who has left too many. False if there is none that can go."""
        if (space := self.left.next_to_go()) is None:
            return False
        self._clear_left(space)
        return True

    def _clear_left(self, space: Space) -> None:
        # Its other groups are of no use without it.
        others = [each for each in self.groups[space.namespace].values() if each.left_by == space.left_by]
        gone = [space, *(each for each in others[:LOOKED_AT] if each is not space and not each.blocks.busy)]
        for each in gone:
            self.clear(each)
        self.left.on_cleared(space, len(gone))

    def sweep(self, limit: int) -> bool:
        """Visit up to ``limit`` cleared blocks and free those without a reference. False if there were none."""
        if not self._cleared:
            return False
        while limit > 0 and self._cleared:
            blocks = self._cleared[0]
            rows = np.arange(blocks.swept, min(blocks.swept + limit, blocks.rows_used))
            blocks.swept += len(rows)
            limit -= len(rows)
            if blocks.swept >= blocks.rows_used:  # fewer rows than swept if the last block was freed meanwhile
                self._cleared.popleft()
            self._free(blocks, rows[blocks.evictable[rows]], evictable=True)
        return True

    def rebuild_sparse(self) -> bool:
        """Shrink one sparse table. False if there is none that can shrink. Call it between requests only."""
        for number, blocks in list(self._sparse.items()):
            if blocks.sparse and not blocks.cleared:
                if (owned := blocks.rebuild()) is None:
                    continue
                self.slots.own(*owned)
                self._take_dropped(blocks)
            del self._sparse[number]
            return True
        return False

    def _take_dropped(self, blocks: SpaceBlocks) -> None:
        self._dropped += blocks.dropped
        blocks.dropped = []

    def free_dropped(self) -> bool:
        """Free the memory of one column that is used no more. False if there is none."""
        if self._dropped:
            self._dropped.pop()
            return True
        return False

    def _mark_in_use(self, blocks: SpaceBlocks, rows: Ints) -> None:
        """Take blocks that are not evictable any more out of the eviction order, and their slots with them."""
        if len(rows):
            blocks.remove(rows)
            slots = blocks.sealed_slots(rows)
            self.slots.mark_in_use(slots)
            self.shares.change(blocks, 0, -self._nbytes(blocks, slots))

    def _drop_refs(self, blocks: SpaceBlocks, rows: Ints, tick: int, slots_are: SlotState = SlotState.IN_USE) -> int:
        """Drop one reference to each block. Blocks without one become evictable, or are freed if they are detached.

        Returns:
            The number of blocks that have no reference left.
        """
        idle, all_stay = blocks.drop_refs(rows)
        if not len(idle):
            return 0
        if blocks.cleared:
            self._free(blocks, idle)
        elif all_stay:
            self._mark_evictable(blocks, idle, tick, slots_are)
        else:
            self._detach(blocks, idle[blocks.missing[idle] == blocks.space.num_shards])
            detached = blocks.detached[idle]
            self._free(blocks, idle[detached])
            self._mark_evictable(blocks, idle[~detached], tick, slots_are)
            self._drop_if_unused(blocks.space)
        return len(idle)

    def _mark_evictable(self, blocks: SpaceBlocks, rows: Ints, tick: int, slots_are: SlotState) -> None:
        blocks.evictable[rows] = True
        blocks.last_used[rows] = tick
        blocks.insert(rows)
        slots = blocks.sealed_slots(rows)
        self.slots.mark_evictable(slots, tick, slots_are)
        self.shares.change(blocks, 0, self._nbytes(blocks, slots))
        if self.records is not None and slots_are is not SlotState.RESERVED:  # else `seal` has recorded the use
            self.records.touch(self.slots.places(slots), tick)

    def _detach(self, blocks: SpaceBlocks, rows: Ints) -> None:
        """Remove the blocks from the index."""
        blocks.index.remove(rows)
        blocks.detached[rows] = True
        self.num_blocks -= len(rows)
        whole = blocks.missing[rows] == 0
        readable = int(np.count_nonzero(whole))
        blocks.readable -= readable
        self.readable_blocks -= readable
        if readable and self.outlets and (outlet := self.outlets.get(blocks.space.namespace)):
            outlet(Residency.REMOVED, blocks.space.group, blocks.index.hashes_of(rows[whole]))

    def _nbytes(self, blocks: SpaceBlocks, slots: Ints) -> int:
        size = blocks.space.one_size
        return len(slots) * size if size else self.slots.bytes_of(slots)

    def _free(self, blocks: SpaceBlocks, rows: Ints, *, evictable: bool = False) -> int:
        """Delete blocks that are detached and have no reference. Returns the bytes of their slots.

        Args:
            evictable: their slots still are.
        """
        slots = blocks.sealed_slots(rows)
        nbytes = self._nbytes(blocks, slots)
        if evictable and blocks.cleared:
            self.cleared_bytes -= nbytes
        else:
            self.shares.change(blocks, -nbytes, -nbytes if evictable else 0)
        if self.records is not None:
            self.records.unseal(self.slots.places(slots))
        if self.corrupt:
            bad = np.isin(slots, list(self.corrupt))
            self.corrupt.difference_update(slots[bad].tolist())
            self.slots.mark_corrupt(slots[bad])
            slots = slots[~bad]
        self.slots.free(slots)
        blocks.recycle(rows)
        self._retire(blocks)
        return nbytes

    def _drop_if_unused(self, space: Space) -> None:
        if not space.users and not len(space.blocks.index) and not space.dropped:
            space.dropped = True
            self.left.remove(space)
            if self.records is not None:
                self.records.close_space(space.blocks.number)
            groups = self.groups[space.namespace]
            del groups[space.group]
            if not groups:
                del self.groups[space.namespace]
            self._retire(space.blocks)

    def _retire(self, blocks: SpaceBlocks) -> None:
        """Free the memory of a table without blocks, and remove the table if it will not be used again."""
        if len(blocks):
            if blocks.sparse and not blocks.cleared:
                self._sparse[blocks.number] = blocks
            return
        # A space and its table refer to each other: without this call the memory waits for the garbage collector.
        blocks.free_memory()
        self._take_dropped(blocks)
        if (blocks.cleared or blocks.space.dropped) and self.tables.pop(blocks.number, None) is not None:
            blocks.space.tables.remove(blocks)

    def _new_blocks(self, space: Space) -> SpaceBlocks:
        self._num_tables += 1
        blocks = SpaceBlocks(space, self._num_tables, self.capacity(space), self.seed, self.rhythm)
        self.tables[blocks.number] = blocks
        space.tables.append(blocks)
        if self.records is not None:
            self.records.open_space(blocks.number, space.namespace, space.group, space.shard_bytes)
        return blocks

    def capacity(self, space: Space) -> int:
        """Number of blocks of this space that fit the pool: each has at least one slot."""
        return self.slots.total_bytes // min(size for size in space.slot_sizes if size) + SPARE_ROWS


def create_unknown(blocks: SpaceBlocks, keys: Keys, rows: Ints) -> Ints:
    """Create a block for each hash without a row, and enter it into ``rows``. Returns the rows of the new blocks.

    Equal hashes are recognised by their tags, which is much faster. A duplicate then finds the block that was created
    for the first one. Two different hashes may share a tag (in about one of 16,000 jobs of 512 blocks): the second one
    finds nothing. Those are told apart by the hashes themselves, in one more round for all.
    """
    unknown = (rows < 0).nonzero()[0]
    if not len(unknown):
        return NO_INTS
    new = unknown[first_of_each(keys.tags[unknown])] if len(unknown) > 1 else unknown
    created = rows[new] = blocks.create(keys if len(new) == len(keys) else keys.take(new))
    if len(new) == len(unknown):
        return created
    again = unknown[rows[unknown] < 0]
    rows[again] = blocks.index.find(keys.take(again))
    unknown = again[rows[again] < 0]
    if not len(unknown):
        return created
    firsts: dict[bytes, int] = {}
    for at in unknown.tolist():
        firsts.setdefault(keys.words[at].tobytes(), at)
    new = np.array(list(firsts.values()))
    more = rows[new] = blocks.create(keys.take(new))
    again = unknown[rows[unknown] < 0]
    rows[again] = blocks.index.find(keys.take(again))
    return np.concatenate((created, more))
