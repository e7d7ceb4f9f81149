"""A slab allocator like memcached's: slabs are cut from the pool, each slab into slots of one size class.

Unlike memcached's, slabs are as long as their slots need (see ``slabs``), and a slab becomes whole again as soon as all
of its slots are free, so that a model with another block size can use its place. A slot is identified by its byte
offset in the pool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvsidecar.cache.allocation_plan import AllocationPlan
from kvsidecar.cache.arrays import FEW, NO_INTS, Ints, Slots, any_true, as_list, unique_counts
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

    def bytes_of(self, slots: Slots) -> int:
        if len(slots) <= FEW:
            return sum([self.slabs.size.item(self.slabs.at.item(slot // self._unit)) for slot in as_list(slots)])
        return int(self.slabs.size[self.slabs.holding(slots)].sum())

    def places(self, slots: Slots) -> Slots:
        """The numbers of these slots' records. Those of a slab are adjacent, from the first record of its first unit
        on."""
        records = self.grid.records
        if len(slots) <= FEW:
            found = []
            for slot in as_list(slots):
                slab, _, at = self._locate_one(slot)
                found.append(self.slabs.head.item(slab) * records + at - self.slabs.first.item(slab))
            return found
        slabs = self.slabs.holding(slots)
        inside = (slots - self.slabs.start.take(slabs)) // self.slabs.size.take(slabs)
        return inside + self.slabs.head.take(slabs) * records

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
            slot = start + int(self._lowest_free(slab, 1)[0]) * size
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
        if missing == 1 <= FEW and (slab := next(slabs, None)) is not None:
            return self._allocate_one(slab, size, owners)
        while missing and (slab := next(slabs, None)) is not None:
            pieces[slab] = indices = self._lowest_free(slab, missing)
            self._states[self.slabs.first[slab] + indices] = _RESERVED
            self._count_taken(slab, len(indices), int(indices[-1]) + 1)
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

    def seal(self, slots: Slots) -> None:
        """RESERVED to IN_USE: they are filled."""
        self._move(slots, _RESERVED, _IN_USE)

    def mark_corrupt(self, slots: Ints) -> None:
        """IN_USE or EVICTABLE to QUARANTINED: their bytes differ from those that were sealed."""
        _, sizes, at = self._locate(slots)
        self.mark_in_use(slots[self._states[at] == _EVICTABLE])
        self._move(slots, _IN_USE, _QUARANTINED)
        if self.freed is not None and len(slots):
            self.freed.add(slots, sizes)

    def mark_in_use(self, slots: Slots) -> None:
        """EVICTABLE to IN_USE: their blocks are in use."""
        self._move(slots, _EVICTABLE, _IN_USE)

    def mark_evictable(self, slots: Slots, tick: int, source: SlotState = SlotState.IN_USE) -> None:
        """IN_USE to EVICTABLE, or RESERVED to EVICTABLE if a store has just filled them: their blocks were last used at
        ``tick``. Ticks never decrease."""
        self._move(slots, int(source), _EVICTABLE)
        self.touch(slots, tick)

    def touch(self, slots: Slots, tick: int) -> None:
        """Record that their blocks, which are evictable, were used at ``tick``."""
        self.slabs.touched[self.slabs.holding(slots)] = tick

    def free(self, slots: Slots) -> None:
        """RESERVED, IN_USE or EVICTABLE to FREE."""
        if not len(slots):
            return
        if len(slots) == 1 <= FEW:
            slab, size, at = self._locate_one(as_list(slots)[0])
            source = self._states.item(at)
            if source in _UNOWNED:
                raise AssertionError("a slot is FREE or QUARANTINED; only a used slot can be freed")
            self._move_few(slots, source, _FREE)
            self._count_freed(slab, 1, at - self.slabs.first.item(slab))
            if self.freed is not None:
                self.freed.add(slots, size)
            return
        ordered = np.sort(np.asarray(slots, np.int64))
        if any_true(ordered[1:] == ordered[:-1]):
            raise AssertionError("a slot is freed twice")
        slabs, sizes, places = self._locate(ordered)
        states = self._states[places]
        # Floats, but whole numbers far below 2**53.
        nbytes = [int(each) for each in np.bincount(states, sizes, len(SlotState)).tolist()]
        if nbytes[_FREE] or nbytes[_QUARANTINED]:
            raise AssertionError("a slot is FREE or QUARANTINED; only a used slot can be freed")
        self._states[places] = _FREE
        self._owners[places] = NO_OWNER
        for state, freed in enumerate(nbytes):
            self._bytes[state] -= freed
        self._bytes[_FREE] += sum(nbytes)
        if nbytes[_EVICTABLE]:
            np.subtract.at(self.slabs.evictable, slabs[states == _EVICTABLE], 1)
        starts = [0, *((slabs[1:] != slabs[:-1]).nonzero()[0] + 1).tolist()]
        for start, end in zip(starts, [*starts[1:], len(slabs)], strict=True):
            at_slab = slabs.item(start)
            self._count_freed(at_slab, end - start, places.item(start) - self.slabs.first.item(at_slab))
        if self.freed is not None:
            self.freed.add(ordered, sizes)

    def _has_free(self, needs: Mapping[int, int], node: int | None = None) -> bool:
        """Whether the slabs that are already cut have enough free slots, as for nearly every request."""
        return all(self.free_slots(size, node) >= need for size, need in needs.items())

    def _locate(self, slots: Slots) -> tuple[Ints, Ints, Ints]:
        """Slab, size class, and index in the columns of each slot. Raises AssertionError if one is not a slot."""
        slabs = self.slabs.holding(slots)
        sizes = self.slabs.size[slabs]
        if np.count_nonzero(sizes) < len(sizes):
            raise AssertionError("the slot is FREE: its slab is not cut")
        offsets = slots - self.slabs.start[slabs]
        inside = offsets // sizes
        if any_true(inside * sizes != offsets):
            raise AssertionError("not a slot: its slab is cut to another size")
        return slabs, sizes, self.slabs.first[slabs] + inside

    def _locate_one(self, slot: int) -> tuple[int, int, int]:
        slab = self.slabs.at.item(slot // self._unit)
        size = self.slabs.size.item(slab)
        if not size:
            raise AssertionError("the slot is FREE: its slab is not cut")
        inside, beyond = divmod(slot - self.slabs.start.item(slab), size)
        if beyond:
            raise AssertionError("not a slot: its slab is cut to another size")
        return slab, size, self.slabs.first.item(slab) + inside

    def _move(self, slots: Slots, source: int, target: int) -> None:
        if len(slots) <= FEW:
            self._move_few(slots, source, target)
            return
        slabs, sizes, at = self._locate(slots)
        if any_true(self._states[at] != source):
            raise AssertionError(f"a slot is not {SlotState(source).name}")
        self._states[at] = target
        nbytes = int(np.add.reduce(sizes))
        self._bytes[source] -= nbytes
        self._bytes[target] += nbytes
        if target in _UNOWNED:
            self._owners[at] = NO_OWNER
        if target == _EVICTABLE:
            np.add.at(self.slabs.evictable, slabs, 1)
        elif source == _EVICTABLE:
            np.subtract.at(self.slabs.evictable, slabs, 1)

    def _move_few(self, slots: Slots, source: int, target: int) -> None:
        places = [self._locate_one(slot) for slot in as_list(slots)]
        for _, _, at in places:
            if self._states.item(at) != source:
                raise AssertionError(f"a slot is not {SlotState(source).name}")
        for slab, size, at in places:
            self._states[at] = target
            self._bytes[source] -= size
            self._bytes[target] += size
            if target in _UNOWNED:
                self._owners[at] = NO_OWNER
            if source == _EVICTABLE:
                self.slabs.evictable[slab] -= 1
            if target == _EVICTABLE:
                self.slabs.evictable[slab] += 1

    def _allocate_one(self, slab: int, size: int, owner: Ints) -> Ints:
        """`allocate` for one owner: the lowest free slot of the slab."""
        slabs = self.slabs
        first = slabs.first.item(slab)
        at, end, window = first + slabs.lowest_free.item(slab), first + slabs.capacity.item(slab), 32
        while (found := self._states[at : min(at + window, end)].tobytes().find(_FREE)) < 0:
            at += window
            window *= 2
        at += found
        index = at - first
        self._states[at] = _RESERVED
        self._owners[at] = owner[0]
        self._count_taken(slab, 1, index + 1)
        if self.freed is not None:
            self.freed.take_out([slabs.start.item(slab) + index * size], size)
        return np.array((slabs.start.item(slab) + index * size,))

    def _lowest_free(self, slab: int, wanted: int) -> Ints:
        """Indices of the lowest free slots of a slab, at most ``wanted``. The slab has at least one.

        A slab may have thousands of slots. So the search starts at the lowest slot that can be free and reads a window
        of states at a time, each twice as long as the one before.
        """
        first = self.slabs.first.item(slab)
        states = self._states[first : first + self.slabs.capacity.item(slab)]
        start, window = self.slabs.lowest_free.item(slab), 2 * wanted + 64
        found: list[Ints] = []
        while wanted and start < len(states):
            free = (states[start : start + window] == _FREE).nonzero()[0][:wanted]
            found.append(free + start)
            wanted -= len(free)
            start += window
            window *= 2
        return np.concatenate(found) if len(found) > 1 else found[0]

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
