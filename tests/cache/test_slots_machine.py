"""Random lives of slots in a pool of a few pages, against a map of who owns each page."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvsidecar.cache.block import Block
from kvsidecar.cache.integrity import check_slots
from kvsidecar.cache.slots import SlotAllocator, SlotState
from tests.cache.support import PAGE, new_cache, open_space

NEEDS = st.dictionaries(st.integers(1, 4), st.integers(1, 4), min_size=1, max_size=3)
NODES = st.sampled_from([None, 0, 1])


pytestmark = pytest.mark.timeout(600)  # a pass takes seconds, but to make a failure short takes minutes


class SlotsMachine(RuleBasedStateMachine):
    @initialize(pool=st.integers(1, 9), slab=st.integers(1, 4), nodes=st.lists(NODES, min_size=9, max_size=9))
    def start(self, pool: int, slab: int, nodes: list[int | None]) -> None:
        self.pool = pool
        self.slots: SlotAllocator[Block] = SlotAllocator(pool * PAGE, slab * PAGE, nodes[: -(-pool // slab)])
        self.space = open_space(new_cache(1))
        self.taken: dict[int, tuple[int, SlotState]] = {}
        self.tick = 0

    def pick(self, data: st.DataObject, *states: SlotState) -> int | None:
        slots = sorted(slot for slot, (_, state) in self.taken.items() if state in states)
        return data.draw(st.sampled_from(slots)) if slots else None

    def move(self, slot: int, state: SlotState) -> None:
        self.taken[slot] = (self.taken[slot][0], state)

    def take(self, pages: int, node: int | None) -> int | None:
        slot = self.slots.allocate(pages * PAGE, Block(self.space, b"x" * 32), node)
        if slot is None:
            return None
        mine = range(slot, slot + pages * PAGE)
        assert mine.start >= 0
        assert mine.stop <= self.pool * PAGE
        assert mine.start // self.slots.slab_bytes == (mine.stop - 1) // self.slots.slab_bytes, "it straddles two slabs"
        for other, (other_pages, _) in self.taken.items():
            assert mine.stop <= other or other + other_pages * PAGE <= mine.start, "two slots overlap"
        self.taken[slot] = (pages, SlotState.RESERVED)
        return slot

    def take_all(self, needs: dict[int, int], node: int | None) -> list[int | None]:
        return [self.take(pages, node) for pages in sorted(needs, reverse=True) for _ in range(needs[pages])]

    @rule(pages=st.integers(1, 4), node=NODES)
    def allocate(self, pages: int, node: int | None) -> None:
        if self.take(pages, node) is None:
            assert self.slots.supply({pages * PAGE: 1}).unmet() == pages * PAGE

    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        if (slot := self.pick(data, SlotState.RESERVED)) is not None:
            self.slots.seal(slot)
            self.move(slot, SlotState.HELD)

    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        if (slot := self.pick(data, SlotState.HELD)) is not None:
            self.tick += 1
            self.slots.let_go(slot, self.tick)
            self.move(slot, SlotState.EVICTABLE)

    @rule(data=st.data(), hold=st.booleans())
    def use(self, data: st.DataObject, hold: bool) -> None:
        if (slot := self.pick(data, SlotState.EVICTABLE)) is not None:
            self.tick += 1
            if hold:
                self.slots.hold(slot)
                self.move(slot, SlotState.HELD)
            else:
                self.slots.touch(slot, self.tick)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        slot = self.pick(data, SlotState.RESERVED, SlotState.HELD, SlotState.EVICTABLE)
        if slot is not None:
            self.slots.free(slot)
            del self.taken[slot]

    @rule(data=st.data())
    @precondition(lambda self: all(state != SlotState.QUARANTINED for _, state in self.taken.values()))
    def quarantine(self, data: st.DataObject) -> None:
        if (slot := self.pick(data, SlotState.RESERVED)) is not None:
            self.slots.quarantine(slot)
            self.move(slot, SlotState.QUARANTINED)

    @rule(needs=NEEDS, node=st.sampled_from([0, 1]))
    def what_a_node_can_be_preferred_for_can_be_had(self, needs: dict[int, int], node: int) -> None:
        if self.slots.can_prefer(node, {pages * PAGE: need for pages, need in needs.items()}):
            assert None not in self.take_all(needs, node)

    @rule(data=st.data(), needs=NEEDS)
    def what_is_planned_can_be_had(self, data: st.DataObject, needs: dict[int, int]) -> None:
        """The allocator keeps what a plan promises after some slots are freed. Of one class it has no more either."""
        supply = self.slots.supply({pages * PAGE: need for pages, need in needs.items()})
        freeable = sorted(slot for slot, (_, state) in self.taken.items() if state != SlotState.QUARANTINED)
        freed = data.draw(st.lists(st.sampled_from(freeable), unique=True)) if freeable else []
        for slot in freed:
            supply.free(slot)
        for slot in freed[::2]:
            supply.keep(slot)
        freed = freed[1::2]
        if supply.unmet() is None or len(needs) == 1:
            for slot in freed:
                self.slots.free(slot)
                del self.taken[slot]
            assert (None in self.take_all(needs, None)) == (supply.unmet() is not None)

    @invariant()
    def the_counts_are_right(self) -> None:
        if not hasattr(self, "slots"):
            return
        check_slots(self.slots)
        for state in set(SlotState) - {SlotState.FREE}:
            pages = sum(pages for pages, other in self.taken.values() if other == state)
            assert self.slots.bytes_in(state) == pages * PAGE


SlotsMachine.TestCase.settings = settings(max_examples=400, stateful_step_count=40, deadline=None)
TestSlots = SlotsMachine.TestCase
