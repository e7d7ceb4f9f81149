"""Plans which slots the pool could allocate if others were freed first. Changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvsidecar.cache.arrays import Ints, unique_counts
from kvsidecar.cache.slabs import NodePart, Slabs, find_run


class Unmet(NamedTuple):
    """``missing`` slots of size class ``size`` cannot be allocated."""

    size: int
    missing: int


class AllocationPlan:
    """Free slots and uncut runs as they would be after planned frees, and whether they meet the needs.

    It predicts `SlotAllocator.allocate` exactly, provided that larger size classes are allocated first: free slots of
    the class, then new slabs. With a node preferred, each of these there before any elsewhere.

    Args:
        slabs: all slabs of the pool; only read.
        parts: all parts of the pool; only read.
        needs: slots needed per size class.
        free_slots: free slots per size class of ``needs``.
        node: the preferred one; None: no plan for one.
        free_there: of ``free_slots``, those on this node.
    """

    def __init__(
        self,
        slabs: Slabs,
        parts: Sequence[NodePart],
        needs: Mapping[int, int],
        free_slots: Mapping[int, int],
        *,
        node: int | None = None,
        free_there: Mapping[int, int] | None = None,
    ) -> None:
        self._slabs = slabs
        self.parts = parts
        """All parts, with the runs that are not cut after what this plan frees."""
        self._own_parts = False
        """Whether ``parts`` are copies."""
        self._needs = sorted(needs.items(), reverse=True)
        self._free_slots = Counter(free_slots)
        self._node = node
        self._free_there = free_there or {}
        self._freed: Counter[int] = Counter()
        """Slab -> number of its slots that this plan frees."""

    def unmet(self) -> Unmet | None:
        """The largest size class whose need is not met; None if all are met."""
        parts: Sequence[NodePart] | None = None
        for size, need in self._needs:
            missing = need - self._free_slots[size]
            if self._node is None and missing <= 0:
                continue
            if self._node is None and len(self._needs) == 1:
                missing -= self._room(size)
            elif parts is None:
                parts = [part.copy() for part in self.parts]
            if parts is not None:
                if self._node is not None:
                    elsewhere = self._free_slots[size] - self._free_there.get(size, 0)
                    missing += elsewhere
                    missing = self._cut([part for part in parts if part.node == self._node], size, missing) - elsewhere
                missing = self._cut(parts, size, missing)
            if missing > 0:
                return Unmet(size, missing)
        return None

    def surplus(self) -> int | None:
        """Slots beyond the need; None if the needs are of several size classes."""
        if len(self._needs) > 1:
            return None
        (size, need) = self._needs[0]
        return self._free_slots[size] + self._room(size) - need

    @property
    def largest(self) -> int:
        return self._needs[0][0]

    @property
    def whole_slabs(self) -> list[int]:
        """Slabs whose used slots are all freed by the plan."""
        return [slab for slab, freed in self._freed.items() if freed and self.is_whole(slab)]

    def is_whole(self, slab: int) -> bool:
        """Whether the plan frees every used slot of the slab."""
        return self._freed[slab] == int(self._slabs.used[slab])

    def free(self, slots: Ints) -> None:
        """Plan to free these used slots. No slot may be given twice."""
        self._change(slots, 1)

    def undo_free(self, slots: Ints) -> None:
        """Remove these slots from the plan."""
        self._change(slots, -1)

    def _room(self, size: int) -> int:
        """How many slots could be cut from all runs."""
        shape = self._slabs.grid.shape(size)
        return sum([part.count(shape) for part in self.parts])

    def _cut(self, parts: Sequence[NodePart], size: int, missing: int) -> int:
        """Cut slabs until no slots are missing. Returns how many still are."""
        grid = self._slabs.grid
        shape = grid.shape(size)
        while missing > 0 and (found := find_run(parts, shape)) is not None:
            part, start, end = found
            part.take(start, end)
            missing -= grid.nbytes(start, end) // size
        return missing

    def _change(self, slots: Ints, sign: int) -> None:
        distinct, counts = unique_counts(self._slabs.holding(slots))
        for slab, count in zip(distinct.tolist(), counts.tolist(), strict=True):
            size = int(self._slabs.size[slab])
            if sign < 0 and self.is_whole(slab):
                self._make_whole(slab, -1)
            self._freed[slab] += sign * count
            self._free_slots[size] += sign * count
            if sign > 0 and self.is_whole(slab):
                self._make_whole(slab, 1)

    def _make_whole(self, slab: int, sign: int) -> None:
        slabs = self._slabs
        self._free_slots[int(slabs.size[slab])] -= sign * int(slabs.capacity[slab])
        if not self._own_parts:
            self.parts, self._own_parts = [part.copy() for part in self.parts], True
        start = slabs.head.item(slab)
        end = start + slabs.units.item(slab)
        part = next(part for part in self.parts if part.start <= start < part.end)
        (part.add if sign > 0 else part.take)(start, end)
