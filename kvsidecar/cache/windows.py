"""Places for a slab that can be had by eviction alone: windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvsidecar.cache.arrays import Ints
from kvsidecar.cache.slabs import Grid, Part, Shape, Slabs

_ZERO = np.zeros(1, np.bool_)


class Window(NamedTuple):
    """A place for a slab that can be had by eviction alone."""

    start: int
    end: int
    """The unit after its last."""
    touched: int
    """Tick of the last use of a slot there."""


def oldest(slabs: Slabs, parts: Sequence[Part], shape: Shape, *, same_places: bool) -> list[Window]:
    """Places for a slab of this shape where all used slots are evictable and of other classes, at least one of them;
    least recently used first. O(slabs).

    Args:
        same_places: only those where one slab is that has as many slots at least.
    """
    cut = slabs.by_address()
    heads = slabs.head[cut]
    ends = heads + slabs.units[cut]
    barred = np.cumsum(
        np.concatenate((_ZERO, (slabs.used[cut] > slabs.evictable[cut]) | (slabs.size[cut] == shape.size)))
    )
    begin, end = _places_for(slabs.grid, parts, shape, heads, ends)
    low, high = ends.searchsorted(begin, "right"), heads.searchsorted(end, "left")
    fits = (high > low) & (barred[high] == barred[low])
    if same_places:
        one = np.minimum(low, len(cut) - 1)
        fits &= (heads[one] == begin) & (ends[one] >= end) & (slabs.size[cut][one] <= shape.size)
    begin, end = begin[fits], end[fits]
    touched = _largest_between(slabs.touched[cut], low[fits], high[fits])
    order = touched.argsort(kind="stable")
    return list(map(Window, begin[order].tolist(), end[order].tolist(), touched[order].tolist()))


def _places_for(grid: Grid, parts: Sequence[Part], shape: Shape, heads: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """First units and ends of the places where a slab of this shape could lie, if nothing else did. Large slots can
    lie anywhere: at one end of each slab, and of what is not cut."""
    begins: list[Ints] = []
    stops: list[Ints] = []
    for part in parts:
        if shape.nests:
            begin = np.arange(part.start, part.end, shape.units)
            end = np.minimum(begin + shape.units, part.end)
            if grid.nbytes(begin.item(-1), end.item(-1)) < shape.size:
                begin, end = begin[:-1], end[:-1]
        else:
            edges = np.concatenate((heads, ends, (part.start, part.end)))
            begin = np.unique(np.concatenate((edges, edges - shape.units)))
            begin = begin[(begin >= part.start) & (begin + shape.units <= part.end)]
            end = begin + shape.units
            if len(end) and grid.nbytes(begin.item(-1), end.item(-1)) < shape.size:  # with a short unit
                begin, end = begin[:-1], end[:-1]
        begins.append(begin)
        stops.append(end)
    return np.concatenate(begins), np.concatenate(stops)


def _largest_between(values: Ints, low: Ints, high: Ints) -> Ints:
    """The largest of ``values[low:high]`` for each pair; none is empty."""
    largest = np.zeros(len(low), np.int64)
    levels = values
    length = 1
    while len(low):
        mine = (high - low >= length) & (high - low < 2 * length)
        largest[mine] = np.maximum(levels[low[mine]], levels[high[mine] - length])
        if not (high - low >= 2 * length).any():
            break
        levels = np.maximum(levels[:-length], levels[length:])
        length *= 2
    return largest
