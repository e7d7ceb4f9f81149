"""What is freed is zeroed, and nothing else is, whatever happens to the slots meanwhile."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.freed import PAGE_BYTES, Freed
from kvsidecar.cache.records import Records
from kvsidecar.cache.slots import SlotAllocator, SlotState
from tests.cache.cuts import NUM_SPACES, recorded_cache, words_for
from tests.cache.slots_machine import NODES, SlotsMachine
from tests.cache.support import PAGE, keys, namespace, open_space, store
from tests.marks import examples

pytestmark = pytest.mark.timeout(600)


class FreedMachine(SlotsMachine):
    """Slots with bytes: each page has the number of the store that wrote to it last, or 0. A slice is zeroed page by
    page, while slots are given out and freed."""

    @initialize(pool=st.integers(1, 9), slab=st.integers(1, 4), nodes=st.lists(NODES, min_size=9, max_size=9))
    def start(self, pool: int, slab: int, nodes: list[int | None]) -> None:
        super().start(pool, slab, nodes)
        self.freed = Freed(pool * PAGE)
        self.slots = SlotAllocator(pool * PAGE, slab * PAGE, nodes[: -(-pool // slab)], self.freed)
        self.memory = np.zeros(pool, np.int64)
        self.stores = 0
        self.wrote: dict[int, int] = {}
        """Slot -> the number of its store, once it has written."""
        self.must_wait: set[int] = set()
        self.slice: list[int] = []
        self.begun = False

    def take(self, pages: int, count: int, node: int | None) -> bool:
        before = set(self.taken)
        enough = super().take(pages, count, node)
        for slot in set(self.taken) - before:
            if self.freed.is_zeroing(np.array([slot]), pages * PAGE):
                self.must_wait.add(slot)
            else:
                self.write(slot)
        return enough

    def write(self, slot: int) -> None:
        self.stores += 1
        self.wrote[slot] = self.stores
        self.memory[self.pages_of(slot)] = self.stores

    def pages_of(self, slot: int) -> slice:
        return slice(slot // PAGE, slot // PAGE + self.taken[slot][0])

    def pick(self, data: st.DataObject, *states: SlotState) -> list[int]:
        return [slot for slot in super().pick(data, *states) if slot not in self.must_wait]

    def free_these(self, slots: list[int]) -> None:
        super().free_these(slots)
        for slot in slots:
            self.wrote.pop(slot, None)
            self.must_wait.discard(slot)

    @precondition(lambda self: not self.begun)
    @rule(pages=st.integers(1, 4), turns=st.booleans())
    def begin(self, pages: int, turns: bool) -> None:
        if turns:
            self.freed.next_turn()
        pieces = self.freed.begin(pages * PAGE)
        self.slice = [page for at, nbytes in pieces for page in range(at // PAGE, (at + nbytes) // PAGE)]
        assert len(self.slice) == len(set(self.slice)) <= pages
        self.begun = True

    @rule(data=st.data())
    @precondition(lambda self: self.slice)
    def zero_a_page(self, data: st.DataObject) -> None:
        page = self.slice.pop(data.draw(st.integers(0, len(self.slice) - 1)))
        self.memory[page] = 0

    @rule()
    @precondition(lambda self: self.begun)
    def end(self) -> None:
        self.memory[self.slice] = 0
        self.slice, self.begun = [], False
        self.freed.end()
        for slot in sorted(self.must_wait):
            self.write(slot)
        self.must_wait.clear()

    @invariant()
    def no_store_loses_a_byte(self) -> None:
        for slot, number in getattr(self, "wrote", {}).items():
            if self.taken[slot][1] is not SlotState.QUARANTINED:
                assert set(self.memory[self.pages_of(slot)].tolist()) == {number}

    @invariant()
    def what_is_left_is_known(self) -> None:
        if not hasattr(self, "freed"):
            return
        left = self.memory != 0
        for slot, (_, state) in self.taken.items():
            if state is not SlotState.QUARANTINED:  # a store that waits will write over all of its slot
                left[self.pages_of(slot)] = False
        known = self.freed._pages != 0
        assert not (left & ~known).any(), "freed bytes of which nothing knows"
        assert self.freed.nbytes == PAGE * np.count_nonzero(known)

    def teardown(self) -> None:
        if not hasattr(self, "freed"):
            return
        if self.begun:
            self.end()
        self.freed.next_turn()
        while self.freed.waits:
            self.begin(4, False)
            self.end()
        assert self.freed.nbytes == 0
        in_use = np.zeros(self.pool, np.bool_)
        for slot, (_, state) in self.taken.items():
            if state is not SlotState.QUARANTINED:
                in_use[self.pages_of(slot)] = True
        assert not self.memory[~in_use].any()


TestFreed = FreedMachine.TestCase
TestFreed.settings = settings(max_examples=examples(150), stateful_step_count=30, deadline=None)


def pages(freed: Freed) -> list[int]:
    """Those that would be zeroed in this turn."""
    found = []
    while freed.waits:
        for offset, nbytes in freed.begin(3 * PAGE):
            found += range(offset // PAGE, (offset + nbytes) // PAGE)
        freed.end()
    return found


def test_what_was_freed_in_this_turn_waits_for_the_next_one() -> None:
    freed = Freed(8 * PAGE)
    freed.add(np.array([0, 5 * PAGE]), PAGE)
    assert (pages(freed), freed.nbytes) == ([], 2 * PAGE)
    freed.next_turn()
    freed.add(np.array([2 * PAGE]), 2 * PAGE)
    assert pages(freed) == [0, 5]
    freed.next_turn()
    assert (pages(freed), freed.nbytes) == ([2, 3], 0)


def test_what_was_given_out_again_is_not_zeroed() -> None:
    freed = Freed(8 * PAGE)
    freed.add(np.array([0]), 4 * PAGE)
    freed.take_out(np.array([PAGE]), 2 * PAGE)
    freed.next_turn()
    assert freed.nbytes == 2 * PAGE
    assert pages(freed) == [0, 3]


def test_a_slot_that_is_given_out_twice_while_it_is_zeroed_has_to_wait_both_times() -> None:
    freed = Freed(8 * PAGE)
    freed.add(np.array([0]), 2 * PAGE)
    freed.next_turn()
    assert freed.begin(8 * PAGE) == [(0, 2 * PAGE)]
    for _ in range(2):
        freed.take_out(np.array([0]), 2 * PAGE)
        assert freed.is_zeroing(np.array([0]), 2 * PAGE)
        assert not freed.is_zeroing(np.array([2 * PAGE]), PAGE)
        freed.add(np.array([0]), 2 * PAGE)
    freed.end()
    assert not freed.is_zeroing(np.array([0]), 2 * PAGE)
    freed.next_turn()
    assert pages(freed) == [0, 1], "what the store in between wrote stays"


def test_many_slots_of_several_sizes_become_few_runs() -> None:
    freed = Freed(64 * PAGE)
    freed.add(np.array([9, 0, 2, 4, 20]) * PAGE, np.array([1, 2, 2, 5, 3]) * PAGE)
    freed.next_turn()
    assert freed.begin(64 * PAGE) == [(0, 10 * PAGE), (20 * PAGE, 3 * PAGE)]


def next_run(words: np.ndarray[tuple[int], np.dtype[np.uint64]], freed: Freed) -> BlockCache:
    slots = SlotAllocator(8 * PAGE, 4 * PAGE, freed=freed)
    return BlockCache(slots, records=Records(words, 8 * PAGE, 4 * PAGE, NUM_SPACES))


def test_after_a_restart_all_is_zeroed_but_what_is_taken_over() -> None:
    words = np.zeros(words_for(8, 4), np.uint64)
    cache = recorded_cache(words, 8, 4)
    space = open_space(cache, shards=(1,))
    store(cache, space, *"abc")
    cache.begin_store([(space, 0, keys("d"))])  # killed while it is filled
    cache.clear_blocks(space, keys("b"))
    freed = Freed(8 * PAGE, unknown=True)
    again = next_run(words, freed)
    assert again.stats().unzeroed_bytes == 6 * PAGE
    kept = again.find_space(namespace(), 0)
    assert kept is not None
    slots = {slot // PAGE for slot in kept.blocks.slots[0, :2].tolist()}
    assert sorted(pages(freed)) == sorted(set(range(8)) - slots)
    assert again.stats().unzeroed_bytes == 0


def test_cleared_blocks_count_before_they_are_swept() -> None:
    freed = Freed(8 * PAGE)
    cache = BlockCache(SlotAllocator(8 * PAGE, 4 * PAGE, freed=freed))
    space = open_space(cache)
    store(cache, space, *range(6))
    assert cache.stats().unzeroed_bytes == 0
    cache.clear(sweep=2)
    assert cache.stats().unzeroed_bytes == 6 * PAGE
    assert freed.nbytes == 2 * PAGE
    while cache.sweep():
        pass
    assert freed.nbytes == cache.stats().unzeroed_bytes == 6 * PAGE
    assert PAGE_BYTES == PAGE
