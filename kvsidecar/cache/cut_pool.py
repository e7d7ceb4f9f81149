"""A pool that is cut into slabs: which there are, where further ones can be cut, and what is lost at their ends and
between them. What becomes of the slots in them is `SlotAllocator`'s."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby

import numpy as np

from kvsidecar.cache.allocation_plan import AllocationPlan
from kvsidecar.cache.arrays import extended
from kvsidecar.cache.slabs import LARGEST_SHARE, LEVELS, Grid, NodePart, NodeSlabs, Slabs, find_run
from kvsidecar.cache.slot_states import NO_OWNER, SLOT_ALIGN, SlotState
from kvsidecar.cache.windows import Wanted, Window, cheapest, oldest, replaceable

_FREE = int(SlotState.FREE)
SPARE_COLUMNS = 4
"""The columns of a pool of the smallest slots are reserved this many times. They take no memory until they are used;
growing them later would copy those of a million slots, in 25 ms."""


class CutPool:
    """The slabs of a pool. A slab becomes whole, so that any class can have its place, when its last slot is freed.

    Args:
        pool_bytes: see `SlotAllocator`, as the others.

    Raises:
        ValueError: a size or the length of ``numa_of_slab`` is wrong.
    """

    def __init__(self, pool_bytes: int, slab_bytes: int, numa_of_slab: Sequence[int | None] | None) -> None:
        for name, nbytes in (("pool_bytes", pool_bytes), ("slab_bytes", slab_bytes)):
            if nbytes <= 0 or nbytes % SLOT_ALIGN:
                raise ValueError(f"{name} is {nbytes}; it must be a positive multiple of {SLOT_ALIGN}")
        num_slabs = -(-pool_bytes // slab_bytes)
        nodes = [None] * num_slabs if numa_of_slab is None else list(numa_of_slab)
        if len(nodes) != num_slabs:
            raise ValueError(f"numa_of_slab has {len(nodes)} entries for {num_slabs} slabs")
        self.total_bytes = pool_bytes
        self.slab_bytes = slab_bytes
        self.grid = Grid(pool_bytes, slab_bytes)
        self.wasted_bytes = 0
        """Ends of slabs that are too short for a slot."""
        self.slabs = Slabs(self.grid)
        self.new_slabs: list[tuple[int, int, int]] | None = None
        """First unit, end and size class of each slab that was cut, if this has been set to a list; its reader empties
        it."""
        self._new_places = True
        self._bytes = [0] * len(SlotState)
        """Bytes of the slots in each state. What is not cut counts as FREE."""
        self._bytes[_FREE] = pool_bytes
        self._states = np.zeros(SPARE_COLUMNS * pool_bytes // SLOT_ALIGN, np.uint8)
        """State of each slot. The slots of a slab are adjacent; slabs follow each other in the order they are cut."""
        self._owners = np.zeros(len(self._states), np.int64)
        self._columns_used = 0
        self._cut_slabs: Counter[int] = Counter()
        """Size class -> number of slabs cut to it."""
        self._spare_columns: dict[int, list[int]] = {}
        """Capacity -> former columns of slabs that are whole again, for reuse."""
        self._nodes: dict[int | None, NodeSlabs] = {node: NodeSlabs() for node in nodes}
        self._parts = _parts(self.grid, nodes)
        for part in self._parts:
            self._nodes[part.node].parts.append(part)

    # -- counts and plans --------------------------------------------------------------------------------------

    @property
    def sizes(self) -> Collection[int]:
        """Size classes in use."""
        return self._cut_slabs.keys()

    @property
    def largest_slot(self) -> int:
        """Bytes of the largest slot that can be cut: an eighth of the pool, or a slab if that is more; but no more than
        lies on one node."""
        eighth = self.total_bytes // LARGEST_SHARE // SLOT_ALIGN * SLOT_ALIGN
        return min(max(self.slab_bytes, eighth), max(part.nbytes for part in self._parts))

    @property
    def unfit_bytes(self) -> int:
        """Bytes of FREE that are too short for a slot of any size class in use: the least that is left between slabs,
        whichever of these classes gets it."""
        shapes = [self.grid.shape(size) for size in self._cut_slabs]
        if not shapes:
            return 0
        return sum(
            min(self.grid.nbytes(start, end) - part.count_in(shape, start, end) * shape.size for shape in shapes)
            for part in self._parts
            for start, end in zip(part.starts, part.ends, strict=True)
        )

    def free_slots(self, size: int, node: int | None = None) -> int:
        """Number of free slots in slabs that are already cut to ``size``, on one node or on all."""
        if node is not None:
            return self._nodes[node].free_slots[size] if node in self._nodes else 0
        return sum(home.free_slots[size] for home in self._nodes.values())

    def plan(self, needs: Mapping[int, int]) -> AllocationPlan:
        """A plan for allocating ``needs`` (slots per size class) without a preferred node."""
        return AllocationPlan(self.slabs, self._parts, needs, {size: self.free_slots(size) for size in needs})

    def windows(self, size: int) -> list[Window]:
        """Places for a slab of this size class where all used slots are evictable and of other classes, at least one of
        them; least recently used first. Slabs of this class and those in use leave no gaps, or there are no new places.
        O(slabs)."""
        if all(size == other for other in self._cut_slabs):
            return []  # the normal case with one model
        shape = self.grid.shape(size)
        return (
            oldest(self.slabs, self._parts, shape) if self._new_places else replaceable(self.slabs, self._parts, shape)
        )

    def leaves_gaps(self, sizes: Collection[int]) -> bool:
        """Whether slabs of these size classes, and of those in use, would leave gaps: they are several, and not all of
        them nest. Never where there are no new places."""
        several = {*self._cut_slabs, *sizes}
        return self._new_places and len(several) > 1 and not all(self.grid.shape(size).nests for size in several)

    def cheapest_windows(self, size: int, plan: AllocationPlan, slots: int = 1) -> Iterator[Window]:
        """Places for a slab of this size class, or for this many large slots side by side, beside others that leave
        gaps, after what the plan frees; best first. O(slabs)."""
        shape = self.grid.shape(size)
        wanted = Wanted(shape, 1 if shape.nests else slots)
        shapes = [self.grid.shape(each) for each in {*self._cut_slabs, size}]
        return cheapest(self.slabs, plan.parts, plan.whole_slabs, wanted, shapes, self.wasted_bytes)

    def can_cut(self, start: int, end: int) -> bool:
        """Whether a slab of an earlier run can be cut here: these units are in one part of the pool, and whole."""
        part = next((part for part in self._parts if part.start <= start < part.end), None)
        return part is not None and end <= part.end and not self.slabs.at[start:end].any()

    # -- changes -----------------------------------------------------------------------------------------------

    @contextmanager
    def no_new_places(self) -> Iterator[None]:
        """In the block, slabs are cut only in place of slabs that are freed in it and had at least as many slots."""
        runs = [(part, list(zip(part.starts, part.ends, strict=True))) for part in self._parts]
        for part in self._parts:
            part.starts, part.ends, part.joins = [], [], False
        self._new_places = False
        try:
            yield
        finally:
            self._new_places = True
            for part, withheld in runs:
                withheld += zip(part.starts, part.ends, strict=True)
                part.starts, part.ends, part.joins = [], [], True
                for start, end in withheld:
                    part.add(start, end)

    def _slabs_with_room(self, size: int, node: int | None) -> Iterator[int]:
        """Slabs of size class ``size`` with a free slot. A slab is cut when the iterator reaches it."""
        home = self._nodes.get(node) if node is not None else None
        if home is not None:
            while (slab := home.fullest(size)) is not None:
                yield slab  # the caller fills it before it asks for the next one
            while (slab := self._cut(home.parts, size)) is not None:
                yield slab
        for other in self._nodes.values():
            while (slab := other.fullest(size)) is not None:
                yield slab
        while (slab := self._cut(self._parts, size)) is not None:
            yield slab

    def _set_used(self, home: NodeSlabs, slab: int, used: int) -> None:
        """Set the number of used slots of a slab, and move it to the list of its new level."""
        slabs = self.slabs
        capacity = slabs.capacity.item(slab)
        before, after = slabs.used.item(slab) * LEVELS // capacity, used * LEVELS // capacity
        slabs.used[slab] = used
        if before != after:
            levels = home.partial[slabs.size.item(slab)]
            if before < LEVELS:  # else it was full
                del levels[before][slab]
            if after < LEVELS:
                levels[after][slab] = None

    def _cut(self, parts: Sequence[NodePart], size: int) -> int | None:
        """Cut a slab for this size class in one of these parts, if there is room for one."""
        if (found := find_run(parts, self.grid.shape(size))) is None:
            return None
        return self._cut_slab(*found, size)

    def _cut_slab(self, part: NodePart, start: int, end: int, size: int) -> int:
        part.take(start, end)
        slabs, home = self.slabs, self._nodes[part.node]
        slab = slabs.add(start, end, size)
        capacity = slabs.capacity.item(slab)
        self._cut_slabs[size] += 1
        slabs.first[slab] = first = self._new_columns(capacity)
        self._states[first : first + capacity] = _FREE
        self._owners[first : first + capacity] = NO_OWNER
        if size not in home.partial:
            home.partial[size] = tuple({} for _ in range(LEVELS))
        home.partial[size][0][slab] = None
        home.free_slots[size] += capacity
        self._count_wasted(slabs.nbytes.item(slab) - capacity * size)
        if self.new_slabs is not None:
            self.new_slabs.append((start, end, size))
        return slab

    def _make_whole(self, slab: int) -> None:
        """Give up a slab whose slots are all free, so that any class can have its place."""
        slabs, home = self.slabs, self._home(slab)
        size, capacity = slabs.size.item(slab), slabs.capacity.item(slab)
        del home.partial[size][0][slab]
        home.free_slots[size] -= capacity
        self._cut_slabs[size] -= 1
        if not self._cut_slabs[size]:
            del self._cut_slabs[size]
        self._count_wasted(capacity * size - slabs.nbytes.item(slab))
        self._spare_columns.setdefault(capacity, []).append(slabs.first.item(slab))
        part = self._part_of(slab)
        part.add(*slabs.remove(slab))

    def _part_of(self, slab: int) -> NodePart:
        if len(self._parts) == 1:
            return self._parts[0]
        start = self.slabs.head.item(slab)
        return next(part for part in self._parts if part.start <= start < part.end)

    def _home(self, slab: int) -> NodeSlabs:
        return self._nodes[self._part_of(slab).node]

    def _new_columns(self, capacity: int) -> int:
        if spare := self._spare_columns.get(capacity):
            return spare.pop()
        first = self._columns_used
        end, spares = first + capacity, self._spare_columns
        if end > len(self._states) and (enough := [each for each in spares if each > capacity and spares[each]]):
            # Slabs of many capacities in turn, each with columns of its own.
            first = spares[min(enough)].pop()
            spares.setdefault(min(enough) - capacity, []).append(first + capacity)
            return first
        self._columns_used += capacity
        if self._columns_used > len(self._states):
            self._states = extended(self._states, 2 * self._columns_used)
            self._owners = extended(self._owners, 2 * self._columns_used)
        return first

    def _count_wasted(self, nbytes: int) -> None:
        self.wasted_bytes += nbytes
        self._bytes[_FREE] -= nbytes


def _parts(grid: Grid, nodes: Sequence[int | None]) -> list[NodePart]:
    """The parts of a pool, from the node of each piece of ``slab_bytes``."""
    parts: list[NodePart] = []
    units, at = grid.slab_bytes // grid.unit, 0
    for node, pieces in groupby(nodes):
        end = at + len(list(pieces))
        parts.append(NodePart(grid, at * units, min(end * units, len(grid)), node))
        at = end
    return parts
