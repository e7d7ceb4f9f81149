from __future__ import annotations

from collections.abc import Iterator

from kvsidecar.cache.arrays import Ints
from kvsidecar.cache.eviction_lru import SEGMENT
from kvsidecar.cache.victims import AHEAD_SHARE, AHEAD_SLOTS
from kvsidecar.types import LookupMode
from tests.cache.integrity import check_integrity
from tests.cache.support import (
    begin,
    keys,
    lease,
    names_readable,
    new_cache,
    one_space,
    open_space,
    readable,
    refused,
    reserved,
    store,
)

# -- which blocks go, one size class --------------------------------------------------------------------------------


def test_a_chain_loses_its_tail_before_its_head() -> None:
    cache, space = one_space(3)
    store(cache, space, "head", "middle", "tail")
    store(cache, space, "x")
    assert names_readable(cache, space, "head", "middle", "tail") == ["head", "middle"]
    store(cache, space, "y")
    assert names_readable(cache, space, "head", "middle", "tail") == ["head"]


def test_a_released_lease_is_a_use_of_its_blocks_with_the_tail_first_to_go() -> None:
    cache, space = one_space(3)
    store(cache, space, "head", "tail")
    store(cache, space, "other")
    cache.release(lease(cache, space, "head", "tail"))
    store(cache, space, "x")
    assert names_readable(cache, space, "head", "tail", "other") == ["head", "tail"]
    store(cache, space, "y")
    assert names_readable(cache, space, "head", "tail") == ["head"]


def test_of_a_lookup_that_leases_the_last_hits_only_those_are_used() -> None:
    cache, space = one_space(4)
    store(cache, space, "old window", "window")
    store(cache, space, "other", "another")
    granted, (hits,) = cache.lookup_and_lease(
        [(space, keys("old window", "missing", "window"))], LookupMode.BITMAP, 0.0, 10.0, "o", lease_last=[1]
    )
    assert granted is not None
    assert hits == [True, False, True]
    cache.release(granted.id)
    store(cache, space, "x")
    assert names_readable(cache, space, "old window", "window", "other", "another") == ["window", "other", "another"]


def test_a_load_is_a_use() -> None:
    cache, space = one_space(2)
    store(cache, space, "a")
    store(cache, space, "b")
    cache.end_load(cache.begin_load([(space, 0, keys("a"))], None, 0.0))  # type: ignore[arg-type]
    store(cache, space, "c")
    assert names_readable(cache, space, "a", "b") == ["a"]


def test_a_lookup_without_a_lease_is_no_use() -> None:
    cache, space = one_space(2)
    store(cache, space, "a")
    store(cache, space, "b")
    cache.lookup(space, keys("a"), LookupMode.PREFIX)
    store(cache, space, "c")
    assert names_readable(cache, space, "a", "b") == ["b"]


def test_a_store_is_a_use_of_the_head_that_was_present() -> None:
    cache, space = one_space(4)
    store(cache, space, "head")
    store(cache, space, "other")
    store(cache, space, "head", "tail")
    store(cache, space, "x", "y")
    assert names_readable(cache, space, "head", "tail", "other") == ["head", "tail"]
    store(cache, space, "z")
    assert names_readable(cache, space, "head", "tail") == ["head"]


# -- which blocks go, several size classes --------------------------------------------------------------------------


def test_no_more_is_evicted_than_needed() -> None:
    cache, space = one_space(4)
    store(cache, space, "a", "b", "c")
    begin(cache, space, keys("x", "y"))
    assert cache.stats().evicted_blocks == 1
    assert names_readable(cache, space, "a", "b", "c") == ["a", "b"]


def test_the_other_shard_of_a_block_being_stored_is_no_victim() -> None:
    cache, space = one_space(2, shards=(1, 1))
    store(cache, space, "a", shard=0)
    store(cache, space, "b", shard=0)
    store(cache, space, "a", shard=1)
    assert readable(cache, space, "a", "b") == [True, False]
    assert cache.stats().evicted_blocks == 1
    check_integrity(cache)


def test_a_partly_sealed_block_is_evictable() -> None:
    cache, space = one_space(2, shards=(1, 1))
    store(cache, space, "half", shard=0)
    store(cache, space, "a")
    assert readable(cache, space, "a", "half") == [True, False]
    assert cache.stats().blocks == 1


def test_an_evicted_block_takes_the_slots_of_all_its_shards_along() -> None:
    cache, space = one_space(4, shards=(1, 1))
    store(cache, space, "a", "b")
    store(cache, space, "c")
    assert (cache.stats().evicted_blocks, cache.stats().evicted_bytes) == (1, 2 * 4096)
    assert names_readable(cache, space, "a", "b", "c") == ["a", "c"]


def test_what_a_block_with_two_slots_made_needless_is_not_evicted() -> None:
    cache = new_cache(3)
    single, double = open_space(cache, "single"), open_space(cache, "double", shards=(1, 1))
    store(cache, single, "old")
    store(cache, double, "new")
    begin(cache, single, keys("x", "y"))
    assert readable(cache, single, "old") == [True]
    assert readable(cache, double, "new") == [False]


def test_the_second_model_gets_a_slab_of_a_pool_that_the_first_has_filled() -> None:
    cache = new_cache(8, 4)
    small, large = open_space(cache, "small"), open_space(cache, "large", shards=(2,))
    store(cache, small, 1, 2, 3, 4, 5, 6, 7, 8)
    store(cache, large, "a")
    assert readable(cache, large, "a") == [True]
    assert sum(readable(cache, small, 1, 2, 3, 4, 5, 6, 7, 8)) == 4
    check_integrity(cache)


def test_the_second_model_grows_beyond_its_first_slab_while_the_first_sleeps() -> None:
    cache = new_cache(8, 4)
    small, large = open_space(cache, "small"), open_space(cache, "large", shards=(2,))
    store(cache, small, 1, 2, 3, 4, 5, 6, 7, 8)
    for name in "abcd":
        store(cache, large, name)
    assert all(readable(cache, large, *"abcd"))
    assert not any(readable(cache, small, 1, 2, 3, 4, 5, 6, 7, 8))


def test_a_slab_that_was_used_since_is_not_taken_from_the_other_model() -> None:
    cache = new_cache(8, 4)
    small, large = open_space(cache, "small"), open_space(cache, "large", shards=(2,))
    store(cache, large, "a")
    store(cache, large, "b")
    store(cache, small, 1, 2, 3, 4)
    store(cache, large, "c")
    assert names_readable(cache, large, *"abc") == ["b", "c"]
    assert all(readable(cache, small, 1, 2, 3, 4))


def test_a_slab_with_a_leased_block_is_not_reclaimed() -> None:
    cache = new_cache(8, 4)
    small, large = open_space(cache, "small"), open_space(cache, "large", shards=(4,))
    store(cache, small, 1, 2, 3, 4)
    store(cache, small, 5, 6, 7, 8)
    lease(cache, small, 4)
    store(cache, large, "a")
    assert all(readable(cache, small, 1, 2, 3, 4))
    assert refused(cache, large, "b", "c")
    lease(cache, large, "a")
    assert refused(cache, large, "b")


def test_what_a_whole_slab_made_needless_is_not_evicted() -> None:
    cache = new_cache(8, 4)
    small, large = open_space(cache, "small"), open_space(cache, "large", shards=(2,))
    store(cache, large, "old")
    store(cache, small, 1, 2, 3, 4)
    store(cache, large, "new")
    # Two slots are needed: "old" is the oldest, then the slab of the small ones; that one alone is enough.
    begin(cache, large, keys("x", "y"))
    assert names_readable(cache, large, "old", "new") == ["old", "new"]
    assert not any(readable(cache, small, 1, 2, 3, 4))
    check_integrity(cache)


def test_leased_blocks_of_another_size_that_hold_every_slab_are_named_as_the_reason() -> None:
    cache = new_cache(8, 4)
    small, large = open_space(cache, "small"), open_space(cache, "large", shards=(4,))
    store(cache, small, 1, 2, 3, 4, 5, 6, 7, 8)
    held = [lease(cache, small, name) for name in (1, 5)]  # one in each slab
    assert cache.begin_store([(large, 0, keys("x"))]) == "pool_fragmented"
    assert cache.begin_store([(large, 0, keys("x", "y"))]) == "pool_full", "the bytes are not enough either"
    assert all(readable(cache, small, *range(1, 9)))
    cache.release(held[0])
    store(cache, large, "x")
    assert names_readable(cache, small, *range(1, 9)) == [5, 6, 7, 8]
    # What is of this size itself is no fragment.
    assert isinstance(lease(cache, large, "x"), int)
    assert cache.begin_store([(small, 0, keys(*range(11, 16)))]) == "pool_full"
    check_integrity(cache)


def test_one_request_with_two_classes_is_granted_or_refused_as_a_whole() -> None:
    cache = new_cache(8, 4)
    small, large = open_space(cache, group=0), open_space(cache, group=1, shards=(2,))
    store(cache, small, 1, 2, 3, 4, 5, 6, 7, 8)
    before = cache.stats()
    assert cache.begin_store([(small, 0, keys("a")), (large, 0, keys(*"abcde"))]) == "pool_full"
    assert cache.stats() == before
    grant = cache.begin_store([(small, 0, keys("a")), (large, 0, keys(*"ab"))])
    assert not isinstance(grant, str)
    assert reserved(grant) == [(0, 0), (1, 0), (1, 1)]
    check_integrity(cache)


def test_a_slab_with_a_block_of_the_same_request_is_not_reclaimed() -> None:
    cache = new_cache(4, 4)
    small, large = open_space(cache, group=0), open_space(cache, group=1, shards=(2,))
    store(cache, small, "a", "b")
    assert cache.begin_store([(small, 0, keys("a")), (large, 0, keys("a"))]) == "pool_full"
    assert all(readable(cache, small, "a", "b"))


def test_shards_of_different_size_go_together() -> None:
    cache, space = one_space(8, 4, shards=(1, 2))
    store(cache, space, "a", "b")
    store(cache, space, "c")
    assert names_readable(cache, space, *"abc") == ["a", "c"]
    assert cache.stats().evicted_bytes == 3 * 4096
    check_integrity(cache)


def test_groups_of_one_request_lose_their_blocks_in_turns() -> None:
    cache = new_cache(6)
    one, two = open_space(cache, group=0), open_space(cache, group=1)
    grant = cache.begin_store([(one, 0, keys(*"abc")), (two, 0, keys(*"abc"))])
    assert not isinstance(grant, str)
    cache.seal_all(grant)
    other = open_space(cache, "other")
    for left in (["a", "b"], ["a"], []):
        store(cache, other, f"{left}0", f"{left}1")
        assert names_readable(cache, one, *"abc") == names_readable(cache, two, *"abc") == left


def test_many_evicting_stores_look_at_few_blocks() -> None:
    """Not O(n): a policy that counts what is taken from it."""
    size = 4 * SEGMENT
    cache, space = one_space(size)
    store(cache, space, *range(size))
    taken = 0
    candidates = space.blocks.queues.candidates

    def counting(queue: int = 0) -> Iterator[Ints]:
        nonlocal taken
        for rows in candidates(queue):
            taken += len(rows)
            yield rows

    space.blocks.queues.candidates = counting  # type: ignore[method-assign]
    for name in range(size, size + 100):
        store(cache, space, name)
    assert 0 < taken <= 100 * SEGMENT


# -- ahead of the next stores ---------------------------------------------------------------------------------------


def test_an_eviction_makes_room_for_the_next_stores_too() -> None:
    cache = new_cache(2 * AHEAD_SHARE)  # two slots may be freed ahead
    space = open_space(cache)
    names = list(range(2 * AHEAD_SHARE))
    for name in names:
        store(cache, space, name)
    store(cache, space, "x")
    assert names_readable(cache, space, *names) == names[3:]
    assert cache.stats().evicted_blocks == 3
    store(cache, space, "y", "z")
    assert cache.stats().evicted_blocks == 3
    store(cache, space, "one more")
    assert cache.stats().evicted_blocks == 6
    check_integrity(cache)


def test_a_store_evicts_what_it_needs_where_no_more_can_go() -> None:
    cache, space = one_space(2 * AHEAD_SHARE)
    names = list(range(2 * AHEAD_SHARE))
    for name in names:
        store(cache, space, name)
    lease(cache, space, *names[2:])
    store(cache, space, "x")
    assert names_readable(cache, space, *names) == names[1:]
    assert not refused(cache, space, "y")
    check_integrity(cache)


def test_what_is_freed_ahead_is_bounded() -> None:
    cache, space = one_space(2 * AHEAD_SHARE * AHEAD_SLOTS)
    store(cache, space, *range(2 * AHEAD_SHARE * AHEAD_SLOTS))
    store(cache, space, "x")
    assert cache.stats().evicted_blocks == 1 + AHEAD_SLOTS
