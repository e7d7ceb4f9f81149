from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import settings

from kvsidecar.cache import cut_pool
from kvsidecar.cache.arrays import Ints
from kvsidecar.cache.slots import SLOT_ALIGN, SlotAllocator, SlotState, size_class
from tests.cache.integrity import check_slots
from tests.cache.slots_machine import SlotsMachine
from tests.cache.support import PAGE
from tests.marks import examples

OWNER = 7


def allocator(pool: int, slab: int, numa: Sequence[int | None] | None = None) -> SlotAllocator:
    return SlotAllocator(pool * PAGE, slab * PAGE, numa)


def take(slots: SlotAllocator, pages: int, node: int | None = None) -> int:
    """Page of one new slot."""
    return take_many(slots, pages, 1, node)[0]


def take_many(slots: SlotAllocator, pages: int, count: int, node: int | None = None) -> list[int]:
    return [slot // PAGE for slot in slots.allocate(pages * PAGE, np.full(count, OWNER), node).tolist()]


def quarantine(slots: SlotAllocator, page: int) -> None:
    """A slot that was just taken: filled, and found to be corrupt."""
    slots.seal(at(page))
    slots.mark_corrupt(at(page))


def take_all(slots: SlotAllocator, pages: int) -> list[int]:
    taken = []
    while slots.plan({pages * PAGE: 1}).unmet() is None:
        taken.append(take(slots, pages))
    return taken


def at(*pages: int) -> Ints:
    return np.array(pages) * PAGE


@pytest.mark.parametrize(
    ("nbytes", "expected"), [(1, SLOT_ALIGN), (4096, 4096), (4097, 8192), (18 * 1024 * 61, 1126400)]
)
def test_a_size_class_is_the_next_multiple_of_a_page(nbytes: int, expected: int) -> None:
    assert size_class(nbytes) == expected


@pytest.mark.parametrize(("pool", "slab"), [(0, 4096), (4096, 0), (4097, 4096), (8192, 100), (-4096, 4096)])
def test_sizes_that_are_no_positive_multiple_of_a_page_are_refused(pool: int, slab: int) -> None:
    with pytest.raises(ValueError, match="multiple of 4096"):
        SlotAllocator(pool, slab)


def test_a_numa_list_of_another_length_than_the_slabs_is_refused() -> None:
    with pytest.raises(ValueError, match="1 entries for 2 slabs"):
        allocator(4, 2, [0])


# -- what is lost to rounding ---------------------------------------------------------------------------------------

MIB_SIZES = [17, 24.5, 33, 36, 40, 44, 48, 80]


@pytest.mark.parametrize("mib", MIB_SIZES)
@pytest.mark.parametrize(("gib", "slab"), [(0.25, 32), (0.25, 4), (4, 64), (16, 64), (64, 64), (100, 64)])
def test_slots_of_any_size_fill_the_pool_but_for_3_percent_and_less_than_a_slot(
    mib: float, gib: float, slab: int
) -> None:
    pool, size = int(gib * (1 << 30)), int(mib * (1 << 20))
    slots = SlotAllocator(pool, slab << 20)
    if size > slots.largest_slot:
        return
    count = 0
    while slots.plan({size: 1}).unmet() is None:
        count += len(slots.allocate(size, np.arange(slots.plan({size: 1}).surplus() + 1)))
    assert count * size > 0.97 * pool - size
    assert count * size >= 0.97 * (pool // size * size) or pool // size < 34
    assert pool - count * size == slots.wasted_bytes + slots.unfit_bytes, "what is lost is shown as something else"
    check_slots(slots)


def test_a_slot_may_have_an_eighth_of_the_pool_and_eight_of_them_fit() -> None:
    slots = SlotAllocator(640 << 20, 64 << 20)
    assert slots.largest_slot == 80 << 20
    assert len(slots.allocate(80 << 20, np.arange(8))) == 8
    assert slots.bytes_in(SlotState.FREE) == 0


def test_a_gap_is_used_by_shorter_slabs_of_a_class_whose_usual_ones_do_not_fit() -> None:
    slots = allocator(12, 4)
    assert take(slots, 3) == 0
    assert take_all(slots, 1) == [4, 5, 6, 7, 8, 9, 10, 11, 3]
    check_slots(slots)


def test_what_is_left_between_slabs_counts_as_lost_if_no_class_in_use_fits_it() -> None:
    slots = allocator(8, 1)
    take_many(slots, 3, 2)
    assert slots.unfit_bytes == 2 * PAGE
    take(slots, 2)
    assert slots.unfit_bytes == 0
    slots = allocator(8, 4)
    assert slots.unfit_bytes == 0, "nothing is in use"


@pytest.mark.parametrize("order", [(0, 4, 8, 12), (12, 8, 4, 0), (8, 0, 12, 4)])
def test_the_fullest_slab_with_room_is_taken_first_so_that_the_others_become_whole(order: tuple[int, ...]) -> None:
    """Whatever the order in which their slots became free."""
    slots = allocator(20, 4)
    take_all(slots, 1)
    left = {0: 2, 4: 1, 8: 3, 12: 4}  # of slabs that begin there; the last one is full
    for first in order:
        for page in range(first + left[first], first + 4):
            slots.free(at(page))
    check_slots(slots)
    assert take_many(slots, 1, 2) == [2, 11], "the one free slot of the fullest, then one of the next"
    slots.free(at(4))
    assert slots.plan({4 * PAGE: 1}).unmet() is None, "the emptiest slab was used, and is not whole"
    check_slots(slots)


def test_partly_used_slabs_are_filled_before_another_is_cut() -> None:
    slots = allocator(8, 2)
    first = [take(slots, 1) for _ in range(2)]
    assert first[0] // 2 == first[1] // 2
    third = take(slots, 1)
    slots.free(at(first[0]))
    take(slots, 1)
    take(slots, 1)
    assert slots.bytes_in(SlotState.FREE) == 4 * PAGE
    assert slots.plan({2 * PAGE: 2}).unmet() is None
    assert slots.plan({2 * PAGE: 3}).unmet() == (2 * PAGE, 1)
    assert third // 2 != first[0] // 2


def test_the_short_last_slab_is_used_by_what_fits_it_and_comes_last() -> None:
    slots = allocator(9, 4)
    assert sorted(take_all(slots, 3)) == [0, 3, 6]
    slots = allocator(9, 4)
    taken = take_all(slots, 1)
    assert taken[-1] == 8
    assert sorted(taken) == list(range(9))


def test_a_short_slab_that_comes_back_is_still_the_last() -> None:
    slots = allocator(5, 4)
    small = take_all(slots, 1)
    for slot in small:
        slots.free(at(slot))
    assert take(slots, 4) == 0
    check_slots(slots)


def test_a_pool_smaller_than_a_slab_is_one_short_slab() -> None:
    slots = allocator(3, 8)
    assert slots.largest_slot == 3 * PAGE
    assert take(slots, 3) == 0


def test_what_is_larger_than_a_slab_does_not_fit() -> None:
    slots = allocator(8, 4)
    assert slots.largest_slot == 4 * PAGE


def test_a_quarantined_slot_never_returns() -> None:
    slots = allocator(2, 2)
    lost = take(slots, 1)
    quarantine(slots, lost)
    with pytest.raises(AssertionError, match="QUARANTINED"):
        slots.free(at(lost))
    assert take_all(slots, 1) == [1]
    slots.free(at(1))
    assert slots.plan({2 * PAGE: 1}).unmet() is not None


@pytest.mark.parametrize(("pages", "why"), [((0, 2), "FREE"), ((0, 0), "twice"), ((1,), "not a slot"), ((4,), "FREE")])
def test_only_a_slot_that_was_given_out_can_be_freed_and_only_once(pages: tuple[int, ...], why: str) -> None:
    """One that is free, one that is named twice, none of a cut slab, none of a slab that was never cut."""
    slots = allocator(8, 4)
    take_many(slots, 2, 2)
    slots.free(at(2))
    with pytest.raises(AssertionError, match=why):
        slots.free(at(*pages))


def test_states_change_only_along_the_life_of_a_slot() -> None:
    slots = allocator(2, 2)
    slot = take(slots, 1)
    for wrong in (slots.mark_in_use, lambda slot: slots.mark_evictable(slot, 1)):
        with pytest.raises(AssertionError, match="is not"):
            wrong(at(slot))
    slots.seal(at(slot))
    for wrong in (slots.seal, slots.mark_in_use):
        with pytest.raises(AssertionError, match="is not"):
            wrong(at(slot))


# -- slabs that can be had as a whole -----------------------------------------------------------------------------


def evictable(slots: SlotAllocator, pages: int, tick: int) -> int:
    page = take(slots, pages)
    slots.seal(at(page))
    slots.mark_evictable(at(page), tick)
    return page


def windows(slots: SlotAllocator, pages: int) -> list[tuple[int, int, int]]:
    """First page, page after the last, and tick of the last use of each place for a slab of this class."""
    unit = slots.grid.unit // PAGE
    return [(each.start * unit, each.end * unit, each.touched) for each in slots.windows(pages * PAGE)]


def test_a_place_with_a_busy_slot_cannot_be_had() -> None:
    slots = allocator(2, 2)
    first = evictable(slots, 1, 1)
    assert windows(slots, 2) == [(0, 2, 1)]
    second = take(slots, 1)
    assert windows(slots, 2) == []
    slots.free(at(second))
    assert windows(slots, 2) == [(0, 2, 1)]
    slots.mark_in_use(at(first))
    assert windows(slots, 2) == []
    check_slots(slots)


def test_places_come_in_the_order_of_their_last_use() -> None:
    slots = allocator(6, 2)
    a, b, c = evictable(slots, 2, 1), evictable(slots, 2, 2), evictable(slots, 2, 3)
    slots.touch(at(a), 4)
    assert windows(slots, 1) == [(b, b + 2, 2), (c, c + 2, 3), (a, a + 2, 4)]
    check_slots(slots)


def test_places_with_slabs_of_the_class_itself_are_none() -> None:
    slots = allocator(8, 2)
    evictable(slots, 2, 1)
    evictable(slots, 1, 2)
    evictable(slots, 1, 2)
    evictable(slots, 2, 3)
    assert [touched for *_, touched in windows(slots, 1)] == [1, 3]
    assert [touched for *_, touched in windows(slots, 2)] == [2]


def test_eviction_of_one_slot_does_not_make_its_slab_look_used() -> None:
    slots = allocator(4, 2)
    first, _ = evictable(slots, 1, 1), evictable(slots, 1, 1)
    evictable(slots, 2, 2)
    slots.free(at(first))
    assert windows(slots, 2) == [(0, 2, 1)]
    check_slots(slots)


def test_an_aborted_store_does_not_break_the_order_of_places() -> None:
    slots = allocator(6, 2)
    evictable(slots, 1, 1)
    reserved = take(slots, 1)
    evictable(slots, 1, 2)
    slots.free(at(reserved))
    assert [touched for *_, touched in windows(slots, 2)] == [1, 2]
    check_slots(slots)


# -- NUMA ---------------------------------------------------------------------------------------------------------


def test_a_slot_is_taken_on_the_wanted_node_even_if_that_opens_a_slab() -> None:
    slots = allocator(8, 2, [0, 0, 1, 1])
    assert take(slots, 1, node=0) // 4 == 0
    assert take(slots, 1, node=1) // 4 == 1
    assert take(slots, 1, node=1) // 4 == 1


def test_a_full_node_falls_back_to_the_other() -> None:
    slots = allocator(4, 2, [0, 1])
    assert [take(slots, 1, node=1) // 2 for _ in range(4)] == [1, 1, 0, 0]
    assert slots.plan({PAGE: 1}).unmet() is not None


def test_an_unknown_node_takes_any_slot() -> None:
    slots = allocator(4, 2, [0, 1])
    assert take(slots, 1, node=7) == 0


# -- slots of one request -----------------------------------------------------------------------------------------


def test_a_request_for_more_than_there_is_takes_nothing() -> None:
    slots = allocator(4, 2, [0, 1])
    take(slots, 1)
    with pytest.raises(AssertionError, match="fewer free slots"):
        take_many(slots, 1, 4, node=1)
    assert slots.bytes_in(SlotState.FREE) == 3 * PAGE
    check_slots(slots)


# -- planning -----------------------------------------------------------------------------------------------------


def test_a_supply_counts_free_slots_and_whole_slabs() -> None:
    slots = allocator(8, 4)
    take(slots, 1)
    assert slots.plan({PAGE: 7}).unmet() is None
    assert slots.plan({PAGE: 8}).unmet() == (PAGE, 1)
    assert slots.plan({PAGE: 3, 2 * PAGE: 2}).unmet() is None
    assert slots.plan({PAGE: 4, 2 * PAGE: 1}).unmet() == (PAGE, 1)
    assert slots.plan({PAGE: 1, 2 * PAGE: 3}).unmet() == (2 * PAGE, 1)


def test_a_supply_counts_planned_slots_and_can_take_them_back() -> None:
    slots = allocator(4, 4)
    a, b = take(slots, 1), take(slots, 1)
    supply = slots.plan({4 * PAGE: 1})
    supply.free(at(a))
    assert supply.unmet() == (4 * PAGE, 1)
    supply.free(at(b))
    assert supply.unmet() is None
    supply.undo_free(at(a))
    assert supply.unmet() == (4 * PAGE, 1)


def test_a_supply_gives_the_short_slab_only_to_what_fits() -> None:
    slots = allocator(6, 4)
    assert slots.plan({2 * PAGE: 3}).unmet() is None
    assert slots.plan({2 * PAGE: 4}).unmet() == (2 * PAGE, 1)
    assert slots.plan({4 * PAGE: 2}).unmet() == (4 * PAGE, 1)
    assert slots.plan({4 * PAGE: 1, 2 * PAGE: 1}).unmet() is None


# -- any requests -----------------------------------------------------------------------------------------------------

SlotsMachine.TestCase.settings = settings(max_examples=examples(400), stateful_step_count=40, deadline=None)
TestSlots = pytest.mark.no_cover(pytest.mark.timeout(600)(SlotsMachine.TestCase))  # slow when every line is counted


@pytest.mark.parametrize(("times", "sizes"), [(1, range(1, 17)), (4, (*range(1, 33), *range(32, 0, -1)))])
def test_slabs_of_ever_other_capacities_find_columns_without_a_copy(
    monkeypatch: pytest.MonkeyPatch, times: int, sizes: Sequence[int]
) -> None:
    """To copy the columns of a million slots took 25 ms in one step."""

    def copied(*_: object) -> None:
        raise AssertionError("the columns are copied")

    monkeypatch.setattr(cut_pool, "SPARE_COLUMNS", times)
    monkeypatch.setattr(cut_pool, "extended", copied)
    allocator = SlotAllocator(64 * PAGE, 64 * PAGE)
    for pages in sizes:
        slots = allocator.allocate(pages * PAGE, np.arange(64 // pages))
        check_slots(allocator)
        allocator.free(slots)
