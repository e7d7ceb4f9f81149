"""The compiled kernels must come to the same as the array operations, to the last byte.

Two caches live the same life, one of them without the compiled kernels; and each kernel refuses what numpy refuses.
"""

from __future__ import annotations

import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsidecar.cache import array_kernels, block_table, kernels, victims
from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.grants import LoadGrant, StoreGrant
from kvsidecar.cache.space_blocks import Space
from kvsidecar.errors import Refusal
from kvsidecar.types import LookupMode
from tests.cache.integrity import check_integrity
from tests.cache.support import eviction_order, key, new_cache, open_space, table_of
from tests.marks import examples

pytestmark = pytest.mark.timeout(600)
compiled_only = pytest.mark.skipif(not kernels.COMPILED, reason="this installation has no compiled kernels")


@contextmanager
def chosen(*, compiled: bool) -> Iterator[None]:
    """The cache with these kernels, and with tables whose columns are quickly compared."""
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            for name, function in vars(kernels).items():
                if callable(function):
                    patch.setattr(kernels, name, getattr(array_kernels, name))
            patch.setattr(victims._EvictionPlan, "only_table", lambda _: None)  # a shortcut of another kind
        patch.setattr(block_table, "SPARE_ROWS", 32)  # there is less to compare
        yield


def test_where_there_is_a_compiler_the_kernels_are_compiled() -> None:
    """Else nobody would notice that the tests below are skipped."""
    can = sys.platform == "linux" and shutil.which("cc") and Path(sysconfig.get_path("include"), "Python.h").exists()
    assert kernels.COMPILED or not can, "install the package again: pip install --editable ."


def columns(of: object) -> dict[str, Any]:
    """What an object holds, arrays and numbers as they are."""
    names = getattr(type(of), "__slots__", ()) or vars(of)
    return {
        name: value.tobytes() if isinstance(value, np.ndarray) else value
        for name, value in ((name, getattr(of, name)) for name in names)
        if isinstance(value, np.ndarray | int | list | dict)
    }


class Life:
    """A cache with few pages in several slabs, and what clients hold of it."""

    def __init__(self, pages: int, slab: int, shards: tuple[tuple[int, ...], ...], *, compiled: bool) -> None:
        self.compiled = compiled
        with chosen(compiled=compiled):
            self.cache: BlockCache = new_cache(pages, slab, [number % 2 for number in range(-(-pages // slab))])
            self.spaces: list[Space] = [
                open_space(self.cache, str(number), shards=each) for number, each in enumerate(shards)
            ]
        self.stores: list[StoreGrant] = []
        self.loads: list[LoadGrant] = []
        self.leases: list[int] = []

    def do(self, step: tuple[Any, ...]) -> object:
        name, *arguments = step
        with chosen(compiled=self.compiled):
            answer = getattr(self, name)(*arguments)
            check_integrity(self.cache)
        return answer

    def begin(self, which: int, shard: int, names: list[int], node: int | None) -> object:
        space = self.spaces[which % len(self.spaces)]
        shard %= space.num_shards
        grant = self.cache.begin_store([(space, shard, [key(each) for each in names])], node)
        if isinstance(grant, Refusal):
            return grant
        self.stores.append(grant)
        return [(part.slots.tolist(), part.index.tolist(), part.rows.tolist()) for part in grant.parts], grant.present

    def end(self, which: int, how: str) -> object:
        if not self.stores:
            return None
        return getattr(self.cache, how)(self.stores.pop(which % len(self.stores)))

    def store(self, which: int, names: list[int]) -> object:
        """Whole blocks."""
        shards = self.spaces[which % len(self.spaces)].num_shards
        return [(self.begin(which, shard, names, None), self.end(-1, "seal_all")) for shard in range(shards)]

    def load(self, which: int, names: list[int], end: int) -> object:
        space = self.spaces[which % len(self.spaces)]
        grant = self.cache.begin_load([(space, 0, [key(each) for each in names])], None, 0.0)
        if isinstance(grant, Refusal):
            return grant
        self.loads.append(grant)
        if end >= 0:
            self.cache.end_load(self.loads.pop(end % len(self.loads)))
        return [each.tolist() for each in (*grant.slots, *grant.rows)]

    def mark_corrupt(self, which: int) -> object:
        grants = [grant for grant in self.loads if len(grant.rows[0])]
        return self.cache.mark_corrupt(grants[which % len(grants)], 0, 0) if grants else None

    def lease(self, which: int, names: list[int], mode: LookupMode) -> object:
        part = (self.spaces[which % len(self.spaces)], [key(each) for each in names])
        lease, hits = self.cache.lookup_and_lease([part], mode, 0.0, 1.0, "o")
        if lease is not None:
            self.leases.append(lease.id)
        return hits

    def release(self, which: int) -> object:
        return self.cache.release(self.leases.pop(which % len(self.leases))) if self.leases else None

    def clear(self, sweep: int) -> object:
        return self.cache.clear(None, sweep)

    def state(self) -> object:
        table = table_of(self.cache)
        blocks = list(table.tables.values())
        return (
            [columns(each) for each in blocks],
            [columns(each.index) for each in blocks],
            [eviction_order(space) for space in self.cache.spaces],
            columns(table.slots) | {"_nodes": [n.partial for n in table.slots._nodes.values()], "_parts": None},
            [(part.starts, part.ends) for part in table.slots._parts],
            columns(table.slots.slabs),
            self.cache.stats(),
        )


RUNS = st.builds(lambda start, count: list(range(start, start + count)), st.integers(0, 6), st.integers(1, 16))
NAMES = RUNS | st.lists(st.integers(0, 8), max_size=3)
WHICH = st.integers(0, 3)
STEPS = st.one_of(
    st.tuples(st.just("store"), WHICH, NAMES),
    st.tuples(st.just("store"), WHICH, NAMES),
    st.tuples(st.just("begin"), WHICH, WHICH, NAMES, st.sampled_from([None, 0, 1])),
    st.tuples(st.just("end"), WHICH, st.sampled_from(["seal_all", "seal_all", "abort_all"])),
    st.tuples(st.just("load"), WHICH, NAMES, st.integers(-1, 3)),
    st.tuples(st.just("lease"), WHICH, NAMES, st.sampled_from(list(LookupMode))),
    st.tuples(st.just("release"), WHICH),
    st.tuples(st.just("mark_corrupt"), WHICH),
    st.tuples(st.just("clear"), st.integers(0, 3)),
)
SHAPES = st.sampled_from(
    [
        (6, 3, ((1,),)),
        (20, 4, ((1,),)),
        (48, 16, ((1,),)),
        (60, 60, ((1, 1),)),
        (24, 6, ((1, 1), (1,))),
        (24, 8, ((1,), (2,))),
        (30, 10, ((1, 2), (3,))),
    ]
)


@compiled_only
@pytest.mark.no_cover  # slow when every line is counted
@settings(max_examples=examples(200), deadline=None)
@given(shape=SHAPES, steps=st.lists(STEPS, min_size=10, max_size=40))
def test_a_cache_with_compiled_kernels_lives_as_one_without(
    shape: tuple[int, int, tuple[tuple[int, ...], ...]], steps: list[tuple[Any, ...]]
) -> None:
    arrays, compiled = Life(*shape, compiled=False), Life(*shape, compiled=True)
    for step in steps:
        assert compiled.do(step) == arrays.do(step)
        assert compiled.state() == arrays.state()


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=compiled_only)])
def test_of_blocks_that_are_released_together_only_those_without_another_reference_can_go(*, compiled: bool) -> None:
    life = Life(4, 4, ((1,),), compiled=compiled)
    life.do(("store", 0, [0, 1, 2]))
    for names in ([1], [0, 1, 2]):
        life.do(("lease", 0, names, LookupMode.PREFIX))
    life.do(("release", 1))
    assert eviction_order(life.spaces[0]) == [key(2), key(0)]
    assert life.cache.stats().leased_bytes == life.cache.stats().total_bytes // 4


# -- each kernel by itself ---------------------------------------------------------------------------------------------


class Slabs:
    """Three slabs of four, two and four slots, and a place that is not cut."""

    def __init__(self) -> None:
        self.at = np.array([1, 1, 2, 2, 0, 3], np.int32)
        self.sizes, self.starts = np.array([0, 4, 8, 2]), np.array([0, 0, 16, 40])
        self.firsts, self.evictable = np.array([0, 0, 4, 6]), np.array([0, 2, 1, 0])
        self.states = np.array([3, 3, 2, 0, 3, 1, 2, 4, 1, 2], np.uint8)
        self.touched, self.owners = np.zeros(4, np.int64), np.arange(10)

    def move(self, of: Any, slots: list[int], source: int, target: int, tick: int) -> Any:
        columns = (8, self.at, self.sizes, self.starts, self.firsts, self.evictable, self.states)
        return of.move_slots(np.array(slots, np.int64), *columns, source, target, self.touched, tick)

    def free(self, of: Any, slots: list[int]) -> Any:
        columns = (8, self.at, self.sizes, self.starts, self.firsts, self.evictable, self.states)
        return of.free_slots(np.array(slots, np.int64), *columns, self.owners, -1)


@compiled_only
@settings(max_examples=examples(500), deadline=None)
@given(
    slots=st.lists(st.integers(0, 47), unique=True, max_size=9),
    source=st.integers(0, 4),
    target=st.integers(0, 4),
    tick=st.integers(-1, 3),
    order=st.sampled_from(["drawn", "ascending"]),
)
def test_slots_change_their_states_alike_and_a_wrong_one_changes_nothing(
    slots: list[int], source: int, target: int, tick: int, order: str
) -> None:
    slots = sorted(slots) if order == "ascending" else slots
    for call in (
        lambda slabs, of: slabs.move(of, slots, source, target, tick),
        lambda slabs, of: slabs.free(of, slots),
    ):
        with_arrays, compiled, before = Slabs(), Slabs(), Slabs()
        answer = call(compiled, kernels)
        wanted = call(with_arrays, array_kernels)
        went_wrong = (answer if isinstance(answer, int) else answer[0]) < 0
        assert went_wrong == ((wanted if isinstance(wanted, int) else wanted[0]) < 0)
        if not went_wrong:
            assert answer == wanted
        for name, column in vars(before if went_wrong else with_arrays).items():
            assert (getattr(compiled, name) == column).all(), name


@compiled_only
@pytest.mark.parametrize("tick", [-1, 0, 7])
def test_slots_of_one_state_are_moved_and_freed(tick: int) -> None:
    """The draws above hardly ever name slots of one state."""
    for slots, source in (([0, 4, 16], 3), ([8, 40], 2), ([24, 44], 1)):
        for of in (kernels, array_kernels):
            slabs = Slabs()
            slabs.touched[:] = 3
            sizes = sum(slabs.sizes[slabs.at[slot // 8]] for slot in slots)
            assert slabs.move(of, slots, source, 2, tick) == sizes
            assert slabs.touched[slabs.at[np.array(slots) // 8]].tolist() == [3 if tick < 0 else tick] * len(slots)
        compiled, with_arrays = Slabs(), Slabs()
        assert compiled.free(kernels, slots) == with_arrays.free(array_kernels, slots)
        assert (compiled.owners == with_arrays.owners).all()


@compiled_only
@settings(max_examples=examples(300), deadline=None)
@given(data=st.data())
def test_columns_of_blocks_change_alike(data: st.DataObject) -> None:
    def column(values: st.SearchStrategy[int], dtype: Any, shape: tuple[int, ...] = (6,)) -> Any:
        count = int(np.prod(shape))
        return np.array(data.draw(st.lists(values, min_size=count, max_size=count)), dtype).reshape(shape)

    rows = np.array(data.draw(st.lists(st.integers(0, 5), unique=True, max_size=6)), np.int64)
    refs, missing = column(st.integers(1, 2), np.int32), column(st.integers(0, 2), np.int32)
    flags, slots = column(st.integers(0, 1), np.bool_), column(st.integers(-2, 1), np.int64, (2, 6))
    maybe_none = np.where(column(st.integers(0, 1), np.bool_)[: len(rows)], rows, -1)
    calls: list[Callable[[Any, Any, Any], object]] = [
        lambda of, out, columns: of.add_refs(columns[0], columns[1], rows, out),
        lambda of, out, columns: of.drop_refs(columns[0], columns[1], missing, 2, rows, out),
        lambda of, out, columns: of.sealed_slots(slots, 2, rows, out),
        lambda of, out, columns: of.readable_rows(missing, maybe_none, columns[1][: len(rows)]),
    ]
    for call in calls:
        answers = []
        for of in (kernels, array_kernels):
            out, columns = np.full(12, -9), (refs.copy(), flags.copy())
            answers.append((call(of, out, columns), out.tolist(), *(each.tolist() for each in columns)))
        assert answers[0] == answers[1]


ROWS = np.array([0, 5])
INTS, SMALL = np.zeros(4, np.int64), np.zeros(4, np.int32)
FLAGS = np.zeros(4, np.bool_)
WRONG_CALLS: dict[str, Callable[[], object]] = {
    "a row that the columns have not": lambda: kernels.add_refs(SMALL, FLAGS, ROWS, INTS),
    "one of a block that is read": lambda: kernels.readable_rows(SMALL, ROWS, FLAGS),
    "one that is dropped": lambda: kernels.drop_refs(SMALL, FLAGS, SMALL, 1, ROWS, INTS),
    "one with slots": lambda: kernels.sealed_slots(INTS, 1, ROWS, INTS),
    "one that is entered": lambda: kernels.enter_log(INTS, SMALL, ROWS, 0, 1),
    "one that leaves": lambda: kernels.leave_log(INTS, ROWS, 10),
    "a log that is full": lambda: kernels.enter_log(INTS, SMALL, np.array([0, 1]), 3, 1),
    "too little room for the answer": lambda: kernels.add_refs(SMALL, FLAGS, np.array([0, 1]), INTS[:1]),
    "too little for those that are read": lambda: kernels.readable_rows(SMALL, np.array([0, 1]), FLAGS[:1]),
    "too little for those that are dropped": lambda: kernels.drop_refs(
        SMALL, FLAGS, SMALL, 1, np.array([0, 1]), INTS[:1]
    ),
    "too little for the slots": lambda: kernels.sealed_slots(INTS, 1, np.array([0, 1]), INTS[:1]),
    "too little for the free slots": lambda: kernels.reserve_free(np.zeros(8, np.uint8), 0, 8, 0, 5, INTS),
    "columns of two lengths": lambda: kernels.add_refs(SMALL, FLAGS[:2], np.array([0]), INTS),
    "more buckets than the table has": lambda: kernels.find_rows(
        np.zeros(16, np.uint32), np.zeros(16, np.int32), 1, 2, INTS.view(np.uint64), INTS.view(np.uint64)[:1],
        np.ones(1, np.uint32), INTS,
    ),
    "a lane with a row that the table has not": lambda: kernels.find_rows(
        np.ones(16, np.uint32), np.full(16, 9, np.int32), 0, 1, INTS.view(np.uint64), INTS.view(np.uint64)[:1],
        np.ones(1, np.uint32), INTS,
    ),
    "a bucket that the level has not": lambda: kernels.place_rows(
        np.zeros(64, np.uint32), np.zeros(64, np.int32), 9, 4, np.full(1, 600, np.uint32), np.array([1]), INTS
    ),
    "an entry before the log": lambda: kernels.enter_log(INTS, SMALL, np.array([0]), -1, 1),
    "states that the slab has not": lambda: kernels.reserve_free(np.zeros(4, np.uint8), 2, 4, 0, 1, INTS),
}  # fmt: skip


@compiled_only
@pytest.mark.parametrize("which", WRONG_CALLS)
def test_a_compiled_kernel_touches_nothing_outside_of_its_arrays(which: str) -> None:
    with pytest.raises(IndexError):
        WRONG_CALLS[which]()


ELSEWHERE: dict[str, tuple[int, str, int]] = {
    "below the pool": (-8, "", 0),
    "above the pool": (48, "", 0),
    "in a slab above the last": (40, "at", 4),
    "in a slab below the first": (40, "at", -1),
    "whose state would be above the last": (40, "firsts", 10),
    "whose state would be below the first": (40, "firsts", -1),
}
"""A slot that is not in the pool; for the last unit or slab to be so, a column and what it has for that."""


@compiled_only
@pytest.mark.parametrize("where", ELSEWHERE)
def test_a_slot_that_is_not_in_the_pool_is_not_looked_for_beside_its_columns(where: str) -> None:
    slot, wrong, value = ELSEWHERE[where]
    slabs = Slabs()
    # What lies beside each column would make it a slot.
    for name, beside in {"at": 2, "sizes": 8, "starts": 40, "firsts": 0, "evictable": 0, "states": 3}.items():
        column = getattr(slabs, name)
        setattr(slabs, name, np.array([beside, *column.tolist(), beside], column.dtype)[1:-1])
    if wrong:
        getattr(slabs, wrong)[-1] = value
    assert slabs.move(kernels, [slot], 0, 1, -1) == array_kernels.NOT_A_SLOT
    assert slabs.free(kernels, [slot])[0] == array_kernels.NOT_A_SLOT


@compiled_only
def test_a_compiled_kernel_refuses_arrays_of_other_types() -> None:
    with pytest.raises(TypeError, match="items of 8 bytes; they must have 4"):
        kernels.add_refs(INTS, FLAGS, np.array([0]), INTS)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="given"):
        kernels.add_refs(SMALL, FLAGS, np.array([0]))  # type: ignore[call-arg]
    with pytest.raises((BufferError, ValueError)):
        kernels.readable_rows(np.frombuffer(bytes(16), np.int32), np.array([0]), np.frombuffer(bytes(1), np.bool_))
    with pytest.raises(TypeError, match="one dimension"):
        kernels.leave_log(INTS, np.zeros((2, 2), np.int64), 10)


@compiled_only
def test_rows_may_be_every_second_of_an_array_or_in_reverse() -> None:
    for rows in (np.arange(8)[::2], np.arange(4)[::-1]):
        refs, evictable, idle = np.zeros(8, np.int32), np.ones(8, np.bool_), np.empty(4, np.int64)
        assert kernels.add_refs(refs, evictable, rows, idle) == 4
        assert idle.tolist() == rows.tolist()
        assert refs.nonzero()[0].tolist() == sorted(rows.tolist())


@pytest.mark.parametrize("of", [array_kernels, pytest.param(kernels, marks=compiled_only)])
def test_rows_that_leave_are_counted_by_the_segments_they_were_in(of: Any) -> None:
    places = np.array([1, 1024, 1025, 0, 2049, 2])
    counts: dict[int, int] = {}
    for segment, count in of.leave_log(places, np.array([0, 1, 2, 4, 5]), 10):
        counts[segment] = counts.get(segment, 0) + count
    assert counts == {0: 3, 1: 1, 2: 1}
    assert places.tolist() == [0] * 6


@pytest.mark.parametrize("of", [array_kernels, pytest.param(kernels, marks=compiled_only)])
def test_a_slot_that_is_named_twice_is_not_freed(of: Any) -> None:
    slabs = Slabs()
    assert slabs.free(of, [0, 4, 4])[0] == array_kernels.TWICE
    assert slabs.states.tolist() == Slabs().states.tolist()


@pytest.mark.parametrize("of", [array_kernels, pytest.param(kernels, marks=compiled_only)])
@pytest.mark.parametrize("slot", [12, 42], ids=["free", "quarantined"])
def test_a_slot_that_nobody_uses_is_not_freed(of: Any, slot: int) -> None:
    slabs = Slabs()
    assert slabs.free(of, [0, slot])[0] == array_kernels.WRONG_STATE
    assert slabs.states.tolist() == Slabs().states.tolist()
