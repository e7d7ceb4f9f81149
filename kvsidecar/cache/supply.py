"""What the pool could give if some slots were freed first: planning that changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvsidecar.cache.slots import Slab, SlotAllocator


class Supply:
    """Counts of free slots and whole slabs as they would be, and whether they meet the needs.

    It counts exactly what `SlotAllocator.allocate` will do if the slots are then asked for with the larger size
    classes first: free slots of the class, then whole slabs, the short one last.

    Args:
        allocator: whose slots are planned with; it is only read.
        needs: slots needed per size class.
        free_slots: free slots per size class of ``needs``.
        whole_slabs: uncut slabs of full length.
        short_slab: bytes of the short last slab if it is uncut, else 0.
    """

    def __init__(
        self,
        allocator: SlotAllocator[Any],
        needs: Mapping[int, int],
        free_slots: Mapping[int, int],
        *,
        whole_slabs: int,
        short_slab: int,
    ) -> None:
        self._allocator = allocator
        self._needs = sorted(needs.items(), reverse=True)
        self._free_slots = Counter(free_slots)
        self._whole_slabs = whole_slabs
        self._short_slab = short_slab
        self._freed: Counter[int] = Counter()
        """Slab index -> slots of it that this plan frees."""

    def unmet(self) -> int | None:
        """The largest size class whose need is not met, or None if all are."""
        whole, short = self._whole_slabs, self._short_slab
        for size, need in self._needs:
            missing = need - self._free_slots[size]
            if missing <= 0:
                continue
            per_slab = self._allocator.slots_per_slab(size)
            opened = min(whole, -(-missing // per_slab)) if per_slab else 0
            whole -= opened
            missing -= opened * per_slab
            if missing > 0:
                missing -= short // size
                if short >= size:
                    short = 0
            if missing > 0:
                return size
        return None

    def is_whole(self, slab: Slab[Any]) -> bool:
        """The plan frees every used slot of the slab."""
        return self._freed[slab.index] == slab.used

    def free(self, slot: int) -> None:
        """Plan that this used slot is freed."""
        slab = self._allocator.slab_of(slot)
        self._freed[slab.index] += 1
        self._free_slots[slab.size] += 1
        if self.is_whole(slab):
            self._make_whole(slab, 1)

    def keep(self, slot: int) -> None:
        """Take back `free`."""
        slab = self._allocator.slab_of(slot)
        if self.is_whole(slab):
            self._make_whole(slab, -1)
        self._freed[slab.index] -= 1
        self._free_slots[slab.size] -= 1

    def _make_whole(self, slab: Slab[Any], sign: int) -> None:
        self._free_slots[slab.size] -= sign * slab.capacity
        if slab.nbytes == self._allocator.slab_bytes:
            self._whole_slabs += sign
        else:
            self._short_slab += sign * slab.nbytes
