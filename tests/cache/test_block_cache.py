from __future__ import annotations

import pytest

from kvsidecar.cache import block_cache, room
from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.grants import LEAST_ROOM, LoadGrant, StoreGrant
from kvsidecar.cache.reader import PROBE
from kvsidecar.cache.slots import SlotAllocator
from kvsidecar.cache.space_blocks import Space
from kvsidecar.errors import Refusal
from kvsidecar.types import LookupMode
from tests.cache.integrity import check_integrity
from tests.cache.support import (
    PAGE,
    begin,
    find,
    instructions_of,
    key,
    keys,
    lease,
    limits,
    names_readable,
    namespace,
    new_cache,
    one_space,
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
    cache, space = one_space(4)
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
    cache, space = one_space(2 * PROBE, slab=PROBE // 2)
    store(cache, space, *range(2 * PROBE))
    for below in (PROBE // 2, PROBE, PROBE + PROBE // 2):
        cache.reader.below = below * PAGE
        found = cache.lookup(space, keys(*range(2 * PROBE)), LookupMode.PREFIX)
        assert found == [number < below for number in range(2 * PROBE)]


# -- a place for a self-test --------------------------------------------------------------------------------------


def test_a_place_is_free_memory_while_there_is_any() -> None:
    cache, space = one_space(6, slab=2)
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
    cache, space = one_space(2)
    store(cache, space, "a", "b")
    cache.clear(namespace(), sweep=0)
    assert cache.find_place(2 * PAGE) == (0, 2 * PAGE)
    assert cache.stats().evicted_blocks == 0


def test_there_is_no_place_if_every_block_is_in_use() -> None:
    cache, space = one_space(2)
    store(cache, space, "a", "b")
    held = lease(cache, space, "a", "b")
    assert cache.find_place(2 * PAGE) is None
    cache.release(held)
    assert cache.find_place(2 * PAGE) is not None


def test_a_place_does_not_reach_beyond_the_offset() -> None:
    """There, memory may not be pinned."""
    cache = new_cache(4)
    space = open_space(cache, shards=(2,))
    store(cache, space, "a", "b")
    lease(cache, space, "a")
    cache.clear_blocks(space, keys("b"))
    assert cache.find_place(3 * PAGE) is None
    assert cache.find_place(4 * PAGE) == (2 * PAGE, 2 * PAGE)


# -- store --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("distinct", [2, 3, 20])
def test_hashes_of_one_request_that_share_a_tag_are_all_stored(distinct: int) -> None:
    """About one job of 512 blocks in 16,000 has such a pair; a block that is left out is a miss for no reason."""
    cache, space = one_space(64)
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


def test_a_store_of_hashes_that_share_a_tag_takes_steps_in_proportion_to_them() -> None:
    def steps(count: int) -> int:
        cache, space = one_space(2048)
        space.blocks.index._multipliers[:] = 0
        return instructions_of(lambda: cache.seal_all(begin(cache, space, keys(*range(count), *range(count)))))

    assert steps(1000) < 5 * steps(250)


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


def test_of_the_blocks_of_an_engine_that_dies_some_are_let_go_of_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once, 800,000 leased blocks stopped the daemon for 50 ms."""
    monkeypatch.setattr(block_cache, "LET_GO", 4)
    monkeypatch.setattr(block_cache, "CHAIN", 1)
    cache, space = one_space(30)
    store(cache, space, *range(30))
    for first in (0, 9):
        lease(cache, space, *range(first, first + 9), owner="dead")
    loading = cache.begin_load([(space, 0, keys(*range(20, 29)))], None, 0)
    assert isinstance(loading, LoadGrant)
    cache.end_load(loading)
    cache.drop_owner("dead")
    busy = [int((space.blocks.refs > 0).sum())]
    while cache.sweep():
        check_integrity(cache)
        busy.append(int((space.blocks.refs > 0).sum()))
    assert busy == [23, 19, 15, 11, 7, 3, 0]
    assert cache.held("dead") == (0, 0)


def test_a_store_finds_the_room_that_a_dead_engine_has_not_let_go_of_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_cache, "LET_GO", 4)
    monkeypatch.setattr(block_cache, "CHAIN", 1)
    cache, space = one_space(12)
    store(cache, space, *range(12))
    lease(cache, space, *range(12), owner="dead")
    cache.drop_owner("dead")
    store(cache, space, *"abcdef")
    assert int((space.blocks.refs > 0).sum()) == 4, "it waited for more than it needed"
    check_integrity(cache)


def test_a_lease_finds_the_room_of_a_guarantee_that_a_dead_engine_has_not_let_go_of_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(block_cache, "LET_GO", 2)
    monkeypatch.setattr(block_cache, "CHAIN", 1)
    cache = new_cache(12)
    cache.set_shares(limits(a=(6, None)))
    space = open_space(cache, "b")
    store(cache, space, *range(5))
    store(cache, space, *range(5, 10))
    lease(cache, space, *range(6), owner="dead")
    assert cache.lookup_and_lease([(space, keys(8, 9))], LookupMode.BITMAP, 0, 10, "o")[0] is None
    cache.drop_owner("dead")
    lease(cache, space, 8, 9)
    loading = cache.begin_load([(space, 0, keys(6, 7))], None, 0)
    assert isinstance(loading, LoadGrant)
    check_integrity(cache)


def test_hits_are_not_added_to_the_lease_of_another_owner() -> None:
    cache = new_cache(2)
    space = open_space(cache)
    store(cache, space, "a", "b")
    lease(cache, space, "a", owner="them")  # its id is 0, which names no lease
    theirs = lease(cache, space, "a", owner="them")
    mine, _ = cache.lookup_and_lease([(space, keys("b"))], LookupMode.PREFIX, 0, 10, "me", theirs)
    assert mine is not None
    assert mine.id != theirs
    assert (cache.held("them"), cache.held("me")) == ((2, 2 * LEAST_ROOM), (1, LEAST_ROOM))
    cache.drop_owner("them")
    assert cache.lease(mine.id, 0) is mine
    check_integrity(cache)


def test_lease_ids_come_from_the_given_source() -> None:
    cache = BlockCache(SlotAllocator(PAGE, PAGE), next_id=iter([99]).__next__)
    space = open_space(cache)
    store(cache, space, "a")
    assert lease(cache, space, "a") == 99


# -- load ---------------------------------------------------------------------------------------------------------


# -- wrong bytes --------------------------------------------------------------------------------------------------


def begin_load(cache: BlockCache, space: Space, *names: str) -> LoadGrant:
    load = cache.begin_load([(space, 0, keys(*names))], None, 0.0)
    assert isinstance(load, LoadGrant)
    return load


def test_a_corrupt_block_is_a_miss_and_its_slot_is_withdrawn_when_the_last_load_ends() -> None:
    cache, space = one_space(2)
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


def test_a_refused_store_of_all_shards_of_its_blocks_leaves_nothing_of_them() -> None:
    cache = new_cache(3)
    space = open_space(cache, shards=(1, 1))
    names = keys(*range(20))
    assert cache.begin_store([(space, shard, names) for shard in (0, 1)]) is Refusal.POOL_FULL
    check_integrity(cache)
    assert [find(space, name) for name in names] == [None] * len(names)
    store(cache, space, "a")
    assert names_readable(cache, space, "a") == ["a"]


def test_the_other_shards_of_a_corrupt_block_free_their_slots() -> None:
    cache, space = one_space(2, shards=(1, 1))
    store(cache, space, "a")
    load = begin_load(cache, space, "a")
    cache.mark_corrupt(load, 0, 0)
    cache.mark_corrupt(load, 0, 0)
    cache.end_load(load)
    assert (cache.stats().quarantined_bytes, cache.stats().free_bytes) == (PAGE, PAGE)
    for end in (cache.end_load, lambda load: cache.mark_corrupt(load, 0, 0)):
        with pytest.raises(AssertionError, match="already ended"):
            end(load)
    check_integrity(cache)


# -- clear --------------------------------------------------------------------------------------------------------


def test_a_clear_of_any_size_frees_a_bounded_part_at_once_and_the_rest_in_steps() -> None:
    cache, space = one_space(6)
    store(cache, space, *"abcdef")
    held = lease(cache, space, "f")
    assert cache.clear(sweep=2) == 6
    assert not any(readable(cache, space, *"abcdef"))
    free = [cache.stats().free_bytes // PAGE]
    while cache.sweep(2):
        free.append(cache.stats().free_bytes // PAGE)
        check_integrity(cache)
    assert free == [2, 4, 5]
    assert cache.stats().evicted_blocks == 0
    assert cache.stats().free_bytes == 5 * PAGE
    cache.release(held)
    assert cache.stats().free_bytes == 6 * PAGE
    check_integrity(cache)


def test_a_store_finds_the_room_that_a_clear_has_not_given_back_yet() -> None:
    cache, space = one_space(2)
    store(cache, space, "a", "b")
    cache.clear(sweep=0)
    store(cache, space, "c", "d")
    assert cache.stats().evicted_blocks == 0
    assert not cache.sweep()
    check_integrity(cache)


def test_a_space_that_was_cleared_and_closed_gives_its_slots_back_later() -> None:
    cache, space = one_space(2)
    store(cache, space, "a", "b")
    cache.close_space(space)
    cache.clear(sweep=0)
    assert cache.spaces == []
    check_integrity(cache)
    assert cache.sweep()
    assert not cache.sweep()
    assert cache.stats().free_bytes == 2 * PAGE
    check_integrity(cache)


# -- gauges -------------------------------------------------------------------------------------------------------


def test_gauges_say_where_every_byte_is() -> None:
    cache, space = one_space(8, 4, shards=(1,))
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


def test_a_store_frees_no_more_of_what_was_cleared_than_it_needs_and_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store of large blocks swept the whole pool in one step, if one small block in use lay in each place."""
    monkeypatch.setattr(room, "PIECE", 1)
    cache = new_cache(200, 10)
    small, large = open_space(cache), open_space(cache, "large", shards=(10,))
    store(cache, small, *range(200))
    for first in range(0, 200, 10):
        lease(cache, small, first)
    cache.clear(namespace(), sweep=0)
    assert refused(cache, large, "x")
    assert cache.stats().free_bytes == (room.SWEEPS - 2) * PAGE, "one in ten is in use"
    check_integrity(cache)
