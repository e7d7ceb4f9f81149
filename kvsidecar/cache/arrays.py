"""Types of the arrays that the cache computes with, and functions on them that numpy lacks."""

from __future__ import annotations

import math
import mmap
import sys
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
"""Rows of blocks, slots (byte offsets in the pool), slabs, ticks."""
Words = npt.NDArray[np.uint64]
"""Block hashes, [n, words]: each padded with zeros to a multiple of eight bytes."""
Bools = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]

NO_INTS: Ints = np.empty(0, np.int64)
_ZERO: Ints = np.zeros(1, np.int64)

FEW = 8
"""Up to this many values a loop is faster than a handful of array operations, each of which costs as much for one as
for a hundred: `records` and `freed` have both forms. What every job needs is in `kvsidecar.cache.kernels`."""

MAPPED_BYTES = 64 * 1024
"""Arrays of at least this size are mappings of their own; malloc itself maps only larger ones."""
HUGE_BYTES = 4 * 1024 * 1024
"""Arrays of at least this size use huge pages, as numpy's do: a lookup touches one page per hash in each of them."""


def any_true(mask: Bools) -> bool:
    """Whether any is true. For a few values this is four times as fast as numpy's ``any``."""
    return bool(np.count_nonzero(mask))


def all_true(mask: Bools) -> bool:
    return int(np.count_nonzero(mask)) == len(mask)


def only_value(values: Bytes) -> int | None:
    """What all of these are, of which there is at least one; None: they differ. Four times as fast as to compare them
    one by one."""
    packed = values.tobytes()
    return packed[0] if packed == packed[:1] * len(packed) else None


def least(values: Bytes) -> int:
    """The least of these, of which there is at least one; most are the same."""
    only = only_value(values)
    return int(values.min()) if only is None else only


def first_of_each(values: npt.NDArray[Any]) -> Bools:
    """True where a value occurs for the first time."""
    first = np.ones(len(values), np.bool_)
    if len(values) > 1 and not all_true(values[1:] > values[:-1]):
        ordered = np.sort(values)  # faster than np.unique, which only duplicates need
        if any_true(ordered[1:] == ordered[:-1]):
            first[:] = False
            first[np.unique(values, return_index=True)[1]] = True
    return first


def unique_counts(values: Ints) -> tuple[Ints, Ints]:
    """The distinct values and the number of each: faster than ``np.unique`` where most values are the same."""
    if len(values) < 2:
        return values, np.ones_like(values)
    ordered = np.sort(values)
    starts = (ordered[1:] != ordered[:-1]).nonzero()[0] + 1
    if not len(starts):
        return ordered[:1], np.array((len(ordered),))
    starts = np.concatenate((_ZERO, starts))
    counts = np.empty_like(starts)
    np.subtract(starts[1:], starts[:-1], out=counts[:-1])
    counts[-1] = len(ordered) - starts[-1]
    return ordered[starts], counts


def zeros(shape: tuple[int, ...], dtype: npt.DTypeLike, *, huge: bool = True) -> npt.NDArray[Any]:
    """Zeros that take no memory until they are written, and free all of it with the array.

    Large arrays are a mapping of their own. malloc would keep the freed memory, zero every page of it for the next
    allocation, and return only the end of the heap to the system.

    Args:
        huge: use huge pages, if the array is large enough.
    """
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    if nbytes < MAPPED_BYTES or sys.platform != "linux":  # elsewhere `kvsidecar size` replays traces
        return np.zeros(shape, dtype)
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge and nbytes >= HUGE_BYTES:
        with suppress(OSError):  # a kernel without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, dtype).reshape(shape)


def extended(column: npt.NDArray[Any], length: int, axis: int = -1, *, huge: bool = True) -> npt.NDArray[Any]:
    """A copy with length ``length`` along an axis; new values are zero."""
    shape = list(column.shape)
    shape[axis] = length
    grown = zeros(tuple(shape), column.dtype, huge=huge)
    grown[tuple(slice(each) for each in column.shape)] = column
    return grown
