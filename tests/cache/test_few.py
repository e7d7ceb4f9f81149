"""What is done row by row for a few must come to the same as the array operations for many, to the last byte.

Two caches live the same life, one of them with no request small enough for the loops.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsidecar.cache.arrays import FEW
from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.grants import LoadGrant, StoreGrant
from kvsidecar.cache.space_blocks import Space
from kvsidecar.errors import Refusal
from kvsidecar.types import LookupMode
from tests.cache.integrity import check_integrity
from tests.cache.loops import loops_up_to
from tests.cache.support import eviction_order, key, new_cache, open_space, table_of
from tests.marks import examples

pytestmark = pytest.mark.timeout(600)


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

    def __init__(self, few: int, pages: int, slab: int, shards: tuple[tuple[int, ...], ...]) -> None:
        self.few = few
        with loops_up_to(few):
            self.cache: BlockCache = new_cache(pages, slab, [number % 2 for number in range(-(-pages // slab))])
            self.spaces: list[Space] = [
                open_space(self.cache, str(number), shards=each) for number, each in enumerate(shards)
            ]
        self.stores: list[StoreGrant] = []
        self.loads: list[LoadGrant] = []
        self.leases: list[int] = []

    def do(self, step: tuple[Any, ...]) -> object:
        name, *arguments = step
        with loops_up_to(self.few):
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


RUNS = st.builds(lambda start, count: list(range(start, start + count)), st.integers(0, 6), st.integers(1, 2 * FEW))
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


@pytest.mark.no_cover  # slow when every line is counted
@settings(max_examples=examples(200), deadline=None)
@given(shape=SHAPES, steps=st.lists(STEPS, min_size=10, max_size=40))
def test_a_loop_over_a_few_rows_does_what_the_array_operations_do(
    shape: tuple[int, int, tuple[tuple[int, ...], ...]], steps: list[tuple[Any, ...]]
) -> None:
    arrays_only, loops = Life(0, *shape), Life(FEW, *shape)
    for step in steps:
        assert loops.do(step) == arrays_only.do(step)
        assert loops.state() == arrays_only.state()


@pytest.mark.parametrize("few", [0, FEW])
def test_of_blocks_that_are_released_together_only_those_without_another_reference_can_go(few: int) -> None:
    life = Life(few, 4, 4, ((1,),))
    life.do(("store", 0, [0, 1, 2]))
    for names in ([1], [0, 1, 2]):
        life.do(("lease", 0, names, LookupMode.PREFIX))
    life.do(("release", 1))
    assert eviction_order(life.spaces[0]) == [key(2), key(0)]
    assert life.cache.stats().leased_bytes == life.cache.stats().total_bytes // 4
