"""What a lookup misses is fetched from a slower tier, or not, and why."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import pytest

from kvsidecar.cache.grants import StoreGrant
from kvsidecar.cache.space_blocks import Space
from kvsidecar.core import tier_fetches
from kvsidecar.core.tier_fetches import (
    ABSENT_SECONDS,
    INTEREST_SECONDS,
    NOT_HELD,
    NOTHING,
    TRIAL_SECONDS,
    ExpectedHits,
    Fetches,
    FetchGain,
    TierHits,
    shard_space,
)
from kvsidecar.core.zeroing import Zeroing
from kvsidecar.tiers.policy import FetchRefusal
from kvsidecar.tiers.tier import Tier
from tests.cache.support import PAGE, keys, new_cache, open_space, readable, store
from tests.core.scripted_tier import ScriptedTier
from tests.harness import fail_once

BIT = 1


class Bench:
    """A pool of 8 pages, and a tier that reads two blocks a call."""

    def __init__(self, shards: tuple[int, ...] = (1,), zeroing: object = None) -> None:
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
            zeroing=cast("Zeroing | None", zeroing),
        )

    def keep(self, *names: int, space: Space | None = None) -> None:
        space = space or self.space
        for name in names:
            for shard in range(space.num_shards):
                self.tier.kept[shard_space(space, shard), keys(name)[0]] = (name, shard)

    def ask(self, *names: int, hits: int = 0, seconds: float = 10.0, rate: float = 0.0) -> ExpectedHits:
        if not self.fetches.may_come(self.space, keys(*names)[hits]):
            self.fetches.count()
            return NOTHING
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
    assert bench.ask(1, 2, 3, 4) == ExpectedHits(0, asking=True)
    bench.find()
    assert bench.ask(1, 2, 3, 4) == ExpectedHits(3)
    assert bench.ask(1, 2, 3, 4, hits=1) == ExpectedHits(2), "of those that follow the hits"
    bench.read()
    assert readable(bench.cache, bench.space, 1, 2, 3, 4) == [True, True, True, False]
    assert bench.ask(1, 2, 3, 4, hits=3) == NOTHING, "the tier has said that it does not have the fourth"
    assert not bench.refused


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


def test_a_little_is_read_when_nothing_has_shown_for_long_how_fast_the_tier_is(bench: Bench) -> None:
    bench.keep(1, 2, 3)
    bench.tier.read_rate = PAGE / 2.0
    bench.now += TRIAL_SECONDS
    bench.ask(1, 2, 3, rate=16.0)
    bench.find()
    assert bench.refused == [(FetchRefusal.SLOWER, 1)]
    assert [call.hashes for call in bench.tier.reads] == [keys(1, 2)]
    bench.read()
    assert readable(bench.cache, bench.space, 1, 2, 3) == [True, True, False]
    bench.now += TRIAL_SECONDS - 1
    bench.ask(3, rate=16.0)
    bench.find()
    assert bench.refused == [(FetchRefusal.SLOWER, 1)] * 2
    bench.now += ABSENT_SECONDS + 1
    bench.ask(3, seconds=1.9, rate=16.0)
    bench.find()
    assert bench.refused == [(FetchRefusal.SLOWER, 1)] * 3, "the engine does not wait as long as that takes"


def test_what_takes_longer_than_the_engine_waits_is_not_fetched(bench: Bench) -> None:
    bench.keep(1)
    bench.tier.read_rate = PAGE / 2.0
    bench.ask(1, seconds=1.9, rate=0.001)
    bench.find()
    assert bench.refused == [(FetchRefusal.SLOWER, 1)]
    assert not bench.tier.reads


def test_a_fetch_for_which_nobody_asks_any_more_is_given_up() -> None:
    bench = Bench()
    bench.fetches.chunk_bytes = PAGE
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
    bench.fetches.chunk_bytes = PAGE
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


def test_more_blocks_than_may_wait_are_not_asked_for_until_some_of_them_wait_no_more(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_fetches, "MAX_WAITING", 4)
    monkeypatch.setattr(tier_fetches, "CHUNKS", 1)
    bench.keep(*range(8))
    bench.ask(*range(8))
    bench.find()
    assert bench.fetches.waiting_blocks == 6, "two are being read"
    assert bench.ask(20) == NOTHING
    assert bench.refused == [(FetchRefusal.BUSY, 1)]
    bench.now += INTEREST_SECONDS + 1
    bench.read()
    assert bench.refused[1:] == [(FetchRefusal.ABANDONED, 6)]
    assert bench.fetches.waiting_blocks == 0
    assert bench.ask(20).asking


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


# -- callers that choose ---------------------------------------------------------------------------------------------


def held(bench: Bench, *names: int, hits: tuple[int, ...] = ()) -> TierHits:
    return bench.fetches.held(bench.space, keys(*names), [name in hits for name in names])


def test_a_caller_that_chooses_is_told_what_there_is_and_nothing_is_fetched(bench: Bench) -> None:
    bench.keep(2, 3)
    assert held(bench, 1, 2, 3, 4, hits=(2,)) == TierHits(asking=True)
    assert held(bench, 1, 2, 3, 4, hits=(2,)) == TierHits(asking=True)
    (find,) = bench.tier.finds
    assert find.hashes == keys(1, 3, 4), "only what is missing is asked for, and once"
    bench.find()
    assert held(bench, 1, 2, 3, 4, hits=(2,)) == TierHits([2])
    assert held(bench, 2, 3, 4, hits=(2,)) == TierHits([1]), "of a prefix that the GPU has since"
    assert not held(bench, 1, 2, 3, 4, hits=(2, 3)).places, "it has come meanwhile"
    assert not bench.tier.finds
    assert not bench.tier.reads
    bench.now += ABSENT_SECONDS + 0.1
    assert held(bench, 1, 2, 3, 4).asking, "the answer was outdated"


def test_no_more_is_asked_at_a_time_than_one_question_has_room_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_fetches, "MAX_BLOCKS", 2)
    bench.keep(1, 2, 3, 4)
    held(bench, 1, 2, 3, 4, hits=(1,))
    (find,) = bench.tier.finds
    assert find.hashes == keys(2, 3)
    bench.find()
    assert held(bench, 1, 2, 3, 4, hits=(1,)) == TierHits([1, 2])


def test_a_tier_that_has_none_of_it_or_does_not_answer_holds_nothing(bench: Bench) -> None:
    held(bench, 1)
    bench.find()
    assert held(bench, 1) == NOT_HELD
    held(bench, 2)
    bench.tier.end_find(bench.tier.finds[0], ok=False)
    assert held(bench, 2) == NOT_HELD
    bench.tier.off = "out of order"
    assert held(bench, 3) == NOT_HELD
    assert bench.refused == [(FetchRefusal.OFF, 1)]


def test_questions_have_a_limit_and_what_was_answered_makes_room(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_fetches, "MAX_WAITING", 4)
    assert held(bench, 1, 2).asking
    assert held(bench, 3, 4).asking
    assert held(bench, 5) == NOT_HELD
    assert bench.refused == [(FetchRefusal.BUSY, 1)]
    bench.find()
    assert held(bench, 5).asking
    bench.fetches.forget(None)
    assert not bench.fetches._questions
    assert bench.fetches._asked_blocks == 0


def test_what_is_cleared_is_asked_for_again(bench: Bench) -> None:
    bench.keep(1)
    held(bench, 1)
    bench.find()
    bench.fetches.forget(bench.space.namespace)
    assert held(bench, 1).asking


def test_what_is_worth_it_together_is_fetched_though_one_group_alone_would_not_be(bench: Bench) -> None:
    bench.keep(1, 2)
    bench.tier.read_rate = PAGE / 2.0  # two seconds a block of 16 tokens
    state = keys(1)
    alone = bench.fetches.coming(bench.space, state, 0, 10.0, 16 / 1.9)
    assert alone.asking
    bench.find()
    assert bench.refused == [(FetchRefusal.SLOWER, 1)]
    bench.now += ABSENT_SECONDS + 0.1
    assert bench.fetches.coming(bench.space, state, 0, 10.0, 16 / 1.9, FetchGain(3 * PAGE, 160)).asking
    bench.find()
    assert bench.tier.reads
    too_slow = bench.fetches.coming(bench.space, keys(2), 0, 10.0, 16 / 1.9, FetchGain(3 * PAGE, 16))
    assert too_slow == NOTHING
    assert bench.refused == [(FetchRefusal.SLOWER, 1)] * 2
    assert not bench.tier.finds, "it was not even asked"


# -- slots that are being zeroed -------------------------------------------------------------------------------------


class ZeroingSome:
    """Zeroes the slots of the first grant, until the test says that it is done."""

    def __init__(self) -> None:
        self.later: list[Callable[[], object]] = []

    def may_write(self, grant: StoreGrant, later: Callable[[], object]) -> bool:
        if not self.later:
            self.later.append(later)
            return False
        return True


def test_a_chunk_whose_slots_are_being_zeroed_is_read_when_that_is_over() -> None:
    zeroing = ZeroingSome()
    bench = Bench(zeroing=zeroing)
    bench.keep(*range(6))
    bench.ask(*range(6))
    bench.find()
    assert len(bench.tier.reads) == 2, "the others do not wait"
    bench.read()
    assert readable(bench.cache, bench.space, *range(6)) == [False] * 2 + [True] * 4
    (later,) = zeroing.later
    later()
    bench.read()
    assert readable(bench.cache, bench.space, *range(6)) == [True] * 6
    assert (bench.fetches.reading_bytes, bench.fetches.waiting_blocks, bench.refused) == (0, 0, [])


def test_a_tier_that_fails_while_a_chunk_waits_gives_its_slots_back() -> None:
    zeroing = ZeroingSome()
    bench = Bench(zeroing=zeroing)
    bench.keep(1)
    bench.ask(1)
    bench.find()
    bench.tier.off = "it died"
    (later,) = zeroing.later
    later()
    assert bench.cache.stats().reserved_bytes == 0
    assert (bench.fetches.reading_bytes, bench.fetches.waiting_blocks) == (0, 0)
    assert bench.refused[-1][0] is FetchRefusal.FAILED


@pytest.mark.parametrize("fails", ["the read", "its slots"])
async def test_a_fetch_that_fails_unexpectedly_is_over_and_heard_and_the_others_go_on(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["message"]))
    bench = Bench()
    bench.keep(1, 2, 3, 4, 5, 6)
    owner, name = (bench.tier, "read") if fails == "the read" else (bench.cache, "begin_store")
    fail_once(monkeypatch, owner, name)
    for names in (1, 2, 3), (4, 5, 6):
        assert bench.ask(*names).asking
    for _ in range(2):
        bench.find()
    assert len(errors) == 1
    bench.read()
    assert readable(bench.cache, bench.space, 1, 2, 3, 4, 5, 6) == [False] * 3 + [True] * 3
    assert (FetchRefusal.FAILED in dict(bench.refused), bench.fetches.reading_bytes) == (True, 0)
    assert bench.ask(1, 2, 3) == NOTHING, "a lookup waits for what does not come"
    bench.now += ABSENT_SECONDS + 1
    assert bench.ask(1, 2, 3).asking
    bench.find()
    bench.read()
    assert readable(bench.cache, bench.space, 1, 2, 3) == [True] * 3
