"""The steps that dominate small jobs, as operations on arrays. `kvsidecar.cache.kernels` has them compiled, if it can.

Arrays that a function fills are its last arguments, at least as long as what they are for; where it says so, what it
returns is how much of them it has filled. Rows and slots are int64, of one dimension. Where a slot is wrong, nothing
is changed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvsidecar.cache.arrays import NO_INTS, Bools, Ints, Words, any_true, unique_counts

LANE_BITS = 4
LANES = 1 << LANE_BITS
"""Entries per bucket: the tags of one bucket fill one cache line."""

Tags = npt.NDArray[np.uint32]
Table = tuple[Tags, npt.NDArray[np.int32], int, int]
"""The lanes of an index: their tags, [buckets, LANES], 0 in a free lane; their rows, counted over all buckets; and its
level and number of buckets, as `kvsidecar.cache.block_index.BlockIndex` has them."""
Columns = tuple[int, npt.NDArray[np.int32], Ints, Ints, Ints, Ints, npt.NDArray[np.uint8]]
"""A pool's slots: bytes of a unit; by unit, its slab; by slab, the size class of its slots (0: there is no such slab),
its offset, the place of its first slot in the last column, and the number of evictable ones; by slot, its state."""

NOT_CUT, NOT_A_SLOT, WRONG_STATE, TWICE = -1, -2, -3, -4
"""What is wrong with one of the slots of a call."""
_FREE, _RESERVED, _EVICTABLE, _QUARANTINED = 0, 1, 3, 4
_STATES = 5

# -- the index of hashes ---------------------------------------------------------------------------------------------


def tag_hashes(words: Words, multipliers: Words, addend: int, tags: Tags) -> None:
    """Fill in the tag of each hash: the high 32 bits of ``addend + sum(multipliers[i] * x[i])``, where the ``x[i]`` are
    the halves of its words as they lie in memory; the highest bit is set."""
    spread = words.view(np.uint32) @ multipliers
    spread += np.uint64(addend)
    tags[:] = spread.view(np.uint32)[1::2] | np.uint32(1 << 31)


def buckets_of(tags: Tags, level: int, num_buckets: int) -> Ints:
    """The bucket of each tag: its low ``level + 1`` bits, without the highest where that bucket does not exist yet."""
    buckets = (tags & np.uint32((2 << level) - 1)).astype(np.int64)
    return buckets - ((buckets >= num_buckets) << level)


def find_rows(
    table_tags: Tags,
    table_rows: npt.NDArray[np.int32],
    level: int,
    num_buckets: int,
    table_words: Words,
    words: Words,
    tags: Tags,
    found: Ints,
) -> int:
    """Fill in the row of each hash that has a lane, or -1. Returns how many have one.

    Args:
        table_tags: this and the next three: `Table`.
        table_words: the hash of each row.
    """
    found[:] = -1
    which, lanes = _matches(table_tags, tags, buckets_of(tags, level, num_buckets))
    rows = table_rows[lanes].astype(np.int64)
    same = (table_words.take(rows, axis=0) == words[which]).all(axis=1)
    found[which[same]] = rows[same]
    return int(np.count_nonzero(same))


def place_rows(
    table_tags: Tags,
    table_rows: npt.NDArray[np.int32],
    level: int,
    num_buckets: int,
    tags: Tags,
    rows: Ints,
    over: Ints,
) -> int:
    """Enter rows into the first free lanes of their buckets. Fills in the positions of those whose bucket has none, and
    returns how many these are.

    Args:
        table_tags: this and the next three: `Table`.
    """
    if not len(rows):
        return 0
    buckets = buckets_of(tags, level, num_buckets)
    order = buckets.argsort(kind="stable")
    buckets, tags, rows = buckets[order], tags[order], rows[order]
    # Counted from 1 in each bucket: the rows for it, and its free lanes.
    nth = np.arange(1, len(rows) + 1) - np.searchsorted(buckets, buckets)
    free = (table_tags.take(buckets, axis=0) == 0).cumsum(axis=1, dtype=np.int8)
    lanes = (free == nth[:, None]).argmax(axis=1)
    fits = free[:, -1] >= nth
    lanes += buckets << LANE_BITS
    table_tags.reshape(-1)[lanes[fits]] = tags[fits]
    table_rows[lanes[fits]] = rows[fits]
    left = np.sort(order[~fits])
    over[: len(left)] = left
    return len(left)


def unplace_rows(
    table_tags: Tags,
    table_rows: npt.NDArray[np.int32],
    level: int,
    num_buckets: int,
    tags: Tags,
    rows: Ints,
    over: Ints,
) -> int:
    """Free the lanes of rows. Fills in the positions of those that have none, and returns how many these are.

    Args:
        table_tags: this and the next three: `Table`.
    """
    which, lanes = _matches(table_tags, tags, buckets_of(tags, level, num_buckets))
    mine = table_rows[lanes] == rows[which]
    table_tags.reshape(-1)[lanes[mine]] = 0
    left = np.ones(len(rows), np.bool_)
    left[which[mine]] = False
    positions = left.nonzero()[0]
    over[: len(positions)] = positions
    return len(positions)


def _matches(table_tags: Tags, tags: Tags, buckets: Ints) -> tuple[Ints, Ints]:
    """Per match the position of the tag and the number of the lane, counted over all buckets. A tag may be in several
    lanes."""
    found = (table_tags.take(buckets, axis=0) == tags[:, None]).ravel().nonzero()[0]
    which = found >> LANE_BITS
    return which, buckets[which] << LANE_BITS | found & LANES - 1


# -- the order of uses -----------------------------------------------------------------------------------------------


def enter_log(places: Ints, log: npt.NDArray[np.int32], rows: Ints, start: int, number: int) -> None:
    """Write rows to a log from ``start`` on, and in each row's place the number of its entry, from ``number`` on."""
    log[start : start + len(rows)] = rows
    places[rows] = np.arange(number, number + len(rows))


def leave_log(places: Ints, rows: Ints, bits: int) -> list[tuple[int, int]]:
    """Set the places of rows to 0. Returns how many were in each segment of ``2**bits`` entries, numbered from 1; the
    counts of a segment may be in several parts."""
    segments = (places[rows] - 1) >> bits
    places[rows] = 0
    return list(zip(*(each.tolist() for each in unique_counts(segments)), strict=True))


# -- the columns of blocks -------------------------------------------------------------------------------------------


def readable_rows(missing: npt.NDArray[np.int32], rows: Ints, flags: Bools) -> int:
    """Fill in whether each row is one of a block of which no shard is missing; -1 is none. Returns how many are."""
    flags[:] = (rows >= 0) & (missing[rows] == 0)
    return int(np.count_nonzero(flags))


def add_refs(refs: npt.NDArray[np.int32], evictable: Bools, rows: Ints, idle: Ints) -> int:
    """Add a reference to distinct blocks. Fills in those that were evictable, which they are no more, in their order,
    and returns how many these are."""
    refs[rows] += 1
    were = rows[evictable[rows]]
    evictable[were] = False
    idle[: len(were)] = were
    return len(were)


def drop_refs(
    refs: npt.NDArray[np.int32],
    detached: Bools,
    missing: npt.NDArray[np.int32],
    shards: int,
    rows: Ints,
    idle: Ints,
) -> tuple[int, int]:
    """Drop a reference of distinct blocks. Fills in those that have none left, the last first. Returns how many these
    are, and how many of them are detached or have no sealed shard."""
    left = refs[rows] - 1
    refs[rows] = left
    free = rows[left == 0][::-1]
    idle[: len(free)] = free
    return len(free), int(np.count_nonzero(detached[free] | (missing[free] == shards)))


def sealed_slots(slots: Ints, shards: int, rows: Ints, sealed: Ints) -> int:
    """Fill in the slots, of [shards, rows], that these rows have, shard by shard. Returns how many these are."""
    found = slots[:, rows].ravel()
    found = found[found >= 0]
    sealed[: len(found)] = found
    return len(found)


# -- the states of slots ---------------------------------------------------------------------------------------------


def move_slots(
    slots: Ints,
    unit: int,
    at: npt.NDArray[np.int32],
    sizes: Ints,
    starts: Ints,
    firsts: Ints,
    evictable: Ints,
    states: npt.NDArray[np.uint8],
    source: int,
    target: int,
    touched: Ints,
    tick: int,
) -> int:
    """Change the state of distinct slots, and their slabs' numbers of evictable ones. Returns their bytes, or what is
    wrong with one of them.

    Args:
        unit: this and the next six: `Columns`.
        touched: the last use of each slab, which becomes ``tick`` if that is not negative.
    """
    wrong, slabs, places = locate(slots, unit, at, sizes, starts, firsts)
    if wrong:
        return wrong
    if any_true(states[places] != source):
        return WRONG_STATE
    states[places] = target
    if target == _EVICTABLE:
        np.add.at(evictable, slabs, 1)
    if source == _EVICTABLE:
        np.subtract.at(evictable, slabs, 1)
    if tick >= 0:
        touched[slabs] = tick
    return int(np.add.reduce(sizes[slabs]))


def free_slots(
    slots: Ints,
    unit: int,
    at: npt.NDArray[np.int32],
    sizes: Ints,
    starts: Ints,
    firsts: Ints,
    evictable: Ints,
    states: npt.NDArray[np.uint8],
    owners: Ints,
    nobody: int,
) -> tuple[int, list[int], list[tuple[int, int, int]]]:
    """Make used slots FREE, and ``nobody`` their owner.

    Args:
        slots: ascending.
        unit: this and the next six: `Columns`.

    Returns:
        What is wrong with one of them, or 0; their bytes by the state that they were in; and for each slab of theirs
        its number, how many they are, and the index of the lowest.
    """
    wrong, slabs, places = locate(slots, unit, at, sizes, starts, firsts)
    if wrong:
        return wrong, [], []
    if any_true(slots[1:] <= slots[:-1]):
        return TWICE, [], []
    before = states[places]
    # Floats, but whole numbers far below 2**53.
    nbytes = [int(each) for each in np.bincount(before, sizes[slabs], _STATES).tolist()]
    if any_true((before == _FREE) | (before >= _QUARANTINED)):
        return WRONG_STATE, [], []
    states[places] = _FREE
    owners[places] = nobody
    np.subtract.at(evictable, slabs[before == _EVICTABLE], 1)
    begin = [0, *((slabs[1:] != slabs[:-1]).nonzero()[0] + 1).tolist()][: len(slabs)]
    runs = [
        (slabs.item(first), last - first, places.item(first) - firsts.item(slabs.item(first)))
        for first, last in zip(begin, [*begin[1:], len(slabs)], strict=False)
    ]
    return 0, nbytes, runs


def reserve_free(
    states: npt.NDArray[np.uint8], first: int, capacity: int, lowest: int, wanted: int, indices: Ints
) -> int:
    """Make the lowest free slots of a slab RESERVED, at most ``wanted``, and fill in their indices. Returns how many.

    Args:
        first: place of the slab's first slot in ``states``.
        capacity: number of its slots, of which there may be thousands: a window of states is read at a time, each twice
            as long as the one before.
        lowest: no slot below this index is free.
    """
    start, window, count = lowest, 2 * wanted + 64, 0
    while count < wanted and start < capacity:
        piece = states[first + start : first + min(start + window, capacity)]
        free = (piece == _FREE).nonzero()[0][: wanted - count]
        piece[free] = _RESERVED
        indices[count : count + len(free)] = free + start
        count += len(free)
        start += window
        window *= 2
    return count


def locate(
    slots: Ints, unit: int, at: npt.NDArray[np.int32], sizes: Ints, starts: Ints, firsts: Ints
) -> tuple[int, Ints, Ints]:
    """What is wrong with one of the slots, or 0; the slab of each, and its place in the column of states.

    Args:
        unit: this and the next four: `Columns`.
    """
    slabs = at[slots // unit].astype(np.int64)
    of_each = sizes[slabs]
    if np.count_nonzero(of_each) < len(of_each):
        return NOT_CUT, NO_INTS, NO_INTS
    offsets = slots - starts[slabs]
    inside = offsets // of_each
    if any_true(inside * of_each != offsets):
        return NOT_A_SLOT, NO_INTS, NO_INTS
    return 0, slabs, firsts[slabs] + inside
