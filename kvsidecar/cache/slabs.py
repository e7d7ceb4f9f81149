"""The slabs of a pool: how long they are for a size class, where the uncut runs between them are, and their columns.

The pool is divided into **units**, which are the same for the whole life of a pool. A **slab** is a run of adjacent
units that is cut into slots of one size class. There are two kinds of size classes:

* A class of which many slots fit: its slabs are as long as ``slab_bytes``, or two, four, eight... times as long, the
  shortest of these whose end, too short for a slot, is no more than `MAX_WASTE` of it. They lie at multiples of their
  length. So they nest: a place for a long one is made of places for shorter ones, and nothing is left between them.
  Where there is no such place, in gaps and at the end of the pool, they may be a half, a quarter, an eighth... of that.
* A class of large slots, of which few fit a slab of `LONGEST_SHARE` of the pool (`FEW_SLOTS`): each slot is a slab of
  its own, as many units as it needs, anywhere. The units are small enough that rounding up to them costs less than
  `MAX_WASTE`. When such a slot is freed, its place and the gaps at its ends become one run.

All are cut as low in the pool as they can be. So the order of age tends to be the order of offsets, and what is left of
a place lies beside those that are freed next.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvsidecar.cache.arrays import Ints, extended
from kvsidecar.cache.freed import PAGE_BYTES

LEVELS = 4
"""Number of groups of partly used slabs, by how full they are. New blocks go into the fullest slabs, so that a nearly
empty slab can become whole for another size class, and blocks in use do not spread over many slabs."""
MAX_WASTE = 0.03
"""The most of a slab that its end, too short for a slot, may be."""
LONGEST_SHARE = 16
"""No slab of several slots is longer than this part of the pool (or than ``slab_bytes``): longer ones would go only
together."""
FEW_SLOTS = 34
"""A slot is large if no more of them fit the longest slab: it is larger than a 544th of the pool. If twice as many fit,
it is, too, where it loses less so."""
SHORTEST = 16
"""A slab that is cut in a gap has at least this part of its usual length."""
LARGEST_SHARE = 8
"""A slot may have this part of the pool."""
MIN_UNITS = 32768
"""A pool has at least this many units, if it has as many pages and its slabs can be divided like this: a slot that is
larger than 3 % of the longest slab, a 1056th of the pool, has more than 31 of them then."""
MAX_UNITS = 1 << 20


class Shape(NamedTuple):
    """The shape of the slabs of a size class."""

    size: int
    """Bytes of a slot."""
    units: int
    nests: bool
    """They lie at multiples of their length, from the start of their part of the pool."""
    least: int
    """Units of the shortest slab that may be cut, where no longer place is left."""


def unit_bytes(pool_bytes: int, slab_bytes: int) -> int:
    """Bytes of a unit: a whole number of pages that divides a slab."""
    slab, most = slab_bytes // PAGE_BYTES, max(1, pool_bytes // PAGE_BYTES // MIN_UNITS)
    least = -(-pool_bytes // PAGE_BYTES // MAX_UNITS)
    divisors = {each for low in range(1, int(slab**0.5) + 1) if slab % low == 0 for each in (low, slab // low)}
    fine = [each for each in divisors if least <= each <= most]
    return PAGE_BYTES * (max(fine) if fine else min(each for each in divisors if each >= min(least, slab)))


class Grid:
    """The units of a pool, and the shapes of its slabs.

    Attributes:
        unit: bytes of a unit; the last one may be shorter.
        records: how many records a unit has: one for each slot that could lie in it.
    """

    def __init__(self, pool_bytes: int, slab_bytes: int) -> None:
        self.pool_bytes, self.slab_bytes = pool_bytes, slab_bytes
        self.unit = unit_bytes(pool_bytes, slab_bytes)
        self.num_units = -(-pool_bytes // self.unit)
        self.records = self.unit // PAGE_BYTES
        self._shapes: dict[int, Shape] = {}

    def __len__(self) -> int:
        return self.num_units

    def nbytes(self, start: int, end: int) -> int:
        """Bytes of a run of units."""
        return min(end * self.unit, self.pool_bytes) - start * self.unit

    def shape(self, size: int) -> Shape:
        """The shape of slabs for slots of this size class."""
        found = self._shapes.get(size)
        if found is None:
            self._shapes[size] = found = self._new_shape(size)
        return found

    def _new_shape(self, size: int) -> Shape:
        nested = self._nested_shape(size)
        if nested is not None and not self._is_large(size, nested):
            return nested
        units = -(-size // self.unit)
        return Shape(size, units, False, units)

    def _is_large(self, size: int, nested: Shape) -> bool:
        """Whether each of these slots is a slab of its own although many would fit one: such a slab would be long
        beside other large slots, and lose as much at its end."""
        longest = self.pool_bytes // LONGEST_SHARE
        if longest < self.slab_bytes or size * 2 * FEW_SLOTS <= longest:
            return False
        length = nested.units * self.unit
        return size * FEW_SLOTS > longest or -size % self.unit * length < length % size * size

    def _nested_shape(self, size: int) -> Shape | None:
        nbytes = self.slab_bytes
        while nbytes <= max(self.slab_bytes, self.pool_bytes // LONGEST_SHARE):
            if self._suits(size, nbytes):
                units = least = nbytes // self.unit
                while least % 2 == 0 and units < SHORTEST * least and self._suits(size, least // 2 * self.unit):
                    least //= 2
                return Shape(size, units, True, least)
            nbytes *= 2
        return None

    @staticmethod
    def _suits(size: int, nbytes: int) -> bool:
        return size <= nbytes and nbytes % size <= MAX_WASTE * nbytes


class NodePart:
    """The runs of a part of the pool that are not cut. A part lies on one NUMA node, and no slab lies in two.

    Args:
        start: its first unit.
        end: the unit after its last.
    """

    def __init__(self, grid: Grid, start: int, end: int, node: int | None) -> None:
        self.grid, self.start, self.end, self.node = grid, start, end, node
        self.nbytes = grid.nbytes(start, end)
        self.starts = [start]
        self.ends = [end]
        """Ends of the runs, ascending."""
        self.joins = True
        """Runs that touch become one; otherwise each is what a slab left."""

    def copy(self) -> NodePart:
        part = NodePart(self.grid, self.start, self.end, self.node)
        part.starts, part.ends, part.joins = self.starts.copy(), self.ends.copy(), self.joins
        return part

    def add(self, start: int, end: int) -> None:
        """Add units that are whole again."""
        at = bisect_left(self.starts, start)
        if self.joins and at < len(self.starts) and self.starts[at] == end:
            end = self.ends[at]
            del self.starts[at], self.ends[at]
        if self.joins and at and self.ends[at - 1] == start:
            self.ends[at - 1] = end
            return
        self.starts.insert(at, start)
        self.ends.insert(at, end)

    def take(self, start: int, end: int) -> None:
        """Remove units that are cut; they lie in one run."""
        at = bisect_right(self.starts, start) - 1
        if at < 0 or not start < end <= self.ends[at]:
            raise AssertionError("a slab is cut where another one is")
        low, high = self.starts[at], self.ends[at]
        del self.starts[at], self.ends[at]
        for piece in ((end, high), (low, start)):
            if piece[0] < piece[1]:
                self.starts.insert(at, piece[0])
                self.ends.insert(at, piece[1])

    def find(self, shape: Shape, *, short: bool = False) -> tuple[int, int] | None:
        """First unit and end of a run that a slab of this shape can have.

        Args:
            short: look for the longest of the shorter places.
        """
        if not shape.nests:
            return None if short else self._find_large(shape)
        if short:
            pieces = [
                piece
                for start, end in zip(self.starts, self.ends, strict=True)
                for piece in self._short_pieces(shape, start, end)
            ]
            return max(pieces, key=lambda piece: piece[1] - piece[0], default=None)
        for start, end in zip(self.starts, self.ends, strict=True):
            first = start + (self.start - start) % shape.units
            if first + shape.units <= end and self._is_long(first + shape.units):
                return first, first + shape.units
        return None

    def _is_long(self, end: int) -> bool:
        """Whether the unit before this one is as long as any other."""
        return end * self.grid.unit <= self.grid.pool_bytes

    def _short_pieces(self, shape: Shape, start: int, end: int) -> Iterator[tuple[int, int]]:
        """The places of a run for slabs that are shorter than usual, each as long as possible and at a multiple of its
        length. Where the pool's last unit is shorter, one ends there."""
        first, last = self._full(shape, start, end)
        for at, stop in ((start, first), (last, end)) if first < last else ((start, end),):
            while at < stop:
                inside, length = at - self.start, shape.units // 2 or 1
                while length > shape.least and (inside % length or at + length > stop):
                    length //= 2
                if inside % length:
                    at += shape.least - inside % shape.least
                    continue
                piece = at, min(stop, at + length)
                if self.grid.nbytes(*piece) >= shape.size and (piece[1] == self.end or piece[1] - at == length):
                    yield piece
                at += length

    def _full(self, shape: Shape, start: int, end: int) -> tuple[int, int]:
        """Where the places of the usual length in a run begin and end."""
        first = start + (self.start - start) % shape.units
        last = first + max(0, end - first) // shape.units * shape.units
        return first, last if last == first or self._is_long(last) else last - shape.units

    def _find_large(self, shape: Shape) -> tuple[int, int] | None:
        """The start of the shortest run that is long enough."""
        best: tuple[int, int] | None = None
        for start, end in zip(self.starts, self.ends, strict=True):
            fits = end - start >= shape.units and self.grid.nbytes(start, start + shape.units) >= shape.size
            if fits and (best is None or end - start < best[1] - best[0]):
                best = start, end
        return None if best is None else (best[0], best[0] + shape.units)

    def count(self, shape: Shape) -> int:
        """How many slots could be cut from all runs."""
        return sum(self.count_in(shape, start, end) for start, end in zip(self.starts, self.ends, strict=True))

    def count_in(self, shape: Shape, start: int, end: int) -> int:
        """How many slots could be cut from one run."""
        units = shape.units
        if not shape.nests:
            slots = (end - start) // units
            last = start + slots * units
            return slots - (slots > 0 and self.grid.nbytes(last - units, last) < shape.size)
        first, last = self._full(shape, start, end)
        slots = (last - first) // units * (units * self.grid.unit // shape.size)
        return slots + sum(self.grid.nbytes(*piece) // shape.size for piece in self._short_pieces(shape, start, end))


class Slabs:
    """The slabs of a pool, as columns: a slab is an index. Each has at least one used slot; 0 is none."""

    _COLUMNS = ("head", "units", "start", "nbytes", "size", "capacity", "first", "used", "evictable", "touched")

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.at: npt.NDArray[np.int32] = np.zeros(len(grid), np.int32)
        """The slab of each unit."""
        self.head = np.zeros(64, np.int64)
        """Its first unit."""
        self.units = np.zeros_like(self.head)
        self.start = np.zeros_like(self.head)
        """Its offset in the pool."""
        self.nbytes = np.zeros_like(self.head)
        self.size = np.zeros_like(self.head)
        """Size class of its slots; 0 where there is no slab."""
        self.capacity = np.zeros_like(self.head)
        """Number of its slots."""
        self.first = np.zeros_like(self.head)
        """Index of its first slot in the columns of slots."""
        self.used = np.zeros_like(self.head)
        """Number of slots that are not free."""
        self.evictable = np.zeros_like(self.head)
        self.touched = np.zeros_like(self.head)
        """Tick of the last use of one of its slots."""
        self.lowest_free = np.zeros_like(self.head)
        """No slot below this index is free."""
        self._spare: list[int] = []
        self._count = 1
        self._by_address: Ints | None = None

    def holding(self, slots: Ints) -> Ints:
        return self.at[slots // self.grid.unit].astype(np.int64)

    def within(self, start: int, end: int) -> list[int]:
        """The slabs with any of these units."""
        found = self.at[start:end]
        changes = (found[1:] != found[:-1]).nonzero()[0] + 1
        return [slab for slab in found[[0, *changes]].tolist() if slab]

    def by_address(self) -> Ints:
        """All slabs, in the order of their offsets."""
        if self._by_address is None:
            slabs = self.size.nonzero()[0]
            self._by_address = slabs[self.head[slabs].argsort()]
        return self._by_address

    def add(self, start: int, end: int, size: int) -> int:
        """Cut these units into slots. Returns the new slab."""
        slab = self._spare.pop() if self._spare else self._grow()
        nbytes = self.grid.nbytes(start, end)
        self.head[slab], self.units[slab] = start, end - start
        self.start[slab], self.nbytes[slab] = start * self.grid.unit, nbytes
        self.size[slab], self.capacity[slab] = size, nbytes // size
        self.used[slab] = self.evictable[slab] = self.touched[slab] = self.lowest_free[slab] = 0
        self.at[start:end] = slab
        self._by_address = None
        return slab

    def remove(self, slab: int) -> tuple[int, int]:
        """Make a slab whole. Returns its units."""
        start = self.head.item(slab)
        end = start + self.units.item(slab)
        self.at[start:end] = 0
        self.size[slab] = self.capacity[slab] = 0
        self._spare.append(slab)
        self._by_address = None
        return start, end

    def _grow(self) -> int:
        if self._count == len(self.head):
            for name in (*self._COLUMNS, "lowest_free"):
                setattr(self, name, extended(getattr(self, name), 2 * self._count))
        self._count += 1
        return self._count - 1


class NodeSlabs:
    """The slabs with free slots on one NUMA node."""

    def __init__(self) -> None:
        self.parts: list[NodePart] = []
        self.partial: dict[int, tuple[dict[int, None], ...]] = {}
        """Size class -> per level the cut slabs with a free slot, in order of arrival."""
        self.free_slots: Counter[int] = Counter()
        """Size class -> number of free slots in ``partial``."""

    def fullest(self, size: int) -> int | None:
        """One of the fullest cut slabs with a free slot."""
        for level in reversed(self.partial.get(size, ())):
            if level:
                return next(reversed(level))
        return None


def find_run(parts: Sequence[NodePart], shape: Shape) -> tuple[NodePart, int, int] | None:
    """The run for the next slab of this shape. Shorter ones come last."""
    for short in (False, True) if shape.nests else (False,):
        for part in parts:
            if (found := part.find(shape, short=short)) is not None:
                return part, *found
    return None
