"""Takes over the blocks that an earlier run has left in the pool, as far as its records are whole.

Nothing about the records is believed that can be checked. What does not fit is dropped and counted, and its record is
unsealed before anything else can happen to its slot. Being killed meanwhile changes nothing but the order of eviction:
the next run finds the same blocks.

Records are read a slice at a time. Beside the table itself this takes, at most, room for some `SLICE` records and 40
bytes for each block of the largest space, while these are put in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from kvsidecar.cache.arrays import Bools, Ints, Words, any_true
from kvsidecar.cache.block_table import BlockTable, create_unknown, require
from kvsidecar.cache.records import (
    COMMIT,
    HASH,
    IDLE_MASK,
    ORDER_BITS,
    PRIORITY_BITS,
    SHARD_BITS,
    SIZE,
    SIZE_MASK,
    SLOT,
    TABLE,
    USED,
    Records,
    SpaceEntry,
)
from kvsidecar.cache.slots import SLOT_ALIGN
from kvsidecar.cache.space_blocks import NO_SLOT, Space, SpaceBlocks
from kvsidecar.types import HASH_BYTES_MAX, Priority

SLICE = 1 << 15
"""Number of records that are read, and of rows that are put in order, at a time."""
_LAST_USE = np.uint64((1 << 63) - 1)


@dataclass(slots=True)
class AdoptReport:
    """What was taken over."""

    kept_blocks: int = 0
    kept_bytes: int = 0
    """Bytes of the kept blocks' slots."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Number of sealed slots that were not kept, by reason: ``damaged``, ``misplaced``, ``no_space`` (cleared, or the
    space could not be kept), ``duplicate``, ``incomplete`` (not all shards of the block were sealed)."""
    last_tick: int = 0
    """Tick of the last use of a block."""


def adopt(table: BlockTable, records: Records) -> AdoptReport:
    """Fill an empty table with the blocks of these records."""
    ours, theirs = table.slots, records
    require((ours.total_bytes, ours.slab_bytes) == (theirs.pool_bytes, theirs.slab_bytes), "records of another pool")
    adoption = _Adoption(table, records)
    adoption.read()
    kept = adoption.keep_whole()
    adoption.make_evictable(kept)
    table.start_with(records, kept)
    return adoption.report


class _Adoption:
    def __init__(self, table: BlockTable, records: Records) -> None:
        self._table, self._records = table, records
        self.report = AdoptReport()
        self._entries = {entry.number: entry for entry in records.find_spaces()}
        self._blocks: dict[int, SpaceBlocks] = {}
        """Tables for which a record was found, by number."""
        self._slabs, lost = records.find_slabs()
        self._count("damaged", lost)
        # Those of a slab that lies on two NUMA nodes, as of now, are dropped.
        units = zip(self._slabs.head.tolist(), self._slabs.end.tolist(), strict=True)
        self._fits = np.array([table.slots.can_cut(*each) for each in units], np.bool_)
        self._is_cut = np.zeros(len(self._fits), np.bool_)

    # -- what the records say --------------------------------------------------------------------------------------

    def read(self) -> None:
        """Create the blocks with all that is known about them; shards may be missing. Drop what does not fit.

        `SpaceBlocks.last_used` holds the record's word of the last use.
        """
        for places, contents in self._records.find_sealed(self._slabs, SLICE):
            places, contents = self._without("damaged", self._records.damaged(contents), places, contents)
            self._records.see_commits(contents[:, COMMIT])
            places, contents = self._without("misplaced", self._misplaced(places, contents), places, contents)
            numbers = contents[:, TABLE] >> np.uint64(32)
            order = np.lexsort((contents[:, COMMIT], numbers))
            distinct, starts = np.unique(numbers[order], return_index=True)
            for number, piece in zip(distinct.tolist(), np.split(order, starts[1:]), strict=False):
                if (entry := self._entries.get(number)) is None:
                    self._forget("no_space", places[piece])
                else:
                    self._enter(self._blocks_of(entry), places[piece], contents[piece])

    def _misplaced(self, places: Ints, contents: Words) -> Bools:
        """Flags the records that `Records.seal` cannot have written, or that do not fit their place."""
        slabs, grid = self._slabs, self._records.grid
        at = slabs.head.searchsorted(places // grid.records, "right") - 1
        sizes, starts = size_classes(contents), slabs.head[at] * grid.unit
        inside = places - slabs.head[at] * grid.records
        wrong: Bools = sizes != slabs.size[at].astype(np.uint64)
        wrong |= contents[:, SLOT] != starts.astype(np.uint64) + inside.astype(np.uint64) * sizes
        return wrong | ~self._fits[at]

    def _blocks_of(self, entry: SpaceEntry) -> SpaceBlocks:
        """The table of a space, empty at first."""
        if (known := self._blocks.get(entry.number)) is not None:
            return known
        space = Space(entry.namespace, entry.group, len(entry.shard_bytes))
        for shard, nbytes in enumerate(entry.shard_bytes):
            if nbytes is not None:
                space.set_shard(shard, nbytes)
        table = self._table
        space.blocks = SpaceBlocks(space, entry.number, table.capacity(space), table.seed, table.rhythm)
        self._blocks[entry.number] = space.blocks
        return space.blocks

    def _enter(self, blocks: SpaceBlocks, places: Ints, contents: Words) -> None:
        """Enter records of one table, in the order in which they were sealed."""
        space = blocks.space
        shards = _shards(contents)
        known = shards < space.num_shards
        sizes = np.array(space.slot_sizes, np.uint64)
        wrong = ~known | (size_classes(contents) != sizes[np.where(known, shards, 0)])
        padding = contents[:, HASH : HASH + HASH_BYTES_MAX // 8].copy().view(np.uint8)[:, space.namespace.hash_bytes :]
        places, contents = self._without("misplaced", wrong | padding.any(axis=1), places, contents)
        keys = blocks.index.keys_from(np.ascontiguousarray(contents[:, HASH : HASH + blocks.index.num_words]))
        rows = blocks.index.find(keys)
        create_unknown(blocks, keys, rows)

        # Of several records of one shard of one block the newest stays.
        before = blocks.slots[_shards(contents), rows]
        if any_true(before >= 0):
            again = (before >= 0).nonzero()[0]
            theirs = self._places_of(before[again])
            newer = contents[again, COMMIT] > self._records.commits(theirs)
            self._forget("duplicate", np.unique(theirs[newer]))
            older = np.zeros(len(rows), np.bool_)
            older[again[~newer]] = True
            rows = rows[~older]
            places, contents = self._without("duplicate", older, places, contents)
        shards, slots = _shards(contents), contents[:, SLOT].astype(np.int64)
        blocks.slots[shards, rows] = slots
        older = blocks.slots[shards, rows] != slots
        rows = rows[~older]
        _, contents = self._without("duplicate", older, places, contents)

        np.maximum.at(blocks.expires, rows, (contents[:, SIZE] >> np.uint64(32)).astype(np.uint32))
        priority = (contents[:, SIZE] >> np.uint64(PRIORITY_BITS) & np.uint64(3)).astype(np.uint8)
        priority[priority > max(Priority)] = Priority.NORMAL
        blocks.set_priority(rows, priority)
        # Those after which blocks expire when nobody uses them begin again: the restart counts as a use.
        idle = (contents[:, TABLE] >> np.uint64(SHARD_BITS) & np.uint64(IDLE_MASK)).astype(np.uint32)
        if any_true(idle > 0):
            np.maximum.at(blocks.idle, rows, idle)
            blocks.idling = True
        np.maximum.at(blocks.last_used, rows, np.minimum(contents[:, USED], _LAST_USE).astype(np.int64))

    # -- what is kept ----------------------------------------------------------------------------------------------

    def keep_whole(self) -> list[SpaceBlocks]:
        """Drop the blocks that lack a shard, and the spaces without blocks. Returns the others."""
        kept = []
        for number in self._entries:
            blocks = self._blocks.pop(number, None)
            if blocks is not None:
                for rows in _slices(blocks):
                    self._keep_whole(blocks, rows)
                if len(blocks):
                    kept.append(blocks)
                    continue
            self._records.close_space(number)
        return kept

    def _keep_whole(self, blocks: SpaceBlocks, rows: slice) -> None:
        blocks.missing[rows] = np.count_nonzero(blocks.slots[:, rows] < 0, axis=0)
        gone = blocks.missing[rows].nonzero()[0] + rows.start
        if len(gone):
            self._forget("incomplete", self._places_of(np.array(blocks.sealed_slots(gone), np.int64)))
            blocks.slots[:, gone] = NO_SLOT
            blocks.expires[gone] = 0
            blocks.index.remove(gone)
            blocks.recycle(gone)
        expires = blocks.expires[rows]
        if any_true(expires > 0):
            first = int(expires[expires > 0].min())
            blocks.next_expiry = min(first, blocks.next_expiry or first)
        if blocks.idling:
            blocks.next_expiry = 1  # the time is not known here; whoever looks at the table then finds the right one

    def make_evictable(self, kept: list[SpaceBlocks]) -> None:
        """Cut the slabs, and put the blocks into the order of their last use.

        Ticks begin again at 1, without gaps: a damaged word of a last use affects the order alone.
        """
        ticks, end = np.empty(sum(map(len, kept)), np.int64), 0
        for blocks in kept:
            for rows in _slices(blocks):
                used = blocks.last_used[_whole(blocks, rows)] >> ORDER_BITS
                ticks[end : end + len(used)] = used
                end += len(used)
        ticks.sort()
        first = np.ones(len(ticks), np.bool_)
        np.not_equal(ticks[1:], ticks[:-1], out=first[1:])
        ticks = ticks[first]
        self.report.last_tick = len(ticks)
        for blocks in kept:
            in_order = _in_order(blocks)
            blocks.readable = len(blocks)
            blocks.used_bytes = blocks.evictable_bytes = len(blocks) * blocks.space.block_bytes
            self.report.kept_blocks += len(blocks)
            self.report.kept_bytes += blocks.used_bytes
            for rows in _slices(blocks):
                self._make_evictable(blocks, _whole(blocks, rows), ticks)
            for start in range(0, len(in_order), SLICE):
                blocks.insert(in_order[start : start + SLICE])

    def _make_evictable(self, blocks: SpaceBlocks, rows: Ints, ticks: Ints) -> None:
        """Make the slots of these blocks evictable."""
        if not len(rows):
            return
        used = blocks.last_used[rows]
        last_used = np.searchsorted(ticks, used >> ORDER_BITS) + 1
        blocks.last_used[rows] = last_used
        blocks.evictable[rows] = True
        shards = blocks.space.num_shards
        slots = blocks.slots[:, rows].ravel()
        slabs = np.unique(self._slabs_of(slots))
        uncut = slabs[~self._is_cut[slabs]]
        self._is_cut[uncut] = True
        cuts = list(zip(*(column[uncut].tolist() for column in self._slabs), strict=True))
        allocator = self._table.slots
        allocator.adopt(slots, cuts, np.tile(blocks.owners(rows), shards), np.tile(last_used, shards))
        words = last_used << ORDER_BITS | used & (1 << ORDER_BITS) - 1
        self._records.set_used(allocator.places(slots), np.tile(words, shards).view(np.uint64))

    # -- what is dropped -------------------------------------------------------------------------------------------

    def _without(self, reason: str, which: Bools, places: Ints, contents: Words) -> tuple[Ints, Words]:
        """Drop some of these records. Returns the others."""
        if not any_true(which):
            return places, contents
        self._forget(reason, places[which])
        return places[~which], contents[~which]

    def _forget(self, reason: str, places: Ints) -> None:
        self._count(reason, len(places))
        self._records.unseal(places)

    def _count(self, reason: str, slots: int) -> None:
        if slots:
            self.report.dropped[reason] += slots

    def _slabs_of(self, slots: Ints) -> Ints:
        """The earlier run's slabs that these slots are in."""
        found: Ints = self._slabs.head.searchsorted(slots // self._records.grid.unit, "right") - 1
        return found

    def _places_of(self, slots: Ints) -> Ints:
        """`SlotAllocator.places`, before the slabs are cut."""
        slabs, grid, at = self._slabs, self._records.grid, self._slabs_of(slots)
        places: Ints = slabs.head[at] * grid.records + (slots - slabs.head[at] * grid.unit) // slabs.size[at]
        return places


def size_classes(contents: Words) -> Words:
    """Size class in bytes of each of these records."""
    sizes: Words = (contents[:, SIZE] & np.uint64(SIZE_MASK)) * np.uint64(SLOT_ALIGN)
    return sizes


def _shards(contents: Words) -> Ints:
    shards: Ints = (contents[:, TABLE] & np.uint64((1 << SHARD_BITS) - 1)).astype(np.int64)
    return shards


def _slices(blocks: SpaceBlocks) -> Iterator[slice]:
    """All rows of a table."""
    for start in range(0, blocks.rows_used, SLICE):
        yield slice(start, min(start + SLICE, blocks.rows_used))


def _whole(blocks: SpaceBlocks, rows: slice) -> Ints:
    """The rows whose block has all its shards."""
    whole: Ints = (blocks.missing[rows] == 0).nonzero()[0] + rows.start
    return whole


def _in_order(blocks: SpaceBlocks) -> Ints:
    """The rows of all blocks, the least recently used first."""
    rows = _whole(blocks, slice(0, blocks.rows_used))
    return rows[blocks.last_used[rows].argsort(kind="stable")]
