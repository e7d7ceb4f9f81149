"""What spaces cost besides the pool: what their blocks cost, and nothing once these have gone."""

from __future__ import annotations

import gc
import mmap
import tracemalloc
import weakref
from collections.abc import Callable

import numpy as np
import pytest

from kvsidecar.cache.arrays import HUGE_BYTES, MAPPED_BYTES, extended, zeros
from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.slots import SlotAllocator
from kvsidecar.cache.space_blocks import COLUMNS, COPIED_ROWS, REBUILT, SLOTS_BYTES, Space
from tests.cache.integrity import check_integrity
from tests.cache.support import (
    PAGE,
    begin,
    eviction_order,
    key,
    keys,
    lease,
    names_readable,
    nbytes_of,
    new_cache,
    one_space,
    open_space,
    readable,
    refused,
    rows_in,
    store,
    table_of,
)

MANY = 4096


def nbytes(cache: BlockCache) -> int:
    """Of the arrays of all blocks there are."""
    return sum(nbytes_of(blocks) for blocks in table_of(cache).tables.values())


def of_one_block() -> int:
    cache = new_cache(1)
    store(cache, open_space(cache), "a")
    return nbytes(cache)


def test_a_space_without_blocks_costs_next_to_nothing_whatever_the_pool_and_the_number_of_shards() -> None:
    small, large = new_cache(1), BlockCache(SlotAllocator(1 << 40, 1 << 30))
    open_space(small)
    open_space(large)
    assert nbytes(small) == nbytes(large) < of_one_block()
    shards = new_cache(1)
    shards.open_space(open_space(small).namespace, 1, 8, 0, PAGE)
    assert nbytes(shards) < nbytes(small) + 3 * 8 * 8


def test_what_a_space_costs_follows_its_blocks() -> None:
    cache, space = one_space(MANY)
    costs = []
    for count in (MANY // 64, MANY // 8, MANY):
        store(cache, space, *range(count))
        costs.append(nbytes(cache) / count)
    assert max(costs) < 4 * min(costs)


def test_a_namespace_with_one_block_takes_little_beside_its_name_however_often_it_is_used() -> None:
    """A client may leave very many of them: it was 12 KiB."""
    cache = new_cache(2 * MANY)

    def left(number: int) -> None:
        space = open_space(cache, f"{number}")
        store(cache, space, "a")
        for _ in range(20):
            cache.release(lease(cache, space, "a"))
        cache.close_space(space)

    left(0)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(1, 101):
        left(number)
    gc.collect()
    took = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert took < 100 * 8 * 1024


def by_clearing(cache: BlockCache, space: Space) -> None:
    cache.clear(space.namespace)
    while cache.sweep():
        pass


def by_eviction(cache: BlockCache, space: Space) -> None:
    other = open_space(cache, "other")
    store(cache, other, *(f"other {number}" for number in range(MANY)))
    cache.close_space(other)
    by_clearing(cache, other)


def by_eviction_under_another_size(cache: BlockCache, space: Space) -> None:
    other = open_space(cache, "other", shards=(2,))
    store(cache, other, *(f"other {number}" for number in range(MANY // 2)))
    cache.close_space(other)
    by_clearing(cache, other)


@pytest.mark.parametrize("go", [by_clearing, by_eviction, by_eviction_under_another_size])
@pytest.mark.parametrize("attached", [True, False])
def test_when_the_blocks_go_their_memory_does(go: Callable[[BlockCache, Space], None], attached: bool) -> None:
    cache, space = one_space(MANY, 64)
    empty = nbytes(cache)
    store(cache, space, *range(MANY))
    assert nbytes(cache) > 50 * MANY
    if not attached:
        cache.close_space(space)
    go(cache, space)
    check_integrity(cache)
    assert nbytes(cache) == (empty if attached else 0)
    if attached:
        store(cache, space, *range(10))
        assert names_readable(cache, space, 3, 11) == [3]
        check_integrity(cache)


def test_cleared_blocks_that_are_needed_keep_their_memory_until_they_are_not() -> None:
    cache, space = one_space(MANY)
    store(cache, space, *range(MANY))
    held = lease(cache, space, 7)
    by_clearing(cache, space)
    assert nbytes(cache) > 50 * MANY
    cache.release(held)
    assert nbytes(cache) < of_one_block()
    check_integrity(cache)


def test_a_store_that_fails_leaves_nothing() -> None:
    cache, space = one_space(MANY)
    empty = nbytes(cache)
    cache.abort_all(begin(cache, space, keys(*range(MANY))))
    assert nbytes(cache) == empty
    check_integrity(cache)


def test_a_store_that_is_refused_leaves_nothing() -> None:
    cache, space = one_space(2)
    empty = nbytes(cache)
    assert refused(cache, space, *range(MANY))
    assert nbytes(cache) == empty
    check_integrity(cache)


def test_a_few_blocks_do_not_keep_the_memory_of_many() -> None:
    """Evicted, or refused: a table with rows for many more blocks than there are is rebuilt."""
    cache, space = one_space(MANY)
    store(cache, space, *range(10))
    few = nbytes(cache)
    order, slots = eviction_order(space), space.blocks.sealed_slots(rows_in(space.blocks.index))
    assert refused(cache, space, *range(10 * MANY))
    assert nbytes(cache) > 100 * few
    cache.sweep()
    check_integrity(cache)
    assert nbytes(cache) <= 4 * few
    assert readable(cache, space, *range(12)) == [True] * 10 + [False] * 2
    assert eviction_order(space) == order
    assert sorted(space.blocks.sealed_slots(rows_in(space.blocks.index))) == sorted(slots)


def test_a_table_is_not_built_anew_under_those_who_use_its_blocks() -> None:
    cache = new_cache(MANY)
    space, other = open_space(cache), open_space(cache, "other")
    for each in (space, other):
        store(cache, each, *range(10))
    held = lease(cache, space, 3, 4)
    rows = cache._leases.get(held, 0.0).chains[0].rows.tolist()  # type: ignore[union-attr]
    filling = begin(cache, space, [key("filling")])
    for each in (space, other):
        assert refused(cache, each, *range(10 * MANY))
    large = nbytes_of(space.blocks)
    for _ in range(3):
        cache.sweep()
    assert nbytes_of(space.blocks) == large
    assert space.blocks.index.find(space.blocks.index.keys(keys(3, 4))).tolist() == rows
    assert nbytes_of(other.blocks) < large / 100, "one that is in use keeps the others waiting"
    cache.release(held)
    cache.seal_all(filling)
    cache.sweep()
    check_integrity(cache)
    assert nbytes_of(space.blocks) < large / 100
    assert readable(cache, space, 3, "filling", 11) == [True, True, False]


def test_a_table_of_so_many_blocks_that_this_would_take_long_is_not_built_anew() -> None:
    cache, space = one_space(2 * REBUILT)
    store(cache, space, *range(REBUILT + 1))
    assert refused(cache, space, *range(2 * COPIED_ROWS))
    large = nbytes(cache)
    cache.sweep()
    assert nbytes(cache) == large


def test_the_columns_of_a_large_table_are_freed_one_by_one() -> None:
    """Those of a million blocks at once took three milliseconds."""
    cache, space = one_space(COPIED_ROWS + 1)
    store(cache, space, *range(COPIED_ROWS + 1))
    columns = [weakref.ref(getattr(space.blocks, name)) for name in COLUMNS]
    cache.clear(sweep=0)
    alive = [len(columns)]
    while cache.sweep():
        alive.append(sum(each() is not None for each in columns))
        assert alive[-2] - alive[-1] <= 1
    assert alive[-1] == 0


def test_rows_for_all_blocks_are_not_made_room_for_where_each_has_many_shards() -> None:
    cache = BlockCache(SlotAllocator(1 << 40, 1 << 30))
    space = cache.open_space(open_space(new_cache(1)).namespace, 0, 64, 0, 8 * PAGE)
    space.blocks._lengthen(COPIED_ROWS + 1)
    assert space.blocks.slots.nbytes <= SLOTS_BYTES


def test_large_arrays_are_mappings_that_go_with_them() -> None:
    def mapped() -> int:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmSize"))

    size = 1 << 32
    before = mapped()
    large = zeros((size // 8,), np.int64)
    assert mapped() - before >= size
    assert not large[:: size // 64].any()
    large[-1] = 7
    del large
    assert mapped() - before < size // 2


@pytest.mark.parametrize("nbytes", [8, MAPPED_BYTES - 8, MAPPED_BYTES, HUGE_BYTES, HUGE_BYTES + mmap.PAGESIZE])
def test_arrays_of_every_size_are_zeros_that_can_be_written_and_made_longer(nbytes: int) -> None:
    column = zeros((2, nbytes // 16), np.int64)
    assert column.shape == (2, nbytes // 16)
    assert not column.any()
    column[:] = 7
    grown = extended(column, nbytes)
    assert grown.shape == (2, nbytes)
    assert (grown[:, : nbytes // 16] == 7).all()
    assert not grown[:, nbytes // 16 :].any()
    assert extended(column, 5, axis=0).sum(axis=1).tolist() == [7 * (nbytes // 16)] * 2 + [0] * 3
