"""Takes over the blocks that an earlier run has left in the pool: what its records say, as far as it is whole.

Nothing about the records is believed that can be checked. What does not fit is dropped and counted, and its record is
unsealed before anything else can happen to its slot. Being killed meanwhile changes nothing: the next run finds the
same blocks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from kvsidecar.cache.arrays import Bools, Ints, Words, all_true, any_true
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
from kvsidecar.cache.slots import SLOT_ALIGN, SlotAllocator
from kvsidecar.cache.space_blocks import NO_SLOT, Space, SpaceBlocks
from kvsidecar.types import HASH_BYTES_MAX, Priority


@dataclass(slots=True)
class AdoptReport:
    """What was taken over."""

    kept_blocks: int = 0
    kept_bytes: int = 0
    """Of their slots."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Number of sealed slots that were not kept, by reason: ``damaged``, ``misplaced``, ``no_space`` (cleared, or the
    space could not be kept), ``duplicate``, ``incomplete`` (not all shards of the block were sealed)."""
    last_tick: int = 0
    """Tick of the last use of a block."""


@dataclass(slots=True)
class _Found:
    """Blocks of one space that are kept."""

    blocks: SpaceBlocks
    rows: Ints
    used: Words
    """Per row its last use, as in the record."""


class _Sealed:
    """The sealed records that have not been dropped so far."""

    def __init__(self, records: Records, report: AdoptReport) -> None:
        self._records = records
        self._report = report
        self.slabs, lost = records.find_slabs()
        self.places, self.contents = records.find_sealed(self.slabs)
        self.count("damaged", lost)

    def drop(self, reason: str, which: Bools) -> None:
        if any_true(which):
            self.forget(reason, self.places[which])
            self.places, self.contents = self.places[~which], self.contents[~which]

    def forget(self, reason: str, places: Ints) -> None:
        self.count(reason, len(places))
        self._records.unseal(places)

    def count(self, reason: str, slots: int) -> None:
        if slots:
            self._report.dropped[reason] += slots

    def check(self, allocator: SlotAllocator) -> None:
        """Drop those that are not what `Records.seal` has written, or do not fit the place they are in."""
        self.drop("damaged", self._records.damaged(self.contents))
        self._records.see_commits(self.contents[:, COMMIT])
        grid, slabs = allocator.grid, self.slabs
        at = self.slab_of(self.places)
        sizes, starts = size_classes(self.contents), slabs.head[at] * grid.unit
        inside = self.places - slabs.head[at] * grid.records
        wrong = sizes != slabs.size[at].astype(np.uint64)
        wrong |= self.contents[:, SLOT] != starts.astype(np.uint64) + inside.astype(np.uint64) * sizes
        # Those of a slab that lies on two NUMA nodes, as of now.
        fit = [allocator.can_cut(*units) for units in zip(slabs.head.tolist(), slabs.end.tolist(), strict=True)]
        wrong |= ~np.array(fit, np.bool_)[at]
        self.drop("misplaced", wrong)

    def slab_of(self, places: Ints) -> Ints:
        """The slab of each of these records."""
        found: Ints = self.slabs.head.searchsorted(places // self._records.grid.records, "right") - 1
        return found

    def by_table(self) -> dict[int, tuple[Ints, Words]]:
        """Places and contents by number of the table, each in the order in which they were sealed."""
        tables = self.contents[:, TABLE] >> np.uint64(32)
        order = np.lexsort((self.contents[:, COMMIT], tables))
        numbers, starts = np.unique(tables[order], return_index=True)
        pieces = np.split(order, starts[1:]) if len(numbers) else []
        return {
            number: (self.places[piece], self.contents[piece])
            for number, piece in zip(numbers.tolist(), pieces, strict=True)
        }


def size_classes(contents: Words) -> Words:
    """Size class in bytes of each of these records."""
    sizes: Words = (contents[:, SIZE] & np.uint64(SIZE_MASK)) * np.uint64(SLOT_ALIGN)
    return sizes


def adopt(table: BlockTable, records: Records) -> AdoptReport:
    """Fill an empty table with the blocks of these records."""
    ours, theirs = table.slots, records
    require((ours.total_bytes, ours.slab_bytes) == (theirs.pool_bytes, theirs.slab_bytes), "records of another pool")
    report = AdoptReport()
    entries = records.find_spaces()
    sealed = _Sealed(records, report)
    sealed.check(table.slots)
    by_table = sealed.by_table()
    found: list[_Found] = []
    for entry in entries:
        places, contents = by_table.pop(entry.number, (None, None))
        if places is not None and contents is not None:
            kept = _keep_space(table, entry, places, contents, sealed)
            if len(kept.rows):
                found.append(kept)
                continue
        records.close_space(entry.number)
    for places, _ in by_table.values():
        sealed.forget("no_space", places)
    _make_evictable(table, records, found, report, sealed)
    table.start_with(records, [each.blocks for each in found])
    return report


def _keep_space(table: BlockTable, entry: SpaceEntry, places: Ints, contents: Words, sealed: _Sealed) -> _Found:
    """Create the blocks of one space that are whole; all others are dropped."""
    space = Space(entry.namespace, entry.group, len(entry.shard_bytes))
    for shard, nbytes in enumerate(entry.shard_bytes):
        if nbytes is not None:
            space.set_shard(shard, nbytes)
    space.blocks = blocks = SpaceBlocks(space, entry.number, table.capacity(space), table.seed, table.rhythm)

    shards = (contents[:, TABLE] & np.uint64((1 << SHARD_BITS) - 1)).astype(np.int64)
    known = shards < space.num_shards
    sizes = np.array(space.slot_sizes, np.uint64)
    wrong = ~known | (size_classes(contents) != sizes[np.where(known, shards, 0)])
    padding = contents[:, HASH : HASH + HASH_BYTES_MAX // 8].copy().view(np.uint8)[:, space.namespace.hash_bytes :]
    wrong |= padding.any(axis=1)
    if any_true(wrong):
        sealed.forget("misplaced", places[wrong])
        places, contents, shards = places[~wrong], contents[~wrong], shards[~wrong]

    keys = blocks.index.keys_from(contents[:, HASH : HASH + blocks.index.num_words])
    rows = blocks.index.find(keys)
    create_unknown(blocks, keys, rows)
    slots = contents[:, SLOT].astype(np.int64)
    blocks.slots[shards, rows] = slots  # of several with the same key the last one stays: the newest
    newest = blocks.slots[shards, rows] == slots
    if not all_true(newest):
        sealed.forget("duplicate", places[~newest])
    blocks.missing[: blocks.rows_used] = np.count_nonzero(blocks.slots[:, : blocks.rows_used] < 0, axis=0)
    incomplete = newest & (blocks.missing[rows] > 0)
    if any_true(incomplete):
        sealed.forget("incomplete", places[incomplete])
        gone = (blocks.missing[: blocks.rows_used] > 0).nonzero()[0]
        blocks.slots[:, gone] = NO_SLOT
        blocks.index.remove(gone)
        blocks.recycle(gone)
    np.maximum.at(blocks.expires, rows, (contents[:, SIZE] >> np.uint64(32)).astype(np.uint32))
    blocks.expires[(blocks.missing > 0).nonzero()[0]] = 0
    priority = (contents[:, SIZE] >> np.uint64(PRIORITY_BITS) & np.uint64(3)).astype(np.uint8)
    priority[priority > max(Priority)] = Priority.NORMAL
    blocks.set_priority(rows, priority)
    blocks.next_expiry = int(min(blocks.expires[blocks.expires > 0], default=0))
    _keep_idle_times(blocks, rows, contents)
    used = np.zeros(blocks.rows_used, np.uint64)
    np.maximum.at(used, rows, contents[:, USED])
    whole = (blocks.missing[: blocks.rows_used] == 0).nonzero()[0]
    return _Found(blocks, whole, used[whole])


def _keep_idle_times(blocks: SpaceBlocks, rows: Ints, contents: Words) -> None:
    """Those after which blocks expire when nobody uses them. They begin again: the restart counts as a use."""
    idle = (contents[:, TABLE] >> np.uint64(SHARD_BITS) & np.uint64(IDLE_MASK)).astype(np.uint32)
    if any_true(idle > 0):
        np.maximum.at(blocks.idle, rows, idle)
        blocks.idling = True
        blocks.next_expiry = 1  # the time is not known here; whoever looks at the table then finds the right one


def _make_evictable(
    table: BlockTable, records: Records, found: list[_Found], report: AdoptReport, sealed: _Sealed
) -> None:
    """Cut the slabs, and put the blocks into the order of their last use.

    Ticks begin again at 1, without gaps: whatever a damaged word says of a last use concerns the order alone.
    """
    every = np.concatenate([each.used >> np.uint64(ORDER_BITS) for each in found] or [np.empty(0, np.uint64)])
    distinct = np.unique(every)
    report.last_tick = len(distinct)
    slots: list[Ints] = []
    owners: list[Ints] = []
    ticks: list[Ints] = []
    words: list[Words] = []
    for each in found:
        blocks, order = each.blocks, each.used.argsort(kind="stable")
        rows, used = each.rows[order], each.used[order]
        last_used = np.searchsorted(distinct, used >> np.uint64(ORDER_BITS)) + 1
        blocks.last_used[rows] = last_used
        blocks.evictable[rows] = True
        blocks.insert(rows)
        blocks.readable = len(rows)
        blocks.used_bytes = blocks.evictable_bytes = len(rows) * blocks.space.block_bytes
        report.kept_blocks += len(rows)
        report.kept_bytes += len(rows) * blocks.space.block_bytes
        order_in_request = used & np.uint64((1 << ORDER_BITS) - 1)
        for of_shard in blocks.slots[:, rows]:
            slots.append(of_shard)
            owners.append(blocks.owners(rows))
            ticks.append(last_used)
            words.append(last_used.astype(np.uint64) << np.uint64(ORDER_BITS) | order_in_request)
    if not slots:
        return
    all_slots = np.concatenate(slots)
    slabs, grid = sealed.slabs, table.slots.grid
    used_slabs = np.unique(slabs.head.searchsorted(all_slots // grid.unit, "right") - 1)
    cuts = list(zip(*(column[used_slabs].tolist() for column in slabs), strict=True))
    table.slots.adopt(all_slots, cuts, np.concatenate(owners), np.concatenate(ticks))
    records.set_used(np.asarray(table.slots.places(all_slots)), np.concatenate(words))
