"""Blocks expire: a time after their store or their last use. Then they are misses, and go before others."""

from __future__ import annotations

from collections import Counter
from math import inf

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvsidecar.cache import expiry
from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.grants import LoadGrant, StoreGrant
from kvsidecar.cache.records import Records, num_words
from kvsidecar.cache.shares import ShareLimits
from kvsidecar.cache.slots import SlotAllocator
from kvsidecar.cache.space_blocks import Space
from kvsidecar.errors import Refusal
from kvsidecar.types import MAX_IDLE_SECONDS, LookupMode
from tests.cache.integrity import check_integrity
from tests.cache.support import PAGE, keys, lease, names_readable, new_cache, one_space, open_space, readable, store
from tests.marks import examples


def store_for(cache: BlockCache, space: Space, seconds: float, *names: int | str, idle: float = 0.0) -> None:
    grant = cache.begin_store([(space, 0, keys(*names))], ttl=seconds, idle_ttl=idle)
    assert isinstance(grant, StoreGrant), grant
    cache.seal_all(grant)


def limits(ttl: float | None = None, idle_ttl: float | None = None) -> list[ShareLimits]:
    return [ShareLimits("m", lambda _: True, ttl=ttl, idle_ttl=idle_ttl)]


def sweep(cache: BlockCache) -> None:
    while cache.sweep():
        check_integrity(cache)


def test_a_block_that_nobody_uses_expires_and_one_in_use_does_not() -> None:
    cache = new_cache(8)
    cache.set_shares(limits(idle_ttl=64))
    space = open_space(cache)
    cache.expire(0.0)
    store(cache, space, "idle", "used", "held")
    held = lease(cache, space, "held", ttl=1000.0)
    for now in range(1, 64):
        cache.expire(float(now))
        cache.release(lease(cache, space, "used", now=now, ttl=10.0))
    cache.expire(66.0)
    assert names_readable(cache, space, "idle", "used", "held") == ["used", "held"]
    cache.set_shares(limits(idle_ttl=64))
    assert names_readable(cache, space, "idle", "used", "held") == ["used", "held"], "after a reload"
    sweep(cache)
    assert cache.stats().blocks == 2
    cache.release(held)
    cache.expire(67.0)
    cache.expire(200.0)
    assert names_readable(cache, space, "used", "held") == []
    sweep(cache)
    assert cache.stats().blocks == 0


def test_of_the_times_of_share_and_request_the_shorter_counts() -> None:
    cache = new_cache(8)
    cache.set_shares(limits(idle_ttl=32))
    space = open_space(cache)
    cache.expire(0.0)
    store_for(cache, space, 0, "shorter", idle=8)
    store_for(cache, space, 0, "longer", idle=200)
    for now in range(1, 13):
        cache.expire(float(now))
    assert names_readable(cache, space, "shorter", "longer") == ["longer"]
    for now in range(13, 36):
        cache.expire(float(now))
    assert names_readable(cache, space, "shorter", "longer") == []


def test_a_table_is_looked_through_no_more_when_nothing_in_it_expires() -> None:
    cache, space = one_space(8)
    cache.expire(0.0)
    store_for(cache, space, 0, "a", idle=4)
    store_for(cache, space, 0, "b", idle=16)
    store(cache, space, "for ever")
    for now in range(1, 24):
        cache.expire(float(now))
        sweep(cache)
    assert cache.stats().blocks == 1
    assert space.blocks.next_expiry == 0


def test_a_time_without_a_use_that_no_record_could_hold_is_the_longest_one() -> None:
    cache, space = one_space(8)
    cache.expire(0.0)
    store_for(cache, space, 0, "a", idle=1e12)
    assert space.blocks.idle.max() == MAX_IDLE_SECONDS


def test_an_expired_block_is_stored_again_also_while_a_lease_holds_the_old_one() -> None:
    cache, space = one_space(8)
    cache.expire(0.0)
    store_for(cache, space, 5, "a", "b")
    held = lease(cache, space, "a", ttl=100.0)
    loading = cache.begin_load([(space, 0, keys("a"))], held, 0.0)
    assert isinstance(loading, LoadGrant)
    cache.expire(6.0)
    again = cache.begin_load([(space, 0, keys("a"))], held, 6.0)
    assert isinstance(again, LoadGrant), "what a lease holds can be loaded"
    assert readable(cache, space, "a", "b") == [False, False]
    grant = cache.begin_store([(space, 0, keys("a", "b"))])
    assert isinstance(grant, StoreGrant)
    assert grant.reserved == 2
    cache.seal_all(grant)
    check_integrity(cache)
    assert readable(cache, space, "a", "b") == [True, True]
    for each in (loading, again):
        cache.end_load(each)
    cache.release(held)
    check_integrity(cache)
    assert cache.stats().blocks == 2


def leased_and_stored_again() -> tuple[BlockCache, Space, int, list[int]]:
    """Two leased blocks expired, were stored again, and expired again, without a lease."""
    cache, space = one_space(8)
    cache.expire(0.0)
    store_for(cache, space, 5, "a", "b")
    held = lease(cache, space, "a", "b", ttl=100.0)
    old = space.blocks.slots[0, space.blocks.index.find(space.blocks.index.keys(keys("a", "b")))].tolist()
    cache.expire(6.0)
    store_for(cache, space, 5, "a", "b")
    cache.expire(12.0)
    return cache, space, held, old


@pytest.mark.parametrize("swept", [False, True])
def test_a_lease_holds_a_block_whose_second_copy_has_expired_too(swept: bool) -> None:
    cache, space, held, old = leased_and_stored_again()
    if swept:
        sweep(cache)
    loading = cache.begin_load([(space, 0, keys("b", "a", "b"))], held, 12.0)
    assert isinstance(loading, LoadGrant), "what a lease holds can be loaded"
    assert loading.slots[0].tolist() == [old[1], old[0], old[1]]
    assert cache.begin_load([(space, 0, keys("a"))], None, 12.0) is Refusal.NOT_FOUND, "no lease was named"
    assert cache.begin_load([(space, 0, keys("a", "c"))], held, 12.0) is Refusal.NOT_FOUND
    cache.end_load(loading)
    cache.release(held)
    sweep(cache)
    check_integrity(cache)
    assert cache.stats().blocks == 0


@pytest.mark.parametrize("end", ["corrupt", "forgotten", "cleared", "cleared by hash"])
def test_a_lease_does_not_bring_back_what_must_not_be_loaded(end: str) -> None:
    cache, space, held, _ = leased_and_stored_again()
    loading = cache.begin_load([(space, 0, keys("a"))], held, 12.0)
    assert isinstance(loading, LoadGrant)
    if end == "corrupt":
        cache.mark_corrupt(loading, 0, 0)
    elif end == "forgotten":
        cache.forget(loading, 0, 0)
    elif end == "cleared":
        cache.clear()
    else:
        cache.clear_blocks(space, keys("a"))
        for _ in cache.clear_old(space, keys("a")):
            check_integrity(cache)
    cache.end_load(loading)
    assert cache.begin_load([(space, 0, keys("a"))], held, 12.0) is Refusal.NOT_FOUND
    check_integrity(cache)


def test_expired_blocks_go_before_older_ones() -> None:
    cache, space = one_space(4)
    cache.expire(0.0)
    store(cache, space, "old")
    store_for(cache, space, 5, "young")
    store(cache, space, "x", "y")
    cache.expire(5.0)
    store(cache, space, "z")
    assert names_readable(cache, space, "old", "young", "x", "y", "z") == ["old", "x", "y", "z"]


def test_expired_blocks_go_before_others_of_a_share_that_is_at_its_maximum() -> None:
    cache = new_cache(4)
    cache.set_shares([ShareLimits("m", lambda _: True, most=3 * PAGE)])
    space = open_space(cache)
    cache.expire(0.0)
    store(cache, space, "old")
    store_for(cache, space, 5, "young")
    store(cache, space, "x")
    cache.expire(5.0)
    store(cache, space, "y")
    assert names_readable(cache, space, "old", "young", "x", "y") == ["old", "x", "y"]
    store_for(cache, space, 5, "z")
    cache.expire(10.0)
    store(cache, space, "u", "v")  # the pool is full, too
    assert names_readable(cache, space, "x", "y", "z", "u", "v") == ["y", "u", "v"]
    check_integrity(cache)


def test_what_is_stored_while_its_table_is_looked_through_expires_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expiry, "SCAN", 1)
    cache, space = one_space(8)
    cache.expire(0.0)
    store_for(cache, space, 2, "a", "b", "c")
    cache.expire(2.0)
    cache.sweep()
    store_for(cache, space, 5, "x")  # into the row that has just been looked at
    sweep(cache)
    assert names_readable(cache, space, "a", "b", "c", "x") == ["x"]
    cache.expire(7.0)
    assert names_readable(cache, space, "x") == []
    sweep(cache)
    assert cache.stats().blocks == 0


def test_a_block_that_expires_is_not_given_to_a_slower_tier() -> None:
    cache, space = one_space(4)
    store_for(cache, space, 5, "a")
    store(cache, space, "b")
    assert len(cache.tiers.unwritten(cache.chain(space, keys("a", "b")), 1)) == 1
    store_for(cache, space, 0, "c", idle=5)
    assert len(cache.tiers.unwritten(cache.chain(space, keys("a", "b", "c")), 1)) == 1
    cache.set_shares(limits(idle_ttl=5))
    assert len(cache.tiers.unwritten(cache.chain(space, keys("a", "b")), 1)) == 0


def test_times_outlive_the_daemon() -> None:
    words = np.zeros(num_words(4 * PAGE, 4 * PAGE), np.uint64)

    def start() -> tuple[BlockCache, Space]:
        records = Records(words, 4 * PAGE, 4 * PAGE)
        cache = BlockCache(SlotAllocator(4 * PAGE, 4 * PAGE), records=records)
        return cache, open_space(cache)

    cache, space = start()
    cache.expire(100.0)
    store_for(cache, space, 50, "a")
    store_for(cache, space, 500, "b", "c")
    store(cache, space, "d")
    cache, space = start()
    cache.expire(140.0)
    assert names_readable(cache, space, "a", "b", "c", "d") == ["a", "b", "c", "d"]
    cache.expire(150.0)
    assert names_readable(cache, space, "a", "b", "c", "d") == ["b", "c", "d"]
    sweep(cache)
    assert cache.stats().blocks == 3
    cache, space = start()
    cache.expire(600.0)
    assert names_readable(cache, space, "b", "c", "d") == ["d"]


@pytest.mark.parametrize("count", [1, 20])
def test_times_without_a_use_outlive_the_daemon_and_begin_again(count: int) -> None:
    pages = 2 * count + 2
    words = np.zeros(num_words(pages * PAGE, pages * PAGE), np.uint64)

    def start() -> tuple[BlockCache, Space]:
        records = Records(words, pages * PAGE, pages * PAGE)
        cache = BlockCache(SlotAllocator(pages * PAGE, pages * PAGE), records=records)
        assert not cache.adopted.dropped
        return cache, open_space(cache)

    many = range(count)
    cache, space = start()
    cache.expire(100.0)
    store_for(cache, space, 0, *many, idle=50)
    store_for(cache, space, 0, "longest", idle=MAX_IDLE_SECONDS)
    store(cache, space, "for ever")
    cache, space = start()
    cache.expire(4000.0)  # long after
    assert readable(cache, space, *many) == [True] * count
    for now in range(4001, 4050):
        cache.expire(float(now))
        sweep(cache)
        cache.release(lease(cache, space, 0, now=now, ttl=10.0))
    assert readable(cache, space, *many) == [True] * count, "the restart counts as a use"
    cache.expire(4052.0)
    assert names_readable(cache, space, *many, "longest", "for ever") == [0, "longest", "for ever"]
    sweep(cache)
    assert cache.stats().blocks == 3
    assert space.blocks.idle.max() == MAX_IDLE_SECONDS


names = st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True)


class ExpiryMachine(RuleBasedStateMachine):
    """Any stores, uses and times; a model knows what has expired. Tables are looked through a row or two at a time."""

    @initialize(ttl=st.sampled_from([None, 4.0, 9.0]), scan=st.sampled_from([1, 2, 100]))
    def start(self, ttl: float | None, scan: int) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(expiry, "SCAN", scan)
        self.patch.setattr(expiry, "SCAN_IDLE", scan)
        self.patch.setattr("kvsidecar.cache.space_blocks.SPARSE", 1)
        self.patch.setattr("kvsidecar.cache.space_blocks.FIRST_ROWS", 1)
        self.cache = new_cache(200)  # also for blocks that leases keep: nothing is evicted to make room
        self.cache.set_shares(limits(ttl=ttl))
        self.ttl = ttl
        self.space = open_space(self.cache)
        self.until: dict[int, float] = {}
        self.idle: dict[int, float] = {}
        self.used: dict[int, float] = {}
        """The time that was set after the last use; infinity before that."""
        self.born: Counter[int] = Counter()
        self.leases: list[tuple[int, int, int]] = []
        self.now = 0.0

    def teardown(self) -> None:
        if hasattr(self, "patch"):
            self.patch.undo()

    def lives(self, name: int) -> bool:
        held = (name, self.born[name]) in [(leased, born) for _, leased, born in self.leases]
        idle = not held and self.used.get(name, 0) + self.idle.get(name, 0) <= self.now
        return name in self.until and self.until[name] > self.now and not idle

    @rule(
        names=names,
        ttl=st.sampled_from([0.0, 0.0, 2.0, 5.0, 20.0]),
        idle=st.sampled_from([0.0, 0.0, 1.0, 3.0, 10.0]),
    )
    def store(self, names: list[int], ttl: float, idle: float) -> None:
        grant = self.cache.begin_store([(self.space, 0, keys(*names))], ttl=ttl, idle_ttl=idle)
        assert isinstance(grant, StoreGrant)
        assert grant.present == sum(map(self.lives, names))
        self.cache.seal_all(grant)
        times = [each for each in (ttl, self.ttl) if each]
        for name in names:
            if not self.lives(name):
                self.until[name] = self.now + min(times, default=1e9)
                self.idle[name] = idle or 1e9
                self.born[name] += 1
            self.used[name] = inf

    @rule(seconds=st.sampled_from([1.0, 1.0, 3.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.cache.expire(self.now)
        self.used = {name: min(used, self.now) for name, used in self.used.items()}

    @rule(name=st.integers(0, 5))
    def lease(self, name: int) -> None:
        granted, _ = self.cache.lookup_and_lease([(self.space, keys(name))], LookupMode.PREFIX, self.now, 1e9, "o")
        assert (granted is not None) == self.lives(name)
        if granted is not None:
            self.leases.append((granted.id, name, self.born[name]))

    @precondition(lambda self: self.leases)
    @rule()
    def release(self) -> None:
        number, name, born = self.leases.pop()
        self.cache.release(number)
        if born == self.born[name]:
            self.used[name] = inf

    @rule(count=st.integers(1, 3))
    def sweep(self, count: int) -> None:
        for _ in range(count):
            self.cache.sweep(2)

    @rule()
    def sweep_all(self) -> None:
        for _ in range(100):
            if not self.cache.sweep(2):
                break
        else:
            raise AssertionError("the sweep does not end")
        if not self.leases:
            self.pass_time(1.0)
            while self.cache.sweep(2):
                pass
            assert self.cache.stats().blocks == sum(map(self.lives, range(6))), "an expired block is still there"

    @invariant()
    def the_living_are_readable(self) -> None:
        if hasattr(self, "cache"):
            check_integrity(self.cache)
            assert readable(self.cache, self.space, *range(6)) == [self.lives(name) for name in range(6)]


ExpiryMachine.TestCase.settings = settings(max_examples=examples(200), stateful_step_count=40, deadline=None)
TestExpiry = pytest.mark.no_cover(ExpiryMachine.TestCase)


def test_a_step_evicts_no_more_than_it_may_of_what_has_expired() -> None:
    cache, space = one_space(40)
    cache.expire(0.0)
    store(cache, space, "stays")
    store_for(cache, space, 5, *range(30))
    held = lease(cache, space, 7, ttl=100.0)
    cache.expire(5.0)
    left = []
    while cache.sweep(4):
        check_integrity(cache)
        left.append(cache.stats().blocks)
    assert left == [27, 23, 19, 15, 11, 7, 3, 2]
    cache.release(held)
    cache.expire(7.0)
    sweep(cache)
    assert cache.stats().blocks == 1
