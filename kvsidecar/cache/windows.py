"""Places for a slab that can be had by eviction alone: windows.

Where all slabs nest, the least recently used place is the best one: `oldest`. Large slots can lie anywhere, leave gaps
between them, and do not move; so among them it matters which place is taken: `cheapest`. It weighs what is evicted,
bytes by the reciprocal of their age (a block is the likelier to be asked for the later it was used), against the gaps
that are left. A place may have an end that is too short for any slot, but its gaps at both ends become one with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvsidecar.cache.arrays import Ints
from kvsidecar.cache.slabs import Grid, NodePart, Shape, Slabs

GAPS_AIM = 0.01
"""Soft limit on lost bytes, as a part of the pool. Each byte beyond it costs as much as evicting one of the oldest."""
GAPS_LIMIT = 0.02
"""Limit on lost bytes, beside one slot of the smallest size. Each byte beyond it costs `OVER_LIMIT` times as much."""
OVER_LIMIT = 25
GAPS_END = 0.025
"""Hard limit on lost bytes. Each byte beyond it costs `OVER_END` times as much (there are nearly always other places),
unless the place reduces an existing loss: it need not do so at any cost, by evicting what is used most."""
OVER_END = 1000
LONGER = 4
"""Number of slabs at which a large slot's place may end: the first where it is long enough, or a later one, to join the
gap behind that."""

Floats = npt.NDArray[np.float64]


class Window(NamedTuple):
    """A place for a slab that can be had by eviction alone."""

    start: int
    end: int
    """The unit after its last."""
    touched: int
    """Blocks of the slab's own size that were used before this tick go first. From `oldest`: tick of the last use of a
    slot there."""


class Spans(NamedTuple):
    """Runs of adjacent slabs that could go for a new one, as columns."""

    start: Ints
    """First unit of its first slab."""
    end: Ints
    """The unit after its last slab."""
    cost: Floats
    """Bytes of its blocks, each weighed by the reciprocal of its age in ticks."""
    lost: Ints
    """Bytes of gaps that fit no slot, if the new slab lay there, less those that are there now."""


def oldest(slabs: Slabs, parts: Sequence[NodePart], shape: Shape) -> list[Window]:
    """Places for a slab of this shape, which nests, where all used slots are evictable and of other classes, at least
    one of them; least recently used first. O(slabs)."""
    cut = slabs.by_address()
    heads = slabs.head[cut]
    ends = heads + slabs.units[cut]
    barred = _sums((slabs.used[cut] > slabs.evictable[cut]) | (slabs.size[cut] == shape.size))
    places = [_places_of(part, shape) for part in parts]
    begin, end = (np.concatenate(column) for column in zip(*places, strict=True))
    low, high = ends.searchsorted(begin, "right"), heads.searchsorted(end, "left")
    fits = (high > low) & (barred[high] == barred[low])
    begin, end = begin[fits], end[fits]
    touched = _largest_between(slabs.touched[cut], low[fits], high[fits])
    order = touched.argsort(kind="stable")
    return list(map(Window, begin[order].tolist(), end[order].tolist(), touched[order].tolist()))


def replaceable(slabs: Slabs, parts: Sequence[NodePart], shape: Shape) -> list[Window]:
    """The places of `oldest` where one slab makes room for one of at most as many slots, at its own start.
    O(slabs)."""
    cut = slabs.by_address()
    heads = slabs.head[cut]
    begin, end = heads, heads + shape.units
    if shape.nests:
        places = [_places_of(part, shape) for part in parts]
        begin, end = (np.concatenate(column) for column in zip(*places, strict=True))
    one = np.minimum(heads.searchsorted(begin), len(cut) - 1)
    ends, nbytes = (heads + slabs.units[cut])[one], slabs.nbytes[cut][one]
    fits = (heads[one] == begin) & (ends >= end) & (nbytes >= shape.size)
    fits &= ends < 2 * end - begin  # else another one would be cut behind it
    fits &= slabs.capacity[cut][one] >= (nbytes // shape.size if shape.nests else 1)
    fits &= ((slabs.used[cut] == slabs.evictable[cut]) & (slabs.size[cut] != shape.size))[one]
    begin, end, touched = begin[fits], end[fits], slabs.touched[cut][one[fits]]
    order = touched.argsort(kind="stable")
    return list(map(Window, begin[order].tolist(), end[order].tolist(), touched[order].tolist()))


class Wanted(NamedTuple):
    """Slabs that are to lie side by side."""

    shape: Shape
    slots: int
    """Number of slots, beside those that fit the gaps between which they lie. One for slabs that nest."""


def cheapest(
    slabs: Slabs,
    parts: Sequence[NodePart],
    whole: list[int],
    wanted: Wanted,
    shapes: Sequence[Shape],
    wasted: int,
) -> Iterator[Window]:
    """Places for these slabs where all used slots are evictable, the best first. Those of large slots may have slots of
    their own class: a gap beside one goes to its other end. O(slabs).

    Args:
        parts: all parts, with the runs that are not cut.
        whole: slabs that are in these runs already.
        shapes: shapes of all classes in use, and the wanted one.
        wasted: bytes that are lost in slabs.
    """
    grid = slabs.grid
    cut = slabs.by_address()
    if whole:
        stay = np.ones(len(slabs.head), np.bool_)
        stay[whole] = False
        cut = cut[stay[cut]]
    touched = slabs.touched[cut]
    now = int(touched.max(initial=0)) + 1
    lost = 0
    found: list[Spans] = []
    for part in parts:
        low, high = slabs.head[cut].searchsorted((part.start, part.end))
        mine, gaps = _spans_of(slabs, part, cut[low:high], now, wanted, shapes)
        found.append(mine)
        lost += gaps
    start, end, cost, more = (np.concatenate(column) for column in zip(*found, strict=True))
    smallest = min(each.size for each in shapes)
    age = now - int(touched.min(initial=now - 1))

    def bytes_of(part: float) -> float:
        return max(0.0, part * grid.pool_bytes - wasted)

    aim, limit, end_of = bytes_of(GAPS_AIM), bytes_of(GAPS_LIMIT) + smallest, bytes_of(GAPS_END) + smallest

    def price(gaps: Ints) -> Floats:
        excess: Floats = np.maximum(0.0, gaps - aim) + OVER_LIMIT * np.maximum(0.0, gaps - limit)
        return excess / age

    cost = cost + price(lost + more) - price(np.array(lost))
    cost += OVER_END * np.maximum(0.0, lost + more - max(lost, end_of)) / age
    nbytes = wanted.slots * wanted.shape.units * grid.unit
    for at in _ascending(cost):
        each = cost.item(at)
        # To evict as much of its own size costs the same at this age; below zero nothing else goes first.
        best = now - int(min(nbytes / each, now + 1)) if each > 0 else -1
        yield Window(start.item(at), end.item(at), best)


def _spans_of(
    slabs: Slabs, part: NodePart, cut: Ints, now: int, wanted: Wanted, shapes: Sequence[Shape]
) -> tuple[Spans, int]:
    """The runs of a part's slabs that could go, and the bytes of its gaps that fit no slot now."""
    grid, shape = slabs.grid, wanted.shape
    heads = slabs.head[cut]
    ends = heads + slabs.units[cut]
    gaps, stops = np.concatenate(((part.start,), ends)), np.concatenate((heads, (part.end,)))
    """Gaps before each slab, and behind the last: empty where two slabs touch."""
    barred = slabs.used[cut] > slabs.evictable[cut]
    if shape.nests:
        barred |= slabs.size[cut] == shape.size
        begin, end = _places_of(part, shape)
        low, high = ends.searchsorted(begin, "right"), heads.searchsorted(end, "left")
    else:
        first = np.arange(len(gaps))
        room = _sums((stops - gaps) // shape.units * shape.units)
        """Sums, before each gap, of the room in the earlier ones for slots that fit them as they are."""
        more = wanted.slots * shape.units
        least = np.maximum((stops - room[1:]).searchsorted(gaps - room[:-1] + more), first + 1)
        low = np.tile(first, LONGER)
        high = np.concatenate([least + longer for longer in range(LONGER)])
        inside = high < len(stops)
        low, high = low[inside], high[inside]
        begin, end = gaps[low], gaps[low] + more + room[high + 1] - room[low]
    busy, value = _sums(barred), _sums(slabs.nbytes[cut] / (now - slabs.touched[cut]))
    last = np.minimum(end * grid.unit, grid.pool_bytes)
    last -= begin * grid.unit if shape.nests else (end - shape.units) * grid.unit
    fits = (high > low) & (busy[high] == busy[low]) & (last >= shape.size)
    low, high, begin, end = low[fits], high[fits], begin[fits], end[fits]
    lost = _unfit(grid, shapes, gaps, stops)
    before = _sums(lost)
    after = _unfit(grid, shapes, end, stops[high])
    if shape.nests:  # a large slot lies where the gap before it begins
        after += _unfit(grid, shapes, gaps[low], begin)
    spans = Spans(heads[low], ends[high - 1], value[high] - value[low], after - (before[high + 1] - before[low]))
    return spans, int(lost.sum())


def _unfit(grid: Grid, shapes: Sequence[Shape], start: Ints, end: Ints) -> Ints:
    """Bytes of each run that are too short for a slot: the least that is left, whichever class gets it."""
    nbytes: Ints = np.minimum(end * grid.unit, grid.pool_bytes) - start * grid.unit
    left = nbytes.copy()
    for shape in shapes:
        if shape.nests:
            units = np.maximum(end // shape.least - -(-start // shape.least), 0) * shape.least
        else:
            units = np.minimum((end - start) // shape.units, nbytes // shape.size) * shape.units
        np.minimum(left, nbytes - units * grid.unit, out=left)
    return np.maximum(left, 0)


def _places_of(part: NodePart, shape: Shape) -> tuple[Ints, Ints]:
    """First units and ends of the places where a slab of this shape, which nests, could lie, if nothing else did."""
    begin = np.arange(part.start, part.end, shape.units)
    end = np.minimum(begin + shape.units, part.end)
    fits = np.minimum(end * part.grid.unit, part.grid.pool_bytes) - begin * part.grid.unit >= shape.size
    return begin[fits], end[fits]


def _ascending(values: Floats) -> Iterator[int]:
    """Positions of the values in their order. Nearly always only the first is asked for."""
    if len(values):
        least = int(values.argmin())
        yield least
        yield from (at for at in values.argsort(kind="stable").tolist() if at != least)


def _sums(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Sums of the first 0, 1, 2... values."""
    return np.concatenate(((0,), np.cumsum(values)))


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
