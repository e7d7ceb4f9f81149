"""What a lookup misses is fetched from a slower tier, or not, and why."""

from __future__ import annotations

from typing import cast

import pytest

from kvsidecar.cache.block import Space, StoreGrant
from kvsidecar.core.fetches import ABSENT_SECONDS, INTEREST_SECONDS, NOTHING, Coming, Fetches, shard_space
from kvsidecar.tiers.policy import FetchRefusal
from kvsidecar.tiers.tier import Tier
from tests.cache.support import PAGE, keys, new_cache, open_space, readable, store
from tests.core.scripted_tier import ScriptedTier

BIT = 1


class Bench:
    """A pool of 8 pages, and a tier that reads two blocks a call."""

    def __init__(self, shards: tuple[int, ...] = (1,)) -> None:
        self.now = 0.0
        self.cache = new_cache(8)
        self.space = open_space(self.cache, shards=shards)
        self.tier = ScriptedTier(dict.fromkeys(range(0, 8 * PAGE, PAGE), "nothing"))
        self.refused: list[tuple[FetchRefusal, int]] = []
        self.fetches = Fetches(
            self.cache,
            cast(Tier, self.tier),
            BIT,
            lambda: self.now,
            lambda reason, blocks: self.refused.append((reason, blocks)),
            chunk_bytes=2 * PAGE,
        )

    def keep(self, *names: int, space: Space | None = None) -> None:
        space = space or self.space
        for name in names:
            for shard in range(space.num_shards):
                self.tier.kept[shard_space(space, shard), keys(name)[0]] = (name, shard)

    def ask(self, *names: int, hits: int = 0, seconds: float = 10.0, rate: float = 0.0) -> Coming:
        return self.fetches.coming(self.space, keys(*names), hits, seconds, rate)

    def find(self) -> None:
        self.tier.end_find(self.tier.finds[0])

    def read(self) -> None:
        while self.tier.reads:
            self.tier.end_read(self.tier.reads[0])


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize("shards", [(1,), (1, 1)])
def test_a_prefix_that_the_tier_has_is_told_to_come_and_comes(shards: tuple[int, ...]) -> None:
    bench = Bench(shards)
    bench.keep(1, 2, 3)
    assert bench.ask(1, 2, 3, 4) == Coming(0, asking=True)
    bench.find()
    assert bench.ask(1, 2, 3, 4) == Coming(3)
    assert bench.ask(1, 2, 3, 4, hits=1) == Coming(2), "of those that follow the hits"
    bench.read()
    assert readable(bench.cache, bench.space, 1, 2, 3, 4) == [True, True, True, False]
    assert bench.ask(1, 2, 3, 4, hits=3) == NOTHING, "the tier has said that it does not have the fourth"
    assert not bench.refused


def test_a_block_is_readable_when_all_of_its_shards_are_there() -> None:
    bench = Bench((1, 1))
    bench.keep(1)
    bench.ask(1)
    bench.find()
    first, second = bench.tier.reads
    bench.tier.end_read(second)
    assert readable(bench.cache, bench.space, 1) == [False]
    bench.tier.end_read(first)
    assert readable(bench.cache, bench.space, 1) == [True]


def test_what_it_does_not_have_is_asked_for_again_only_after_a_while(bench: Bench) -> None:
    bench.ask(1)
    bench.find()
    assert bench.ask(1) == NOTHING
    assert not bench.tier.finds
    bench.now += ABSENT_SECONDS + 1
    assert bench.ask(1).asking


def test_what_is_slower_than_to_compute_it_is_not_fetched(bench: Bench) -> None:
    bench.keep(1)
    bench.tier.read_rate = PAGE / 2.0  # two seconds a block of 16 tokens
    bench.ask(1, rate=16 / 1.9)
    bench.find()
    assert bench.refused == [(FetchRefusal.SLOWER, 1)]
    bench.now += ABSENT_SECONDS + 1
    bench.ask(1, rate=16 / 2.1)
    bench.find()
    assert bench.tier.reads


def test_what_takes_longer_than_the_engine_waits_is_not_fetched(bench: Bench) -> None:
    bench.keep(1)
    bench.tier.read_rate = PAGE / 2.0
    bench.ask(1, seconds=1.9, rate=0.001)
    bench.find()
    assert bench.refused == [(FetchRefusal.SLOWER, 1)]
    assert not bench.tier.reads


def test_a_fetch_for_which_nobody_asks_any_more_is_given_up() -> None:
    bench = Bench()
    bench.fetches._chunk_bytes = PAGE
    bench.keep(*range(8))
    other = open_space(bench.cache, "other")
    bench.keep(*range(8), space=other)
    bench.ask(*range(8))
    bench.find()
    assert len(bench.tier.reads) == 8
    bench.fetches.coming(other, keys(*range(8)), 0, 10.0)
    bench.find()
    assert len(bench.tier.reads) == 8, "as many as are read at a time"
    bench.now += INTEREST_SECONDS + 0.1
    bench.tier.end_read(bench.tier.reads[0])
    assert bench.refused == [(FetchRefusal.ABANDONED, 8)]
    bench.read()
    assert all(readable(bench.cache, bench.space, *range(8)))


def test_namespaces_take_turns(bench: Bench) -> None:
    other = open_space(bench.cache, "other")
    bench.fetches._chunk_bytes = PAGE
    bench.tier.off = ""
    bench.keep(*range(4))
    bench.keep(*range(4), space=other)
    blocked = bench.fetches.reading_bytes = 8 * PAGE
    bench.ask(*range(4))
    bench.fetches.coming(other, keys(*range(4)), 0, 10.0)
    bench.find()
    bench.find()
    assert not bench.tier.reads
    bench.fetches.reading_bytes -= blocked
    bench.fetches._read_more()
    spaces = [call.space.namespace.model for call in bench.tier.reads]
    assert spaces == ["model", "other"] * 4


def test_a_block_that_was_stored_meanwhile_is_not_read(bench: Bench) -> None:
    bench.keep(1, 2)
    bench.ask(1, 2)
    store(bench.cache, bench.space, 1)
    bench.find()
    assert [call.hashes for call in bench.tier.reads] == [keys(2)]
    bench.read()
    assert readable(bench.cache, bench.space, 1, 2) == [True, True]


def test_a_pool_without_room_fetches_nothing(bench: Bench) -> None:
    bench.keep(1)
    grant = bench.cache.begin_store([(bench.space, 0, keys(*range(10, 18)))])
    assert isinstance(grant, StoreGrant)
    bench.ask(1)
    bench.find()
    assert bench.refused == [(FetchRefusal.POOL_FULL, 1)]


def test_a_read_that_fails_gives_its_slots_back_and_is_a_miss(bench: Bench) -> None:
    bench.keep(1, 2)
    bench.ask(1, 2)
    bench.find()
    bench.tier.end_read(bench.tier.reads[0], ok=False)
    assert bench.refused == [(FetchRefusal.FAILED, 1)]
    assert bench.cache.stats().free_bytes == 8 * PAGE
    assert bench.ask(1, 2) == NOTHING


def test_a_late_read_is_a_miss_at_once_and_keeps_its_slot_until_it_returns(bench: Bench) -> None:
    bench.keep(1)
    bench.ask(1)
    bench.find()
    bench.tier.late(bench.tier.reads[0])
    assert bench.refused == [(FetchRefusal.LATE, 1)]
    assert bench.ask(1) == NOTHING
    assert bench.cache.stats().reserved_bytes == PAGE
    bench.read()
    assert readable(bench.cache, bench.space, 1) == [True], "it is there after all"


def test_a_tier_that_is_off_is_not_asked(bench: Bench) -> None:
    bench.tier.off = "out of order"
    assert bench.ask(1) == NOTHING
    assert bench.refused == [(FetchRefusal.OFF, 1)]


def test_what_is_cleared_is_not_fetched_any_more(bench: Bench) -> None:
    bench.keep(1)
    bench.ask(1)
    bench.fetches.forget(bench.space.namespace)
    bench.find()
    assert not bench.tier.reads
    assert not bench.fetches.waiting_blocks
