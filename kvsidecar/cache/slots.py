"""A slab allocator like memcached's: slabs are cut from the pool, each slab into slots of one size class.

Unlike memcached's, slabs are as long as their slots need (see ``slabs``), and a slab becomes whole again as soon as all
of its slots are free, so that a model with another block size can use its place. A slot is identified by its byte
offset in the pool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvsidecar.cache import kernels
from kvsidecar.cache.allocation_plan import AllocationPlan
from kvsidecar.cache.array_kernels import NOT_CUT, TWICE, WRONG_STATE, Columns, locate
from kvsidecar.cache.arrays import NO_INTS, Ints, unique_counts
from kvsidecar.cache.cut_pool import CutPool
from kvsidecar.cache.freed import Freed
from kvsidecar.cache.slot_states import NO_OWNER, SLOT_ALIGN, SlotState, size_class

__all__ = ["NO_OWNER", "SLOT_ALIGN", "SlotAllocator", "SlotState", "size_class"]

_FREE, _RESERVED, _IN_USE, _EVICTABLE, _QUARANTINED = map(int, SlotState)  # looking up enum members is slow
_UNOWNED = (_FREE, _QUARANTINED)


class SlotAllocator(CutPool):
    """Allocates slots of the pool, and counts the bytes in each state.

    Every call handles all slots of a request in a few array operations, whatever the size of the pool. The slots of
    one call are distinct.

    Args:
        pool_bytes: size of the pool; a multiple of `SLOT_ALIGN`.
        slab_bytes: size of the shortest slabs that have many slots; a multiple of `SLOT_ALIGN`.
        numa_of_slab: NUMA node of each piece of ``slab_bytes``, of which the last may be shorter; None: unknown.
            Default: all unknown. A slab lies on one node.
        freed: told of every slot that is freed or given out; None: nothing is zeroed.

    Raises:
        ValueError: a size or the length of ``numa_of_slab`` is wrong.
    """

    def __init__(
        self,
        pool_bytes: int,
        slab_bytes: int,
        numa_of_slab: Sequence[int | None] | None = None,
        freed: Freed | None = None,
    ) -> None:
        super().__init__(pool_bytes, slab_bytes, numa_of_slab)
        self.freed = freed
        self._unit = self.grid.unit

    # -- counts and plans --------------------------------------------------------------------------------------

    def bytes_in(self, state: SlotState) -> int:
        """Bytes of all slots in ``state``. What is not cut counts as FREE."""
        return self._bytes[state]

    @property
    def busy_bytes(self) -> int:
        """Bytes of slots that eviction cannot free now."""
        return self._bytes[_RESERVED] + self._bytes[_IN_USE] + self._bytes[_QUARANTINED]

    @property
    def usable_bytes(self) -> int:
        """Bytes of the pool that slots can have."""
        return self.total_bytes - self.wasted_bytes - self._bytes[_QUARANTINED]

    def bytes_of(self, slots: Ints) -> int:
        return int(self.slabs.size[self.slabs.holding(slots)].sum())

    def places(self, slots: Ints) -> Ints:
        """The numbers of these slots' records. Those of a slab are adjacent, from the first record of its first unit
        on."""
        slabs = self.slabs.holding(slots)
        inside = (slots - self.slabs.start.take(slabs)) // self.slabs.size.take(slabs)
        places: Ints = inside + self.slabs.head.take(slabs) * self.grid.records
        return places

    def owners(self, slab: int) -> Ints:
        """Owners of the used slots of a slab, one per slot."""
        first = self.slabs.first[slab]
        owners = self._owners[first : first + self.slabs.capacity[slab]]
        used: Ints = owners[owners != NO_OWNER]
        return used

    def can_allocate(self, needs: Mapping[int, int]) -> bool:
        """Whether all needs can be allocated now, larger size classes first."""
        if self._has_free(needs):
            return True
        return any(part.starts for part in self._parts) and self.plan(needs).unmet() is None

    def can_prefer(self, node: int, needs: Mapping[int, int]) -> bool:
        """Whether all needs can be allocated with ``node`` preferred, larger size classes first: preferring a node may
        cut a slab there although a slot is free elsewhere."""
        if self._has_free(needs, node):
            return True
        everywhere = {size: self.free_slots(size) for size in needs}
        there = {size: self.free_slots(size, node) for size in needs}
        return AllocationPlan(self.slabs, self._parts, needs, everywhere, node=node, free_there=there).unmet() is None

    def is_fragmented(self, needs: Mapping[int, int]) -> bool:
        """Whether enough bytes for these needs are free or evictable, but in slabs of other size classes that also hold
        slots which cannot be evicted. O(slabs)."""
        spare = self.total_bytes - self.busy_bytes - self.wasted_bytes
        if sum(size * need for size, need in needs.items()) > spare or all(size in needs for size in self._cut_slabs):
            return False
        slabs = self.slabs
        others = (slabs.size > 0) & ~np.isin(slabs.size, list(needs))
        return bool(((slabs.used > slabs.evictable) & others).any())

    def find_free(self, below: int) -> tuple[int, int] | None:
        """Offset and bytes of a free slot, or of a place that is not cut, that lies below this offset. None: all of it
        is full. O(slabs)."""
        slabs = self.slabs
        found = [
            (start * self._unit, min(below - start * self._unit, self.grid.nbytes(start, end)))
            for part in self._parts
            for start, end in zip(part.starts[:1], part.ends[:1], strict=True)
            if start * self._unit < below
        ]
        cut = slabs.by_address()
        for slab in cut[slabs.used[cut] < slabs.capacity[cut]].tolist():
            start, size = slabs.start.item(slab), slabs.size.item(slab)
            if start >= below:
                break
            first, lowest = slabs.first.item(slab), slabs.lowest_free.item(slab)
            states = self._states[first + lowest : first + slabs.capacity.item(slab)]
            slot = start + (lowest + int((states == _FREE).argmax())) * size
            if slot + size <= below:
                found.append((slot, size))
                break
        return min(found, default=None)

    # -- state changes -----------------------------------------------------------------------------------------

    def allocate(self, size: int, owners: Ints, node: int | None = None) -> Ints:
        """Reserve a slot of size class ``size`` for each owner: adjacent and ascending as far as free slots allow.

        Partly used slabs are filled first, so that whole ones remain for other classes. But a whole slab on ``node``
        precedes any slab elsewhere: a copy across sockets is slow.

        Raises:
            AssertionError: there are too few slots (see `plan`). Nothing has changed.
        """
        pieces: dict[int, Ints] = {}
        missing = len(owners)
        slabs = self._slabs_with_room(size, node)
        while missing and (slab := next(slabs, None)) is not None:
            pieces[slab] = indices = self._reserve_free(slab, missing)
            self._count_taken(slab, len(indices), indices.item(-1) + 1)
            missing -= len(indices)
        slots: list[Ints] = []
        for slab in sorted(pieces, key=self.slabs.head.item):
            indices = pieces[slab]
            self._owners[indices + self.slabs.first[slab]] = owners[: len(indices)]
            owners = owners[len(indices) :]
            slots.append(indices * size + self.slabs.start[slab])
        if missing:
            self.free(np.concatenate(slots) if slots else NO_INTS)
            raise AssertionError("there are fewer free slots than planned")
        taken = slots[0] if len(slots) == 1 else np.concatenate((NO_INTS, *slots))
        if self.freed is not None and len(taken):
            self.freed.take_out(taken, size)
        return taken

    def adopt(self, slots: Ints, cuts: Sequence[tuple[int, int, int]], owners: Ints, ticks: Ints) -> None:
        """Take over slots that an earlier run has sealed: each becomes EVICTABLE.

        Args:
            slots: distinct.
            cuts: first unit, end and size class of each slab that has one of these slots; see `can_cut`.
            owners: of each slot.
            ticks: last use of each slot.
        """
        for start, end, size in cuts:
            part = next(part for part in self._parts if part.start <= start < part.end)
            self._cut_slab(part, start, end, size)
        slabs = self.slabs.holding(slots)
        distinct, counts = unique_counts(slabs)
        for slab, count in zip(distinct.tolist(), counts.tolist(), strict=True):
            self._count_taken(slab, count, 0)
        at = self._locate(slots)[2]
        self._states[at] = _RESERVED
        self._owners[at] = owners
        self._move(slots, _RESERVED, _EVICTABLE)
        if self.freed is not None and len(slots):
            self.freed.take_out(slots, self.slabs.size[slabs])
        np.maximum.at(self.slabs.touched, slabs, ticks)

    def own(self, slots: Ints, owners: Ints) -> None:
        self._owners[self._locate(slots)[2]] = owners

    def seal(self, slots: Ints) -> None:
        """RESERVED to IN_USE: they are filled."""
        self._move(slots, _RESERVED, _IN_USE)

    def mark_corrupt(self, slots: Ints) -> None:
        """IN_USE or EVICTABLE to QUARANTINED: their bytes differ from those that were sealed."""
        _, sizes, at = self._locate(slots)
        self.mark_in_use(slots[self._states[at] == _EVICTABLE])
        self._move(slots, _IN_USE, _QUARANTINED)
        self._owners[at] = NO_OWNER
        if self.freed is not None and len(slots):
            self.freed.add(slots, sizes)

    def mark_in_use(self, slots: Ints) -> None:
        """EVICTABLE to IN_USE: their blocks are in use."""
        self._move(slots, _EVICTABLE, _IN_USE)

    def mark_evictable(self, slots: Ints, tick: int, source: SlotState = SlotState.IN_USE) -> None:
        """IN_USE to EVICTABLE, or RESERVED to EVICTABLE if a store has just filled them: their blocks were last used at
        ``tick``. Ticks never decrease."""
        self._move(slots, int(source), _EVICTABLE, tick)

    def touch(self, slots: Ints, tick: int) -> None:
        """Record that their blocks, which are evictable, were used at ``tick``."""
        self.slabs.touched[self.slabs.holding(slots)] = tick

    def free(self, slots: Ints) -> None:
        """RESERVED, IN_USE or EVICTABLE to FREE."""
        if not len(slots):
            return
        ordered = slots if len(slots) == 1 else np.sort(slots)
        sizes = self.slabs.size[self.slabs.holding(ordered)] if self.freed is not None else NO_INTS
        wrong, nbytes, slabs = kernels.free_slots(ordered, *self._columns, self._owners, NO_OWNER)
        if wrong:
            raise AssertionError(_what_is_wrong(wrong, "a slot is FREE or QUARANTINED; only a used slot can be freed"))
        for state, each in enumerate(nbytes):
            self._bytes[state] -= each
        self._bytes[_FREE] += sum(nbytes)
        for slab, count, lowest in slabs:
            self._count_freed(slab, count, lowest)
        if self.freed is not None:
            self.freed.add(ordered, sizes)

    @property
    def _columns(self) -> Columns:
        slabs = self.slabs
        return self._unit, slabs.at, slabs.size, slabs.start, slabs.first, slabs.evictable, self._states

    def _has_free(self, needs: Mapping[int, int], node: int | None = None) -> bool:
        """Whether the slabs that are already cut have enough free slots, as for nearly every request."""
        return all(self.free_slots(size, node) >= need for size, need in needs.items())

    def _locate(self, slots: Ints) -> tuple[Ints, Ints, Ints]:
        """Slab, size class, and index in the columns of each slot. Raises AssertionError if one is not a slot."""
        wrong, slabs, places = locate(slots, *self._columns[:5])
        if wrong:
            raise AssertionError(_what_is_wrong(wrong))
        return slabs, self.slabs.size[slabs], places

    def _move(self, slots: Ints, source: int, target: int, tick: int = -1) -> None:
        nbytes = kernels.move_slots(slots, *self._columns, source, target, self.slabs.touched, tick)
        if nbytes < 0:
            raise AssertionError(_what_is_wrong(nbytes, f"a slot is not {SlotState(source).name}"))
        self._bytes[source] -= nbytes
        self._bytes[target] += nbytes

    def _reserve_free(self, slab: int, wanted: int) -> Ints:
        """Reserve the lowest free slots of a slab, at most ``wanted``. Returns their indices; there is at least one."""
        slabs, indices = self.slabs, np.empty(wanted, np.int64)
        first, capacity, lowest = slabs.first.item(slab), slabs.capacity.item(slab), slabs.lowest_free.item(slab)
        return indices[: kernels.reserve_free(self._states, first, capacity, lowest, wanted, indices)]

    def _count_taken(self, slab: int, count: int, lowest_free: int) -> None:
        """Account for ``count`` slots of the slab that changed from FREE to RESERVED."""
        slabs, home = self.slabs, self._home(slab)
        size, used = slabs.size.item(slab), slabs.used.item(slab) + count
        slabs.lowest_free[slab] = lowest_free
        self._set_used(home, slab, used)
        self._bytes[_FREE] -= size * count
        self._bytes[_RESERVED] += size * count
        home.free_slots[size] -= count

    def _count_freed(self, slab: int, count: int, lowest: int) -> None:
        """Account for ``count`` slots of the slab that became FREE."""
        slabs, home = self.slabs, self._home(slab)
        size, used = slabs.size.item(slab), slabs.used.item(slab) - count
        self._set_used(home, slab, used)
        slabs.lowest_free[slab] = min(lowest, slabs.lowest_free.item(slab))
        home.free_slots[size] += count
        if not used:
            self._make_whole(slab)


def _what_is_wrong(code: int, with_its_state: str = "") -> str:
    """The sentence for what a kernel says of a slot."""
    if code == WRONG_STATE:
        return with_its_state
    if code == NOT_CUT:
        return "the slot is FREE: its slab is not cut"
    return "a slot is freed twice" if code == TWICE else "not a slot: its slab is cut to another size"
