"""Names for the arrays that the cache computes with, and what numpy lacks for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
"""Rows of blocks, slots (byte offsets in the pool), slabs, ticks."""
Words = npt.NDArray[np.uint64]
"""Block hashes, [n, words]: each padded with zeros to a multiple of eight bytes."""
Bools = npt.NDArray[np.bool_]

NO_INTS: Ints = np.empty(0, np.int64)

FEW = 8
"""Up to so many rows a loop over them is faster than a handful of array operations, each of which costs as much for one
value as for a hundred. Engines that decode send jobs of one to a few blocks, so the lowest operations have both forms;
what a request does is written once."""


def some(mask: Bools) -> bool:
    """Whether one is true. For a few values this is four times as fast as numpy's ``any``."""
    return bool(np.count_nonzero(mask))


def every(mask: Bools) -> bool:
    """Whether all are true."""
    return int(np.count_nonzero(mask)) == len(mask)


def add_to(column: npt.NDArray[Any], rows: Ints, change: int) -> None:
    """Add to the values of these rows, each once."""
    if len(rows) <= FEW:
        for row in rows.tolist():
            column[row] += change
    else:
        column[rows] += change


def few(values: Ints | list[int]) -> list[int]:
    """To be walked one by one."""
    return values if isinstance(values, list) else values.tolist()


def where_zero(column: npt.NDArray[Any], rows: Ints) -> Bools:
    """True for the rows whose value is zero."""
    if len(rows) <= FEW:
        return np.array([not column.item(row) for row in rows.tolist()], np.bool_)
    zero: Bools = column[rows] == 0
    return zero


def has_duplicates(values: npt.NDArray[Any]) -> bool:
    """Whether a value comes twice."""
    if len(values) < 2 or every(values[1:] > values[:-1]):
        return False
    ordered = np.sort(values)
    return some(ordered[1:] == ordered[:-1])


def where_negative(values: Ints) -> Ints:
    """Places of the values below zero."""
    if len(values) <= FEW:
        return np.array([place for place, value in enumerate(values.tolist()) if value < 0], np.int64)
    return (values < 0).nonzero()[0]


def first_of_each(values: npt.NDArray[Any]) -> Bools:
    """True where a value comes for the first time."""
    if len(values) == 1 <= FEW:
        return np.array((True,))
    first = np.ones(len(values), np.bool_)
    if has_duplicates(values):
        first[:] = False
        first[np.unique(values, return_index=True)[1]] = True
    return first


def tally(values: Ints) -> tuple[Ints, Ints]:
    """The distinct values, and how often each comes: ``np.unique`` for values that are almost all the same."""
    if len(values) < 2:
        return values, np.ones_like(values)
    ordered = np.sort(values)
    ends = np.append((ordered[1:] != ordered[:-1]).nonzero()[0], len(ordered) - 1)
    return ordered[ends], np.diff(ends, prepend=-1)


def longer(column: npt.NDArray[Any], length: int) -> npt.NDArray[Any]:
    """A copy with room for more in its last axis; what is new is zero.

    Memory that was never written to costs none (the kernel maps it to its page of zeros), so columns are made as long
    as they can ever get, and growing one is for what could not be foreseen: it copies everything in one go.
    """
    grown = np.zeros((*column.shape[:-1], length), column.dtype)
    grown[..., : column.shape[-1]] = column
    return grown
