"""Others fill the file system of a kept pool: no new slab has memory for its records, and old blocks make room."""

from __future__ import annotations

import errno

import numpy as np
import pytest

from kvsidecar.cache.arrays import Words
from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.grants import StoreGrant
from kvsidecar.cache.space_blocks import Space
from kvsidecar.errors import Refusal
from tests.cache.cuts import recorded_cache, words_for
from tests.cache.integrity import check_integrity
from tests.cache.support import PAGE, key, keys, open_space, store, table_of

SLAB, SLABS = 8, 4


class FullDisk:
    """Gives memory by the record, until it is full."""

    def __init__(self) -> None:
        self.backed: set[int] = set()
        self.full = False
        self.asked = 0

    def take(self, first: int, count: int) -> None:
        self.asked += 1
        wanted = set(range(first, first + count))
        if self.full and not wanted <= self.backed:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.backed |= wanted


@pytest.fixture
def disk() -> FullDisk:
    return FullDisk()


@pytest.fixture
def cache(disk: FullDisk) -> BlockCache:
    pages = SLAB * SLABS
    words: Words = np.zeros(words_for(pages, SLAB), np.uint64)
    made = recorded_cache(words, pages, SLAB)
    records = table_of(made).records
    assert records is not None
    records.take_room = disk.take
    return made


def found(space: Space, *blocks: int) -> list[int]:
    index = space.blocks.index
    return [each for each in blocks if (index.find(index.keys(keys(each))) >= 0).all()]


def test_stores_evict_the_oldest_though_the_pool_has_places(cache: BlockCache, disk: FullDisk) -> None:
    space = open_space(cache)
    store(cache, space, *range(SLAB))
    disk.full = True
    for number in range(SLAB, 5 * SLAB):
        grant = cache.begin_store([(space, 0, keys(number))])
        assert isinstance(grant, StoreGrant), grant
        cache.seal_all(grant)
        check_integrity(cache)
    assert cache.stats().used_bytes <= SLAB * PAGE
    assert found(space, *range(5 * SLAB))[-1] == 5 * SLAB - 1
    assert 0 not in found(space, 0)
    disk.full = False
    before = cache.stats().evicted_blocks
    for number in range(5 * SLAB, 7 * SLAB):
        store(cache, space, number)
    assert cache.stats().used_bytes > SLAB * PAGE, "the rest of the pool is not used again"
    assert cache.stats().evicted_blocks == before
    check_integrity(cache)


def test_many_blocks_at_once_and_what_is_too_much_changes_nothing(cache: BlockCache, disk: FullDisk) -> None:
    space = open_space(cache)
    store(cache, space, *range(SLAB))
    disk.full = True
    store(cache, space, *range(100, 100 + SLAB))
    before = found(space, *range(200))
    assert before == list(range(100, 100 + SLAB))
    for _ in range(3):
        assert cache.begin_store([(space, 0, keys(*range(300, 301 + SLAB)))]) is Refusal.TABLE_FULL
        check_integrity(cache)
    assert found(space, *range(200)) == before


def test_stores_of_a_smaller_size_evict_nothing_in_vain(cache: BlockCache, disk: FullDisk) -> None:
    """Their records would not fit those of the slab that they would take."""
    large, small = open_space(cache, "large", shards=(2,)), open_space(cache, "small")
    for number in range(3):
        store(cache, large, *range(4 * number, 4 * number + 4))
    disk.full = True
    for number in range(10):
        assert cache.begin_store([(small, 0, keys(number))]) is Refusal.TABLE_FULL
        check_integrity(cache)
    assert found(large, *range(12)) == list(range(12))


def test_stores_of_a_larger_size_take_a_slab_of_smaller_ones(cache: BlockCache, disk: FullDisk) -> None:
    small, large = open_space(cache, "small"), open_space(cache, "large", shards=(2,))
    store(cache, small, *range(SLAB))
    store(cache, small, *range(100, 100 + SLAB))
    disk.full = True
    store(cache, large, 1)
    check_integrity(cache)
    assert found(small, *range(SLAB)) == []
    assert found(small, *range(100, 100 + SLAB)) == list(range(100, 100 + SLAB))
    store(cache, large, 2, 3)
    assert found(large, 1, 2, 3) == [1, 2, 3]


def test_a_block_that_is_leased_is_not_taken_for_it(cache: BlockCache, disk: FullDisk) -> None:
    space = open_space(cache)
    store(cache, space, *range(SLAB))
    disk.full = True
    grant = cache.begin_load([(space, 0, keys(*range(SLAB)))], None, 0.0)
    assert not isinstance(grant, Refusal)
    assert cache.begin_store([(space, 0, [key(100)])]) is Refusal.TABLE_FULL
    cache.end_load(grant)
    assert isinstance(cache.begin_store([(space, 0, [key(100)])]), StoreGrant)


@pytest.mark.parametrize(("old", "new"), [(36, 36), (36, 27), (50, 36)])
def test_large_blocks_take_the_places_of_others_which_are_as_large(disk: FullDisk, old: int, new: int) -> None:
    """Each is a slab of its own, with one record. Where two of them touch, what they leave is not one place."""
    cache = large_cache(disk)
    first, then = open_space(cache, "first", shards=(old,)), open_space(cache, "then", shards=(new,))
    for number in range(4):
        store(cache, first, number)
    disk.full = True
    store(cache, then, 10)
    assert (found(first, *range(4)), found(then, 10)) == ([1, 2, 3], [10])
    store(cache, then, 11, 12)
    assert (found(first, *range(4)), found(then, 10, 11, 12)) == ([3], [10, 11, 12])
    check_integrity(cache)


@pytest.mark.parametrize(("old", "new"), [(36, 50), (50, 20)])
def test_large_blocks_evict_nothing_in_vain(disk: FullDisk, old: int, new: int) -> None:
    """Two of the small ones would lie in a place: the second would have no record."""
    cache = large_cache(disk)
    first, then = open_space(cache, "first", shards=(old,)), open_space(cache, "then", shards=(new,))
    for number in range(4):
        store(cache, first, number)
    disk.full = True
    assert cache.begin_store([(then, 0, keys(10))]) is Refusal.TABLE_FULL
    assert found(first, *range(4)) == [0, 1, 2, 3]
    check_integrity(cache)


def large_cache(disk: FullDisk) -> BlockCache:
    made = recorded_cache(np.zeros(words_for(400, 1), np.uint64), 400, 1)
    records = table_of(made).records
    assert records is not None
    records.take_room = disk.take
    return made
