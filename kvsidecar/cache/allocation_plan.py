"""Plans which slots the pool could allocate if others were freed first. Changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from kvsidecar.cache.arrays import Slots, unique_counts
from kvsidecar.cache.slabs import Slabs


class Unmet(NamedTuple):
    """``missing`` slots of size class ``size`` cannot be allocated."""

    size: int
    missing: int


class AllocationPlan:
    """Free slots and whole slabs as they would be after planned frees, and whether they meet the needs.

    It predicts `SlotAllocator.allocate` exactly, provided that larger size classes are allocated first: free slots of
    the class, then whole slabs, the short slab last.

    Args:
        slabs: all slabs of the pool; only read.
        needs: slots needed per size class.
        free_slots: free slots per size class of ``needs``.
        whole_slabs: uncut slabs of full length.
        short_slab: bytes of the short last slab if it is uncut, else 0.
    """

    def __init__(
        self,
        slabs: Slabs,
        needs: Mapping[int, int],
        free_slots: Mapping[int, int],
        *,
        whole_slabs: int,
        short_slab: int,
    ) -> None:
        self._slabs = slabs
        self._needs = sorted(needs.items(), reverse=True)
        self._free_slots = Counter(free_slots)
        self._whole_slabs = whole_slabs
        self._short_slab = short_slab
        self._freed: Counter[int] = Counter()
        """Slab -> number of its slots that this plan frees."""

    def unmet(self) -> Unmet | None:
        """The largest size class whose need is not met; None if all are met."""
        whole, short = self._whole_slabs, self._short_slab
        for size, need in self._needs:
            missing = need - self._free_slots[size]
            if missing <= 0:
                continue
            per_slab = self._slabs.slab_bytes // size
            opened = min(whole, -(-missing // per_slab)) if per_slab else 0
            whole -= opened
            missing -= opened * per_slab
            if missing > 0:
                missing -= short // size
                if short >= size:
                    short = 0
            if missing > 0:
                return Unmet(size, missing)
        return None

    def surplus(self) -> int | None:
        """Slots beyond the need; None if the needs are of several size classes."""
        if len(self._needs) > 1:
            return None
        (size, need) = self._needs[0]
        whole = self._whole_slabs * (self._slabs.slab_bytes // size) + self._short_slab // size
        return self._free_slots[size] + whole - need

    @property
    def largest(self) -> int:
        return self._needs[0][0]

    def is_whole(self, slab: int) -> bool:
        """Whether the plan frees every used slot of the slab."""
        return self._freed[slab] == int(self._slabs.used[slab])

    def free(self, slots: Slots) -> None:
        """Plan to free these used slots. No slot may be given twice."""
        self._change(slots, 1)

    def undo_free(self, slots: Slots) -> None:
        """Remove these slots from the plan."""
        self._change(slots, -1)

    def _change(self, slots: Slots, sign: int) -> None:
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
        if slabs.nbytes[slab] == slabs.slab_bytes:
            self._whole_slabs += sign
        else:
            self._short_slab += sign * int(slabs.nbytes[slab])
