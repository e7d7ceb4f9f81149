"""Names for the arrays that the cache computes with, and functions on them that numpy lacks."""

from __future__ import annotations

import math
import mmap
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
"""Rows of blocks, slots (byte offsets in the pool), slabs, ticks."""
Slots = Ints | list[int]
"""Slots of one request; a list if they are few, because making an array takes longer than using the list."""
Words = npt.NDArray[np.uint64]
"""Block hashes, [n, words]: each padded with zeros to a multiple of eight bytes."""
Bools = npt.NDArray[np.bool_]

NO_INTS: Ints = np.empty(0, np.int64)

FEW = 8
"""Up to this many rows a loop is faster than a handful of array operations, each of which costs as much for one value
as for a hundred. Engines that decode send jobs of one to a few blocks, so the steps that dominate such a job have both
forms: the states of slots (``slots``), the index of hashes (``block_index``), the log of uses (`LruPolicy`), and the
pins and slots of blocks (``block``). With the arrays only, a store of one block took 212 µs instead of 89, and a load
of one 68 instead of 27 (benchmarks/scale.py). ``tests/cache/test_few.py`` checks that both forms have one result."""

MAPPED_BYTES = 64 * 1024
"""Arrays from this size on are mappings of their own; malloc itself maps only larger ones."""
HUGE_BYTES = 4 * 1024 * 1024
"""Arrays from this size on have huge pages, as numpy's own: a lookup touches one page per hash in each of them."""


def any_true(mask: Bools) -> bool:
    """Whether any is true. For a few values this is four times as fast as numpy's ``any``."""
    return bool(np.count_nonzero(mask))


def all_true(mask: Bools) -> bool:
    """Whether all are true."""
    return int(np.count_nonzero(mask)) == len(mask)


def add_to(column: npt.NDArray[Any], rows: Ints, change: int) -> None:
    """Add to the values of these rows, each once."""
    if len(rows) <= FEW:
        for row in rows.tolist():
            column[row] += change
    else:
        column[rows] += change


def as_list(values: Slots) -> list[int]:
    """To be walked one by one."""
    return values if isinstance(values, list) else values.tolist()


def where_zero(column: npt.NDArray[Any], rows: Ints) -> Bools:
    """True for the rows whose value is zero."""
    zero: Bools = column[rows] == 0
    return zero


def has_duplicates(values: npt.NDArray[Any]) -> bool:
    """Whether any value comes twice."""
    if len(values) < 2 or all_true(values[1:] > values[:-1]):
        return False
    ordered = np.sort(values)
    return any_true(ordered[1:] == ordered[:-1])


def first_of_each(values: npt.NDArray[Any]) -> Bools:
    """True where a value comes for the first time."""
    first = np.ones(len(values), np.bool_)
    if has_duplicates(values):
        first[:] = False
        first[np.unique(values, return_index=True)[1]] = True
    return first


def unique_counts(values: Ints) -> tuple[Ints, Ints]:
    """The distinct values, and how often each comes: a faster ``np.unique`` where most values are the same."""
    if len(values) < 2:
        return values, np.ones_like(values)
    ordered = np.sort(values)
    ends = np.append((ordered[1:] != ordered[:-1]).nonzero()[0], len(ordered) - 1)
    return ordered[ends], np.diff(ends, prepend=-1)


def zeros(shape: tuple[int, ...], dtype: npt.DTypeLike, *, huge: bool = True) -> npt.NDArray[Any]:
    """Zeros that cost no memory where nothing was written, and give all of it back with the array.

    Large ones are a mapping of their own. C's malloc keeps freed memory: it zeroes every page of it to hand it out
    again, and returns it to the system only from the end of the heap.

    Args:
        huge: use huge pages, if the array is large enough.
    """
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    if nbytes < MAPPED_BYTES:
        return np.zeros(shape, dtype)
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge and nbytes >= HUGE_BYTES:
        with suppress(OSError):  # a kernel without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, dtype).reshape(shape)


def extended(column: npt.NDArray[Any], length: int, axis: int = -1, *, huge: bool = True) -> npt.NDArray[Any]:
    """A copy that is ``length`` long along an axis; new values are zero."""
    shape = list(column.shape)
    shape[axis] = length
    grown = zeros(tuple(shape), column.dtype, huge=huge)
    grown[tuple(slice(each) for each in column.shape)] = column
    return grown
