"""A state machine of slots beside a model of them."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvsidecar.cache.arrays import Ints
from kvsidecar.cache.slabs import find_run
from kvsidecar.cache.slots import SlotAllocator, SlotState
from tests.cache.integrity import check_slots
from tests.cache.support import PAGE

NEEDS = st.dictionaries(st.integers(1, 4), st.integers(1, 4), min_size=1, max_size=3)

NODES = st.sampled_from([None, 0, 1])


class SlotsMachine(RuleBasedStateMachine):
    @initialize(pool=st.integers(1, 9), slab=st.integers(1, 4), nodes=st.lists(NODES, min_size=9, max_size=9))
    def start(self, pool: int, slab: int, nodes: list[int | None]) -> None:
        self.pool = pool
        self.slots = SlotAllocator(pool * PAGE, slab * PAGE, nodes[: -(-pool // slab)])
        self.taken: dict[int, tuple[int, SlotState]] = {}
        self.tick = 0
        self.owner = 0

    def pick(self, data: st.DataObject, *states: SlotState) -> list[int]:
        """Some slots in these states."""
        slots = sorted(slot for slot, (_, state) in self.taken.items() if state in states)
        return data.draw(st.lists(st.sampled_from(slots), max_size=4, unique=True)) if slots else []

    def move(self, slots: list[int], state: SlotState) -> Ints:
        for slot in slots:
            self.taken[slot] = (self.taken[slot][0], state)
        return np.array(slots, np.int64)

    def could_take(self, pages: int) -> set[int]:
        """Pages of all free slots of this size that there are, or that could be cut."""
        slabs, grid, size = self.slots.slabs, self.slots.grid, pages * PAGE
        places = [
            (int(slabs.start[slab]), int(slabs.nbytes[slab]))
            for slab in slabs.by_address().tolist()
            if slabs.size[slab] == size
        ]
        parts = [part.copy() for part in self.slots._parts]
        while (found := find_run(parts, grid.shape(size))) is not None:
            part, start, end = found
            part.take(start, end)
            places.append((start * grid.unit, grid.nbytes(start, end)))
        slots = {slot for start, nbytes in places for slot in range(start, start + nbytes - size + 1, size)}
        return {slot // PAGE for slot in slots - self.taken.keys()}

    def take(self, pages: int, count: int, node: int | None) -> bool:
        free = self.could_take(pages)
        owners = np.arange(self.owner, self.owner + count)
        try:
            slots = self.slots.allocate(pages * PAGE, owners, node)
        except AssertionError:
            assert len(free) < count, "there were enough free slots"
            return False
        for slot in slots.tolist():
            mine = range(slot, slot + pages * PAGE)
            assert mine.start >= 0
            assert mine.stop <= self.pool * PAGE
            on = {
                part.node
                for part in self.slots._parts
                for byte in (mine.start, mine.stop - 1)
                if part.start <= byte // self.slots.grid.unit < part.end
            }
            assert len(on) == 1, "it straddles two nodes"
            for other, (other_pages, _) in self.taken.items():
                assert mine.stop <= other or other + other_pages * PAGE <= mine.start, "two slots overlap"
            self.taken[slot] = (pages, SlotState.RESERVED)
        self.owner += count
        got = [slot // PAGE for slot in slots.tolist()]
        assert got == sorted(got), "the slots of one request are not ascending"
        of = {page: int(self.slots.slabs.at[page * PAGE // self.slots.grid.unit]) for page in {*got, *free}}
        for slab in {of[page] for page in got}:
            inside = [page for page in got if of[page] == slab]
            assert not {page for page in free if inside[0] < page < inside[-1] and of[page] == slab} - {*inside}
        return True

    def take_all(self, needs: dict[int, int], node: int | None) -> bool:
        had = [self.take(pages, needs[pages], node) for pages in sorted(needs, reverse=True)]
        return all(had)

    @rule(pages=st.integers(1, 4), count=st.integers(0, 5), node=NODES)
    def allocate(self, pages: int, count: int, node: int | None) -> None:
        enough = self.slots.plan({pages * PAGE: count}).unmet() is None
        assert self.take(pages, count, node) == enough

    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        self.slots.seal(self.move(self.pick(data, SlotState.RESERVED), SlotState.IN_USE))

    @rule(data=st.data(), source=st.sampled_from([SlotState.IN_USE, SlotState.RESERVED]))
    def mark_evictable(self, data: st.DataObject, source: SlotState) -> None:
        self.tick += 1
        self.slots.mark_evictable(self.move(self.pick(data, source), SlotState.EVICTABLE), self.tick, source)

    @rule(data=st.data(), hold=st.booleans())
    def use(self, data: st.DataObject, hold: bool) -> None:
        slots = self.pick(data, SlotState.EVICTABLE)
        self.tick += 1
        if hold:
            self.slots.mark_in_use(self.move(slots, SlotState.IN_USE))
        else:
            self.slots.touch(np.array(slots, np.int64), self.tick)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.free_these(self.pick(data, SlotState.RESERVED, SlotState.IN_USE, SlotState.EVICTABLE))

    def free_these(self, slots: list[int]) -> None:
        self.slots.free(np.array(slots, np.int64))
        for slot in slots:
            del self.taken[slot]

    @rule(data=st.data())
    @precondition(lambda self: all(state != SlotState.QUARANTINED for _, state in self.taken.values()))
    def mark_corrupt(self, data: st.DataObject) -> None:
        slots = self.pick(data, SlotState.IN_USE, SlotState.EVICTABLE)[:1]
        self.slots.mark_corrupt(self.move(slots, SlotState.QUARANTINED))

    @rule(needs=NEEDS, node=st.sampled_from([0, 1]))
    def what_a_node_can_be_preferred_for_can_be_had(self, needs: dict[int, int], node: int) -> None:
        if self.slots.can_prefer(node, {pages * PAGE: need for pages, need in needs.items()}):
            assert self.take_all(needs, node)

    @rule(data=st.data(), needs=NEEDS)
    def what_is_planned_can_be_had(self, data: st.DataObject, needs: dict[int, int]) -> None:
        """The allocator keeps what a plan promises after some slots are freed. Of one class it has no more either."""
        plan = self.slots.plan({pages * PAGE: need for pages, need in needs.items()})
        freeable = sorted(slot for slot, (_, state) in self.taken.items() if state != SlotState.QUARANTINED)
        freed = data.draw(st.lists(st.sampled_from(freeable), unique=True)) if freeable else []
        plan.free(np.array(freed, np.int64))
        plan.undo_free(np.array(freed[::2], np.int64))
        freed = freed[1::2]
        unmet, surplus = plan.unmet(), plan.surplus()
        if unmet is None or len(needs) == 1:
            self.free_these(freed)
            for pages, need in needs.items():
                assert surplus is None or surplus == len(self.could_take(pages)) - need
            assert self.take_all(needs, None) == (unmet is None)

    @invariant()
    def the_counts_are_right(self) -> None:
        if not hasattr(self, "slots"):
            return
        check_slots(self.slots)
        for state in set(SlotState) - {SlotState.FREE}:
            pages = sum(pages for pages, other in self.taken.values() if other == state)
            assert self.slots.bytes_in(state) == pages * PAGE
