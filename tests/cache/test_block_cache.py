from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.grants import LoadGrant, StoreGrant
from kvsidecar.cache.reader import PROBE
from kvsidecar.cache.slots import SlotAllocator, SlotState
from kvsidecar.cache.space_blocks import Space
from kvsidecar.errors import Refusal
from kvsidecar.types import LookupMode
from tests.cache.inside import state_of
from tests.cache.integrity import check_integrity
from tests.cache.support import (
    PAGE,
    begin,
    key,
    keys,
    lease,
    names_readable,
    namespace,
    new_cache,
    open_space,
    readable,
    refused,
    reserved,
    slot_of,
    slots_of,
    store,
)

# -- lookup -------------------------------------------------------------------------------------------------------


def test_a_prefix_ends_at_the_first_block_that_is_not_readable() -> None:
    cache = new_cache(4)
    space = open_space(cache)
    store(cache, space, "a", "b", "d")
    assert cache.lookup(space, keys(*"abcd"), LookupMode.PREFIX) == [True, True, False, False]
    assert cache.lookup(space, keys(*"abcd"), LookupMode.BITMAP) == [True, True, False, True]
    assert (space.hits, space.misses) == (5, 3)


def test_blocks_above_the_limit_are_neither_looked_up_nor_leased_nor_loaded() -> None:
    cache = new_cache(6, slab=2)
    space, sharded = open_space(cache), open_space(cache, "sharded", shards=(1, 1))
    store(cache, space, *"abc")  # one slot of c is in the second slab
    store(cache, sharded, "s")  # the second slot of it is in the third slab
    everything = [(space, keys(*"abc")), (sharded, keys("s"))]
    for below, hits in ((0, 0), (2, 2), (4, 3), (6, 4), (None, 4)):
        cache.reader.below = None if below is None else below * PAGE
        assert readable(cache, space, *"abc") + readable(cache, sharded, "s") == [n < hits for n in range(4)]
        assert sum(cache.lookup(space, keys(*"cab"), LookupMode.PREFIX)) == (3 if hits >= 3 else 0)
        taken, found = cache.lookup_and_lease(everything, LookupMode.BITMAP, 0.0, 1.0, None)
        assert sum(map(sum, found)) == hits == (taken.num_blocks if taken else 0)
        if taken:
            cache.release(taken.id)
        for number, (of, name) in enumerate(((space, "a"), (space, "b"), (space, "c"), (sharded, "s"))):
            grant = cache.begin_load([(of, 0, keys(name))], None, 0.0)
            assert isinstance(grant, LoadGrant) == (number < hits), f"{name} below {below}"
            if isinstance(grant, LoadGrant):
                cache.end_load(grant)
            else:
                assert grant is Refusal.NOT_FOUND
    check_integrity(cache)


def test_a_long_prefix_ends_at_the_limit() -> None:
    cache = new_cache(2 * PROBE, slab=PROBE // 2)
    space = open_space(cache)
    store(cache, space, *range(2 * PROBE))
    for below in (PROBE // 2, PROBE, PROBE + PROBE // 2):
        cache.reader.below = below * PAGE
        found = cache.lookup(space, keys(*range(2 * PROBE)), LookupMode.PREFIX)
        assert found == [number < below for number in range(2 * PROBE)]


# -- a place for a self-test --------------------------------------------------------------------------------------


def test_a_place_is_free_memory_while_there_is_any() -> None:
    cache = new_cache(6, slab=2)
    space = open_space(cache)
    assert cache.find_place(2 * PAGE) == (0, 2 * PAGE)
    store(cache, space, "a")
    assert cache.find_place(2 * PAGE) == (PAGE, PAGE)
    store(cache, space, "b")
    assert cache.find_place(4 * PAGE) == (2 * PAGE, 2 * PAGE)
    assert cache.stats().evicted_blocks == 0
    check_integrity(cache)


@pytest.mark.parametrize(("below", "gone"), [(2, "b"), (4, "d"), (6, "d")])
def test_in_full_memory_the_oldest_block_there_makes_a_place_and_no_other(below: int, gone: str) -> None:
    cache = new_cache(6, slab=2)
    space, other = open_space(cache), open_space(cache, "other")
    store(cache, space, "a")
    store(cache, other, "b")
    store(cache, space, *"cd")
    store(cache, other, *"ef")
    for of, name in ((other, "b"), (space, "a")):
        grant = cache.begin_load([(of, 0, keys(name))], None, 0.0)
        assert isinstance(grant, LoadGrant)
        cache.end_load(grant)
    slot = max(slot_of(of, key(gone), 0) for of in (space, other))
    assert cache.find_place(below * PAGE) == (slot, PAGE)
    left = names_readable(cache, space, *"abcdef") + names_readable(cache, other, *"abcdef")
    assert sorted(left) == sorted(set("abcdef") - {gone})  # type: ignore[type-var]
    assert cache.find_place(below * PAGE) == (slot, PAGE), "it stays free"
    check_integrity(cache)


def test_a_place_is_made_of_cleared_blocks_before_others() -> None:
    cache = new_cache(2)
    space = open_space(cache)
    store(cache, space, "a", "b")
    cache.clear(namespace(), sweep=0)
    assert cache.find_place(2 * PAGE) == (0, 2 * PAGE)
    assert cache.stats().evicted_blocks == 0


def test_there_is_no_place_if_every_block_is_in_use() -> None:
    cache = new_cache(2)
    space = open_space(cache)
    store(cache, space, "a", "b")
    held = lease(cache, space, "a", "b")
    assert cache.find_place(2 * PAGE) is None
    cache.release(held)
    assert cache.find_place(2 * PAGE) is not None


def test_a_block_being_filled_is_not_readable() -> None:
    cache = new_cache(4)
    space = open_space(cache)
    grant = begin(cache, space, keys("a"))
    assert readable(cache, space, "a") == [False]
    assert cache.seal_all(grant) == 1
    assert readable(cache, space, "a") == [True]


def test_a_store_by_one_of_two_ranks_is_not_readable() -> None:
    cache = new_cache(4)
    space = open_space(cache, shards=(1, 1))
    first, second = begin(cache, space, keys("a"), 0), begin(cache, space, keys("a"), 1)
    assert cache.seal_all(second) == 0
    assert readable(cache, space, "a") == [False]
    assert cache.begin_load([(space, 1, keys("a"))], None, 0.0) is Refusal.NOT_FOUND
    assert cache.seal_all(first) == 1
    assert readable(cache, space, "a") == [True]


def test_a_rank_that_dies_before_its_shard_leaves_the_block_to_the_next_one() -> None:
    cache = new_cache(4)
    space = open_space(cache, shards=(1, 1))
    store(cache, space, "a", shard=0)
    cache.abort_all(begin(cache, space, keys("a"), 1))
    assert readable(cache, space, "a") == [False]
    store(cache, space, "a", shard=1)
    assert readable(cache, space, "a") == [True]


# -- store --------------------------------------------------------------------------------------------------------


def test_blocks_of_one_request_get_adjacent_slots_in_their_order() -> None:
    cache = new_cache(16, 8)
    space = open_space(cache)
    assert slots_of(begin(cache, space, keys(*range(12)))) == [page * PAGE for page in range(12)]


@given(rounds=st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=8, unique=True), min_size=1, max_size=30))
def test_slots_of_one_request_ascend_and_leave_no_free_slot_between_them(rounds: list[list[int]]) -> None:
    """After any evictions: what was freed is sorted, so runs are as long as the free slots allow."""
    cache = new_cache(12, 6)
    space = open_space(cache)
    for names in rounds:
        grant = begin(cache, space, keys(*names))
        slots = slots_of(grant)
        assert slots == sorted(slots)
        for slab in (range(6 * PAGE), range(6 * PAGE, 12 * PAGE)):
            inside = [slot for slot in slots if slot in slab]
            between = range(inside[0], inside[-1], PAGE) if inside else ()
            states = {slot: state_of(cache._table.slots, slot) for slot in between}
            assert SlotState.FREE not in states.values(), f"a free slot was passed over: {states}"
        cache.seal_all(grant)


def test_a_grant_has_the_index_of_each_block_that_must_be_copied() -> None:
    cache = new_cache(6)
    space = open_space(cache)
    store(cache, space, "b")
    begin(cache, space, keys("d"))
    grant = begin(cache, space, keys(*"abcde"))
    assert reserved(grant) == [(0, 0), (0, 2), (0, 4)]
    assert (grant.present, grant.in_flight) == (1, 1)
    assert len(set(slots_of(grant))) == grant.reserved == 3


def test_a_hash_that_comes_twice_in_a_request_is_stored_once() -> None:
    cache = new_cache(6)
    space = open_space(cache)
    grant = cache.begin_store([(space, 0, keys("a", "a", "b")), (space, 0, keys("b"))])
    assert isinstance(grant, StoreGrant)
    assert reserved(grant) == [(0, 0), (0, 2)]
    assert grant.in_flight == 2
    cache.seal_all(grant)
    check_integrity(cache)


@pytest.mark.parametrize("distinct", [2, 3, 20])
def test_hashes_of_one_request_that_share_a_tag_are_all_stored(distinct: int) -> None:
    """About one job of 512 blocks in 16,000 has such a pair; a block that is left out is a miss for no reason."""
    cache = new_cache(64)
    space = open_space(cache)
    space.blocks.index._multipliers[:] = 0  # one tag for all
    hashes = keys("known", *range(distinct), 0, "known")
    cache.seal_all(begin(cache, space, keys("known")))
    grant = begin(cache, space, hashes)
    assert reserved(grant) == [(0, index) for index in range(1, distinct + 1)]
    assert (grant.present, grant.in_flight) == (2, 1)
    check_integrity(cache)
    cache.seal_all(grant)
    assert cache.lookup(space, hashes, LookupMode.BITMAP) == [True] * len(hashes)
    cache.abort_all(begin(cache, space, keys("a", "b", "c")))
    check_integrity(cache)
    assert cache.lookup(space, keys("a", "b", "c", "known"), LookupMode.BITMAP) == [False, False, False, True]


def test_one_request_can_store_two_shards_of_a_block() -> None:
    cache = new_cache(6)
    space = open_space(cache, shards=(1, 1))
    grant = cache.begin_store([(space, 0, keys("a")), (space, 1, keys("a"))])
    assert isinstance(grant, StoreGrant)
    assert cache.seal_all(grant) == 1
    assert cache.stats().blocks == 1


def test_an_empty_request_is_granted() -> None:
    cache = new_cache(1)
    grant = cache.begin_store([])
    assert isinstance(grant, StoreGrant)
    assert cache.seal_all(grant) == 0
    assert isinstance(cache.begin_load([], None, 0.0), LoadGrant)


def test_seal_all_counts_the_blocks_that_became_readable() -> None:
    cache = new_cache(6)
    space = open_space(cache, shards=(1, 1))
    store(cache, space, "a", shard=0)
    assert cache.seal_all(begin(cache, space, keys("a", "b"), 1)) == 1


def test_an_aborted_store_gives_its_slots_back() -> None:
    cache = new_cache(2)
    space = open_space(cache)
    grant = begin(cache, space, keys("a", "b"))
    assert refused(cache, space, "c")
    cache.abort_all(grant)
    assert cache.stats().free_bytes == 2 * PAGE
    assert cache.stats().blocks == 0
    store(cache, space, "a", "b")


@pytest.mark.parametrize("second", ["seal", "abort"])
@pytest.mark.parametrize("first", ["seal", "abort"])
def test_a_store_ends_once(first: str, second: str) -> None:
    cache = new_cache(2)
    grant = begin(cache, open_space(cache), keys("a"))
    getattr(cache, f"{first}_all")(grant)
    with pytest.raises(AssertionError, match="already ended"):
        getattr(cache, f"{second}_all")(grant)
    check_integrity(cache)


def test_slots_are_taken_on_the_wanted_node() -> None:
    cache = new_cache(8, 4, numa=[0, 1])
    space = open_space(cache)
    for node in (1, 0, 1):
        grant = cache.begin_store([(space, 0, keys(node, f"{node}x"))], node=node)
        assert isinstance(grant, StoreGrant)
        assert {slot // (4 * PAGE) for slot in slots_of(grant)} <= {node}


def test_a_preferred_node_never_makes_a_store_fail_that_would_fit() -> None:
    cache = new_cache(8, 4, numa=[0, 1])
    small, large = open_space(cache, group=0), open_space(cache, group=1, shards=(2,))
    begin(cache, large, keys("a"))
    # One slab is left for the small shard, if the large one goes beside "a", on whichever node that is.
    for node in (0, 1):
        grant = cache.begin_store([(small, 0, keys("b")), (large, 0, keys("b"))], node=node)
        assert isinstance(grant, StoreGrant)
        cache.abort_all(grant)


def test_a_small_shard_leaves_the_last_full_slab_to_a_large_one_of_the_same_request() -> None:
    cache = new_cache(5, 4)
    small, large = open_space(cache, group=0), open_space(cache, group=1, shards=(4,))
    grant = cache.begin_store([(small, 0, keys("a")), (large, 0, keys("a"))])
    assert isinstance(grant, StoreGrant)
    assert slots_of(grant) == [4 * PAGE, 0]


# -- leases -------------------------------------------------------------------------------------------------------


def test_a_leased_block_is_not_evicted_and_a_released_one_is() -> None:
    cache = new_cache(1)
    space = open_space(cache)
    store(cache, space, "a")
    held = lease(cache, space, "a")
    assert refused(cache, space, "b")
    assert cache.release(held)
    assert not cache.release(held)
    store(cache, space, "b")
    assert names_readable(cache, space, "a", "b") == ["b"]


def test_two_leases_on_a_block_are_two_references() -> None:
    cache = new_cache(1)
    space = open_space(cache)
    store(cache, space, "a")
    first, second = lease(cache, space, "a"), lease(cache, space, "a", "a")
    cache.release(first)
    assert refused(cache, space, "b")
    cache.release(second)
    assert not refused(cache, space, "b")


def test_an_expired_lease_keeps_nothing() -> None:
    cache = new_cache(1)
    space = open_space(cache)
    store(cache, space, "a")
    held = lease(cache, space, "a", now=0, ttl=10)
    assert cache.expire(9.9) == []
    assert refused(cache, space, "b")
    assert [expired.id for expired in cache.expire(10)] == [held]
    assert cache.stats().leased_bytes == 0
    assert not refused(cache, space, "b")


def test_a_renewed_lease_holds_until_its_new_time() -> None:
    cache = new_cache(1)
    space = open_space(cache)
    store(cache, space, "a")
    held = lease(cache, space, "a", now=0, ttl=10)
    assert cache.renew(held, now=5, ttl=10)
    assert cache.expire(14.9) == []
    assert cache.lease(held, 14.9) is not None
    assert [one.id for one in cache.expire(15)] == [held]
    assert not cache.renew(held, now=15, ttl=10)


def test_a_lease_covers_exactly_the_hits_of_all_parts() -> None:
    cache = new_cache(6)
    one, two = open_space(cache, group=0), open_space(cache, group=1)
    store(cache, one, "a", "b")
    store(cache, two, "a", "c")
    granted, hits = cache.lookup_and_lease([(one, keys(*"abc")), (two, keys(*"abc"))], LookupMode.PREFIX, 0, 1, "o")
    assert hits == [[True, True, False], [True, False, False]]
    assert granted is not None
    assert granted.num_blocks == 3
    assert cache.stats().leased_bytes == 3 * PAGE


def test_a_lookup_without_hits_leaves_no_lease() -> None:
    cache = new_cache(1)
    space = open_space(cache)
    granted, hits = cache.lookup_and_lease([(space, keys("a"))], LookupMode.BITMAP, 0, 1, "o")
    assert (granted, hits, cache.stats().leases) == (None, [[False]], 0)
    assert space.misses == 1


def test_an_owner_that_goes_loses_its_leases_and_no_other() -> None:
    cache = new_cache(2)
    space = open_space(cache)
    store(cache, space, "a", "b")
    lease(cache, space, "a", owner="gone")
    kept = lease(cache, space, "b", owner="here")
    assert len(cache.drop_owner("gone")) == 1
    store(cache, space, "c")
    assert names_readable(cache, space, "a", "b") == ["b"]
    assert cache.lease(kept, 0) is not None


def test_lease_ids_come_from_the_given_source() -> None:
    cache = BlockCache(SlotAllocator(PAGE, PAGE), next_id=iter([99]).__next__)
    space = open_space(cache)
    store(cache, space, "a")
    assert lease(cache, space, "a") == 99


# -- load ---------------------------------------------------------------------------------------------------------


def test_a_load_finds_the_slots_that_the_store_has_filled() -> None:
    cache = new_cache(8)
    space = open_space(cache, shards=(1, 1))
    slots = {}
    for shard in (0, 1):
        grant = begin(cache, space, keys("a", "b"), shard)
        slots[shard] = slots_of(grant)
        cache.seal_all(grant)
    load = cache.begin_load([(space, 1, keys("b", "a")), (space, 0, keys("a"))], None, 0.0)
    assert isinstance(load, LoadGrant)
    assert [each.tolist() for each in load.slots] == [slots[1][::-1], slots[0][:1]]


def test_a_load_keeps_its_blocks_until_it_ends() -> None:
    cache = new_cache(1)
    space = open_space(cache)
    store(cache, space, "a")
    load = cache.begin_load([(space, 0, keys("a"))], None, 0.0)
    assert isinstance(load, LoadGrant)
    assert refused(cache, space, "b")
    assert cache.stats().loads == 1
    cache.end_load(load)
    assert not refused(cache, space, "b")
    with pytest.raises(AssertionError, match="already ended"):
        cache.end_load(load)


def test_a_load_outlives_the_lease_it_came_with() -> None:
    cache = new_cache(1)
    space = open_space(cache)
    store(cache, space, "a")
    load = cache.begin_load([(space, 0, keys("a"))], lease(cache, space, "a", ttl=1), 0.5)
    assert isinstance(load, LoadGrant)
    cache.expire(2)
    assert refused(cache, space, "b")


@pytest.mark.parametrize("end", ["time", "expire", "owner"])
def test_a_load_with_a_lease_that_has_ended_is_refused(end: str) -> None:
    cache = new_cache(1)
    space = open_space(cache)
    store(cache, space, "a")
    held = lease(cache, space, "a", now=0, ttl=1)
    if end == "owner":
        cache.drop_owner("o")
    if end == "expire":
        cache.expire(1)
    assert cache.begin_load([(space, 0, keys("a"))], held, 1) is Refusal.STALE_LEASE
    assert cache.begin_load([(space, 0, keys("a"))], 77, 0) is Refusal.STALE_LEASE


def test_a_load_that_its_leases_release_has_overtaken_is_as_one_without_a_lease() -> None:
    cache = new_cache(1)
    space = open_space(cache)
    store(cache, space, "a")
    held = lease(cache, space, "a", now=0, ttl=1)
    assert cache.release(held)
    load = cache.begin_load([(space, 0, keys("a"))], held, 1)
    assert isinstance(load, LoadGrant)
    assert refused(cache, space, "b"), "it has no reference of its own"
    cache.end_load(load)
    store(cache, space, "b")
    assert cache.begin_load([(space, 0, keys("a"))], held, 1) is Refusal.NOT_FOUND


def test_a_load_of_which_one_block_is_missing_keeps_nothing() -> None:
    cache = new_cache(2)
    space = open_space(cache)
    store(cache, space, "a")
    assert cache.begin_load([(space, 0, keys("a")), (space, 0, keys("b"))], None, 0.0) is Refusal.NOT_FOUND
    assert cache.stats().leased_bytes == 0
    check_integrity(cache)


# -- wrong bytes --------------------------------------------------------------------------------------------------


def begin_load(cache: BlockCache, space: Space, *names: str) -> LoadGrant:
    load = cache.begin_load([(space, 0, keys(*names))], None, 0.0)
    assert isinstance(load, LoadGrant)
    return load


def test_a_corrupt_block_is_a_miss_and_its_slot_is_withdrawn_when_the_last_load_ends() -> None:
    cache = new_cache(2)
    space = open_space(cache)
    store(cache, space, "a", "b")
    bad, other = begin_load(cache, space, "b", "a"), begin_load(cache, space, "a")
    cache.mark_corrupt(bad, 0, 1)
    assert names_readable(cache, space, "a", "b") == ["b"]
    cache.end_load(bad)
    assert cache.stats().quarantined_bytes == 0
    check_integrity(cache)
    cache.end_load(other)
    stats = cache.stats()
    assert (stats.quarantined_bytes, stats.used_bytes, stats.free_bytes) == (PAGE, PAGE, 0)
    assert refused(cache, space, "x", "y")
    check_integrity(cache)


def test_a_corrupt_slot_is_not_used_again_and_its_block_can_be_stored_anew() -> None:
    cache = new_cache(2)
    space = open_space(cache)
    store(cache, space, "a")
    load = begin_load(cache, space, "a")
    lost = set(load.slots[0].tolist())
    cache.mark_corrupt(load, 0, 0)
    cache.end_load(load)
    again = begin(cache, space, keys("a"))
    assert lost.isdisjoint(slots_of(again))
    cache.seal_all(again)
    assert refused(cache, space, "b", "c")
    cache.clear()
    assert cache.stats().quarantined_bytes == PAGE
    check_integrity(cache)


def test_the_other_shards_of_a_corrupt_block_free_their_slots() -> None:
    cache = new_cache(2)
    space = open_space(cache, shards=(1, 1))
    store(cache, space, "a")
    load = begin_load(cache, space, "a")
    cache.mark_corrupt(load, 0, 0)
    cache.mark_corrupt(load, 0, 0)
    cache.end_load(load)
    assert (cache.stats().quarantined_bytes, cache.stats().free_bytes) == (PAGE, PAGE)
    with pytest.raises(AssertionError, match="already ended"):
        cache.mark_corrupt(load, 0, 0)
    check_integrity(cache)


def test_a_corrupt_hash_can_be_stored_anew_elsewhere() -> None:
    cache = new_cache(2)
    space = open_space(cache)
    store(cache, space, "a")
    load = begin_load(cache, space, "a")
    cache.mark_corrupt(load, 0, 0)
    store(cache, space, "a")
    assert begin_load(cache, space, "a").slots[0] != load.slots[0]
    cache.end_load(load)
    assert readable(cache, space, "a") == [True]
    check_integrity(cache)


# -- clear --------------------------------------------------------------------------------------------------------


def test_clear_frees_what_nobody_uses_and_says_how_many_blocks_were_readable() -> None:
    cache = new_cache(4)
    space = open_space(cache, shards=(1, 1))
    store(cache, space, "a")
    store(cache, space, "half", shard=0)
    assert cache.clear() == 1
    assert cache.stats().free_bytes == 4 * PAGE
    assert cache.stats().evicted_blocks == 0


def test_clear_of_one_namespace_leaves_the_others() -> None:
    cache = new_cache(4)
    one, group, two = open_space(cache, "one"), open_space(cache, "one", group=1), open_space(cache, "two")
    for space in (one, group, two):
        store(cache, space, "a")
    assert cache.clear(namespace("one")) == 2
    assert [readable(cache, space, "a") for space in (one, group, two)] == [[False], [False], [True]]


def test_a_leased_block_is_not_found_after_a_clear_and_its_slot_is_freed_with_the_lease() -> None:
    cache = new_cache(2)
    space = open_space(cache)
    store(cache, space, "a")
    held = lease(cache, space, "a")
    assert cache.clear() == 1
    assert readable(cache, space, "a") == [False]
    assert cache.begin_load([(space, 0, keys("a"))], held, 0) is Refusal.NOT_FOUND
    assert cache.stats().used_bytes == PAGE
    cache.release(held)
    assert cache.stats().free_bytes == 2 * PAGE


def test_a_running_load_keeps_its_slot_over_a_clear() -> None:
    cache = new_cache(1)
    space = open_space(cache)
    store(cache, space, "a")
    load = cache.begin_load([(space, 0, keys("a"))], None, 0.0)
    assert isinstance(load, LoadGrant)
    cache.clear()
    assert refused(cache, space, "b")
    cache.end_load(load)
    assert not refused(cache, space, "b")


def test_a_block_being_filled_during_a_clear_does_not_become_readable() -> None:
    cache = new_cache(1)
    space = open_space(cache)
    grant = begin(cache, space, keys("a"))
    assert cache.clear() == 0
    assert cache.seal_all(grant) == 0
    assert readable(cache, space, "a") == [False]
    assert cache.stats().free_bytes == PAGE


def test_a_cleared_hash_can_be_stored_anew_while_the_old_block_lives() -> None:
    cache = new_cache(3)
    space = open_space(cache, shards=(1,))
    store(cache, space, "a")
    held = lease(cache, space, "a")
    filling = begin(cache, space, keys("b"))
    cache.clear()
    again = begin(cache, space, keys("a"))
    cache.seal_all(again)
    assert readable(cache, space, "a") == [True]
    check_integrity(cache)
    cache.release(held)
    cache.abort_all(filling)
    assert readable(cache, space, "a") == [True]
    assert cache.stats().free_bytes == 2 * PAGE
    check_integrity(cache)


def test_a_clear_of_any_size_frees_a_bounded_part_at_once_and_the_rest_in_steps() -> None:
    cache = new_cache(6)
    space = open_space(cache)
    store(cache, space, *"abcdef")
    held = lease(cache, space, "f")
    assert cache.clear(sweep=2) == 6
    assert not any(readable(cache, space, *"abcdef"))
    free = [cache.stats().free_bytes // PAGE]
    while cache.sweep(2):
        free.append(cache.stats().free_bytes // PAGE)
        check_integrity(cache)
    assert free == [2, 4]
    assert cache.stats().free_bytes == 5 * PAGE
    cache.release(held)
    assert cache.stats().free_bytes == 6 * PAGE
    check_integrity(cache)


def test_a_store_finds_the_room_that_a_clear_has_not_given_back_yet() -> None:
    cache = new_cache(2)
    space = open_space(cache)
    store(cache, space, "a", "b")
    cache.clear(sweep=0)
    store(cache, space, "c", "d")
    assert cache.stats().evicted_blocks == 0
    assert not cache.sweep()
    check_integrity(cache)


def test_a_space_that_was_cleared_and_closed_gives_its_slots_back_later() -> None:
    cache = new_cache(2)
    space = open_space(cache)
    store(cache, space, "a", "b")
    cache.close_space(space)
    cache.clear(sweep=0)
    assert cache.spaces == []
    check_integrity(cache)
    assert not cache.sweep()
    assert cache.stats().free_bytes == 2 * PAGE
    check_integrity(cache)


# -- gauges -------------------------------------------------------------------------------------------------------


def test_gauges_say_where_every_byte_is() -> None:
    cache = new_cache(8, 4)
    space = open_space(cache, shards=(1,))
    store(cache, space, "a", "b")
    lease(cache, space, "a")
    begin(cache, space, keys("c"))
    store(cache, space, "d")
    load = begin_load(cache, space, "d")
    cache.mark_corrupt(load, 0, 0)
    cache.end_load(load)
    large = open_space(cache, "large", shards=(3,))
    store(cache, large, "a")
    stats = cache.stats()
    assert stats.used_bytes == 5 * PAGE
    assert (stats.reserved_bytes, stats.quarantined_bytes, stats.wasted_bytes) == (PAGE, PAGE, 0)
    assert (stats.leased_bytes, stats.evictable_bytes, stats.free_bytes) == (PAGE, 4 * PAGE, PAGE)
    assert (stats.blocks, stats.readable_blocks, stats.leases) == (4, 3, 1)
    check_integrity(cache)
