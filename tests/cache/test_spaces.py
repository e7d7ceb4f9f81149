from __future__ import annotations

import pytest

from kvsidecar.cache.block_table import LIST_PART
from kvsidecar.errors import InvalidRequest, NamespaceMismatch
from tests.cache.integrity import check_integrity
from tests.cache.support import (
    PAGE,
    begin,
    key,
    keys,
    lease,
    namespace,
    new_cache,
    one_space,
    open_space,
    readable,
    store,
)


def test_ranks_of_one_namespace_and_group_share_a_space() -> None:
    cache = new_cache(4)
    assert cache.open_space(namespace(), 0, 2, 0, PAGE) is cache.open_space(namespace(), 0, 2, 1, 2 * PAGE)
    assert cache.find_space(namespace(), 0) is cache.spaces[0]


def test_namespaces_and_groups_do_not_see_each_others_blocks() -> None:
    cache = new_cache(4)
    one, two, group = open_space(cache, "one"), open_space(cache, "two"), open_space(cache, "one", group=1)
    store(cache, one, "a")
    assert [readable(cache, space, "a") for space in (one, two, group)] == [[True], [False], [False]]


def test_another_number_of_shards_is_refused_with_both_numbers() -> None:
    cache = new_cache(4)
    cache.open_space(namespace(), 0, 2, 0, PAGE)
    with pytest.raises(NamespaceMismatch, match=r"has 4 shards.* 2 are registered.*kv_layout or dtype"):
        cache.open_space(namespace(), 0, 4, 1, PAGE)


def test_another_size_of_a_shard_is_refused_with_both_numbers() -> None:
    cache = new_cache(4)
    cache.open_space(namespace(), 0, 1, 0, PAGE)
    # The same size class, but another layout: it must not pass.
    with pytest.raises(NamespaceMismatch, match=r"has 4095 bytes.* 4096 are registered.*kv_layout or dtype"):
        cache.open_space(namespace(), 0, 1, 0, PAGE - 1)


def test_a_shard_larger_than_an_eighth_of_the_pool_is_refused_with_both_sizes_and_what_to_set() -> None:
    cache = new_cache(24, 1)
    cache.open_space(namespace("other"), 0, 1, 0, 3 * PAGE)
    cache.clear()
    with pytest.raises(InvalidRequest, match=r"12289 bytes.*12288: set --pool-size to at least 8 times the block$"):
        cache.open_space(namespace(), 0, 1, 0, 3 * PAGE + 1)
    assert [space.namespace for space in cache.spaces] == [namespace("other")]


@pytest.mark.parametrize(("shards", "least"), [(9, PAGE + 1), (16, PAGE + 1), (64, 7 * PAGE + 1)])
def test_blocks_whose_shards_are_small_for_their_number_are_refused(shards: int, least: int) -> None:
    """The list of a block's shards is the daemon's own memory, and one of them may be all that is stored: of 1,024
    shards of a page, it took 8 KiB for each page of the pool."""
    cache = new_cache(64)
    with pytest.raises(
        InvalidRequest, match=f"{least - 1} bytes; as one of {shards} shards it needs at least {least}:"
    ):
        cache.open_space(namespace(), 0, shards, 0, least - 1)
    blocks = cache.open_space(namespace(), 0, shards, 0, least).blocks
    assert blocks.slots[:, 0].nbytes <= blocks.space.slot_sizes[0] // LIST_PART


@pytest.mark.parametrize(("num_shards", "shard", "nbytes"), [(1, 1, PAGE), (0, 0, PAGE), (1, -1, PAGE), (1, 0, 0)])
def test_numbers_that_make_no_sense_are_refused(num_shards: int, shard: int, nbytes: int) -> None:
    cache = new_cache(4)
    with pytest.raises(InvalidRequest):
        cache.open_space(namespace(), 0, num_shards, shard, nbytes)
    assert cache.spaces == []


def test_a_refused_rank_does_not_count_as_user() -> None:
    cache = new_cache(4)
    space = cache.open_space(namespace(), 0, 1, 0, PAGE)
    with pytest.raises(NamespaceMismatch):
        cache.open_space(namespace(), 0, 1, 0, 2 * PAGE)
    cache.close_space(space)
    assert cache.spaces == []


def test_sizes_are_forgotten_when_the_last_rank_of_an_empty_space_goes() -> None:
    cache = new_cache(4)
    for space in (cache.open_space(namespace(), 0, 2, 0, PAGE), cache.open_space(namespace(), 0, 2, 1, PAGE)):
        cache.close_space(space)
    cache.open_space(namespace(), 0, 1, 0, 2 * PAGE)
    check_integrity(cache)


def test_blocks_outlive_their_ranks_and_keep_the_sizes() -> None:
    cache, space = one_space(4)
    store(cache, space, "a")
    cache.close_space(space)
    with pytest.raises(NamespaceMismatch):
        cache.open_space(namespace(), 0, 1, 0, 2 * PAGE)
    again = open_space(cache)
    assert again is space
    assert readable(cache, again, "a") == [True]


def test_a_space_without_ranks_goes_with_its_last_block() -> None:
    cache = new_cache(1)
    old = open_space(cache, "old")
    store(cache, old, "a")
    cache.close_space(old)
    store(cache, open_space(cache, "new"), "a")
    assert cache.find_space(namespace("old"), 0) is None
    check_integrity(cache)


def test_a_space_without_ranks_goes_when_it_is_cleared() -> None:
    cache, space = one_space(2)
    store(cache, space, "a")
    lease(cache, space, "a")
    cache.close_space(space)
    cache.clear()
    assert cache.spaces == []
    assert cache.stats().leased_bytes == PAGE
    other = cache.open_space(namespace(), 0, 1, 0, 2 * PAGE)
    assert other is not space
    cache.drop_owner("o")
    check_integrity(cache)
    assert cache.stats().free_bytes == 2 * PAGE


def test_a_space_goes_when_its_last_reservation_is_aborted_after_its_rank_has_gone() -> None:
    cache, space = one_space(2)
    grant = begin(cache, space, keys("a"))
    cache.close_space(space)
    assert cache.spaces == [space]
    cache.abort_all(grant)
    assert cache.spaces == []


def test_a_space_cannot_be_closed_more_often_than_opened_nor_used_after() -> None:
    cache, space = one_space(2)
    cache.close_space(space)
    with pytest.raises(AssertionError, match="more often"):
        cache.close_space(space)
    with pytest.raises(AssertionError, match="closed"):
        cache.begin_store([(space, 0, [key("a")])])


def test_a_shard_that_no_rank_has_registered_can_be_neither_stored_nor_loaded() -> None:
    cache = new_cache(2)
    space = cache.open_space(namespace(), 0, 2, 0, PAGE)
    for shard in (1, 2, -1):
        with pytest.raises(InvalidRequest, match=f"shard {shard} "):
            cache.begin_store([(space, shard, keys("a"))])
        with pytest.raises(InvalidRequest, match=f"shard {shard} "):
            cache.begin_load([(space, shard, keys("a"))], None, 0.0)
