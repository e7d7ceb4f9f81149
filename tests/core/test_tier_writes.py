"""Blocks that are worth it are written behind their use; others are dropped, and counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsidecar.cache.grants import LoadGrant, StoreGrant
from kvsidecar.core import tier_writes
from kvsidecar.core.tier_fetches import NOTHING, Fetches
from kvsidecar.core.tier_writes import Writes
from kvsidecar.tiers.backend import BackendStats
from kvsidecar.tiers.policy import Admission, FetchRefusal, WriteBudget, WriteRefusal
from kvsidecar.tiers.tier import Tier
from kvsidecar.types import LookupMode
from tests.cache.support import PAGE, begin, keys, new_cache, open_space, refused
from tests.core.scripted_tier import ScriptedTier
from tests.harness import fail_once

BIT = 1


class Bench:
    """A pool of 4 pages; two blocks a call, and all of the pool in the queue. A test may say otherwise."""

    def __init__(
        self,
        admission: Admission = Admission.SECOND_USE,
        *,
        shards: tuple[int, ...] = (1,),
        per_day: int | None = None,
        queue: int = 4,
        pages: int = 4,
        soon: Callable[[Callable[[], object]], object] = lambda call: call(),
    ) -> None:
        self.cache = new_cache(pages)
        self.space = open_space(self.cache, shards=shards)
        self.tier = ScriptedTier(dict.fromkeys(range(0, pages * PAGE, PAGE), "bytes"))
        self.refused: list[tuple[WriteRefusal, int]] = []
        self.writes = Writes(
            self.cache,
            cast(Tier, self.tier),
            BIT,
            admission,
            WriteBudget(per_day, 0.0),
            lambda: 0.0,
            lambda reason, blocks: self.refused.append((reason, blocks)),
            chunk_bytes=2 * PAGE,
            queue_bytes=queue * PAGE,
            soon=soon,
        )

    def store(self, *names: int) -> None:
        for shard in range(self.space.num_shards):
            grant = begin(self.cache, self.space, keys(*names), shard)
            self.cache.seal_all(grant)
            self.writes.stored(grant)

    def in_pool(self, *names: int) -> list[bool]:
        return self.cache.lookup(self.space, keys(*names), LookupMode.BITMAP)

    def load(self, *names: int) -> None:
        grant = self.cache.begin_load([(self.space, 0, keys(*names))], None, 0.0)
        assert isinstance(grant, LoadGrant)
        self.writes.used(grant)
        self.cache.end_load(grant)

    @property
    def written(self) -> list[list[bytes]]:
        return [call.hashes for call in self.tier.writes]

    def end(self, *, ok: bool = True, full: bool = False) -> None:
        while self.tier.writes:
            self.tier.end_write(self.tier.writes[0], ok=ok, full=full)


def test_a_block_is_written_at_its_second_use_and_once() -> None:
    bench = Bench()
    bench.store(1, 2, 3)
    assert not bench.written
    bench.load(1, 2, 3)
    assert bench.written == [keys(1, 2), keys(3)]
    bench.load(1, 2, 3)
    bench.end()
    bench.load(1, 2, 3)
    assert not bench.written
    assert not bench.refused


@pytest.mark.parametrize(("admission", "expected"), [(Admission.ALL, [keys(1)]), (Admission.NONE, [])])
def test_all_blocks_are_written_or_none(admission: Admission, expected: list[list[bytes]]) -> None:
    bench = Bench(admission)
    bench.store(1)
    assert bench.written == expected
    bench.load(1)
    assert bench.written == expected


def test_all_shards_of_a_block_are_written_when_the_last_one_is_there() -> None:
    bench = Bench(Admission.ALL, shards=(1, 1))
    bench.store(1)
    assert [(call.space.shard, call.hashes) for call in bench.tier.writes] == [(0, keys(1)), (1, keys(1))]


def test_the_tier_is_asked_behind_the_answer_and_the_blocks_wait_for_it() -> None:
    later: list[Callable[[], object]] = []
    bench = Bench(Admission.ALL, soon=later.append)
    bench.store(1, 2, 3, 4)
    assert not bench.written
    assert refused(bench.cache, bench.space, 5)
    bench.writes.forget(bench.space.namespace)
    for call in later:
        call()
    assert bench.written == [keys(1, 2), keys(3, 4)]
    bench.end()
    assert not bench.tier.kept
    assert not bench.writes.writing_bytes


def test_some_calls_are_handed_over_at_a_time_and_the_others_when_these_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_writes, "CHUNKS", 1)
    bench = Bench(Admission.ALL)
    bench.store(1, 2, 3, 4)
    assert bench.written == [keys(1, 2)]
    assert bench.writes.writing_bytes == 4 * PAGE
    bench.tier.end_write(bench.tier.writes[0])
    assert bench.written == [keys(3, 4)]
    bench.end()
    assert not bench.writes.writing_bytes


def test_any_number_of_calls_that_wait_ends_when_the_tier_is_off() -> None:
    bench = Bench(Admission.ALL, pages=2048, queue=2048)
    bench.store(*range(2048))
    bench.tier.off = "out of order"
    bench.end(ok=False)
    counted = {reason: sum(blocks for each, blocks in bench.refused if each is reason) for reason, _ in bench.refused}
    handed_over = 2 * tier_writes.CHUNKS
    assert counted == {WriteRefusal.FAILED: handed_over, WriteRefusal.OFF: 2048 - handed_over}
    assert not bench.writes.writing_bytes


def test_what_does_not_fit_the_queue_waits_by_name_and_the_beginning_of_a_prefix_goes_first() -> None:
    bench = Bench(queue=3)
    bench.store(1, 2, 3, 4)
    bench.load(1, 2, 3, 4)
    assert bench.written == [keys(1, 2), keys(3)]
    bench.tier.end_write(bench.tier.writes[0])
    assert bench.written == [keys(3), keys(4)]
    assert not bench.refused


def test_what_was_evicted_before_its_turn_is_counted() -> None:
    bench = Bench(queue=2)
    bench.store(1, 2, 3, 4)
    bench.load(1, 2, 3, 4)
    assert bench.written == [keys(1, 2)]
    bench.store(5, 6)
    bench.end()
    assert bench.refused == [(WriteRefusal.QUEUE, 2)]


def test_names_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_writes, "MAX_NAMES", 1)
    bench = Bench(queue=2)
    bench.store(1, 2, 3, 4)
    bench.load(1, 2, 3, 4)
    assert bench.refused == [(WriteRefusal.QUEUE, 1)]
    bench.tier.end_write(bench.tier.writes[0])
    assert bench.written == [keys(3)]


def test_a_block_larger_than_the_queue_is_dropped_at_once() -> None:
    bench = Bench(queue=0)
    bench.store(1)
    bench.load(1)
    assert bench.refused == [(WriteRefusal.QUEUE, 1)]


def test_names_of_what_is_cleared_are_forgotten() -> None:
    bench = Bench(queue=2)
    bench.store(1, 2, 3, 4)
    bench.load(1, 2, 3, 4)
    bench.writes.forget(bench.space.namespace)
    bench.end()
    assert not bench.written


def test_no_more_is_written_than_the_budget_of_the_day() -> None:
    bench = Bench(per_day=3 * PAGE)
    bench.store(1, 2, 3, 4)
    bench.load(1, 2, 3, 4)
    assert bench.written == [keys(1, 2), keys(3)]
    assert bench.refused == [(WriteRefusal.BUDGET, 1)]
    assert bench.writes.budget_left == 0


def test_what_is_left_of_the_budget_is_what_the_tiers_process_knows_to_be_left() -> None:
    bench = Bench(per_day=3 * PAGE)
    bench.tier.stats = BackendStats(0, 0, 0, 0, 0, {}, write_bytes_left=PAGE)
    bench.store(1, 2)
    bench.load(1, 2)
    assert bench.written == [keys(1)]
    assert bench.refused == [(WriteRefusal.BUDGET, 1)]


@pytest.mark.parametrize(
    ("ok", "full", "reason"), [(False, False, WriteRefusal.FAILED), (True, True, WriteRefusal.FULL)]
)
def test_a_write_that_fails_is_counted_and_tried_at_the_next_use(ok: bool, full: bool, reason: WriteRefusal) -> None:
    bench = Bench()
    bench.store(1)
    bench.load(1)
    bench.end(ok=ok, full=full)
    assert bench.refused == [(reason, 1)]
    assert not bench.writes.writing_bytes
    bench.load(1)
    assert bench.written == [keys(1)]


def test_a_tier_that_is_off_is_given_nothing() -> None:
    bench = Bench()
    bench.store(1)
    bench.tier.off = "out of order"
    bench.load(1)
    assert bench.refused == [(WriteRefusal.OFF, 1)]
    assert not bench.writes.writing_bytes


def test_nothing_is_fetched_while_a_write_may_bring_back_what_was_cleared() -> None:
    """Of two writes the first has ended, behind the clear: the tier has its blocks until the other has ended, too."""
    bench = Bench(Admission.ALL)
    unfetched: list[FetchRefusal] = []
    fetches = Fetches(
        bench.cache,
        cast(Tier, bench.tier),
        BIT,
        lambda: 0.0,
        lambda reason, _: unfetched.append(reason),
        may_be_cleared=bench.writes.may_bring_back,
    )
    bench.store(1, 2, 3)
    bench.writes.forget(bench.space.namespace)
    bench.cache.clear(bench.space.namespace)
    first, _ = bench.tier.writes
    bench.tier.end_write(first)
    assert len(bench.tier.kept) == 2
    assert fetches.coming(bench.space, keys(1, 2), 0, 1e9) == NOTHING
    assert (unfetched, bench.tier.finds) == ([FetchRefusal.OFF], [])
    bench.end()
    assert not bench.tier.kept
    assert fetches.coming(bench.space, keys(1, 2), 0, 1e9).asking


def test_what_the_next_store_would_evict_is_written_and_then_evicted() -> None:
    """Half of the queue of 4 pages is kept free."""
    bench = Bench(Admission.ON_EVICT)
    bench.store(1)
    bench.store(2)
    assert not bench.written
    bench.store(3)
    assert bench.written == [keys(1)]
    assert bench.in_pool(1, 2, 3) == [True] * 3
    bench.end()
    assert bench.in_pool(1, 2, 3) == [False, True, True]
    assert not bench.refused


def test_the_deepest_block_of_a_prefix_is_written_and_evicted_first() -> None:
    bench = Bench(Admission.ON_EVICT)
    bench.store(1, 2, 3)
    assert bench.written == [keys(3)]


@pytest.mark.parametrize("use", ["load", "store"])
def test_what_is_used_while_it_is_written_ahead_stays(use: str) -> None:
    bench = Bench(Admission.ON_EVICT)
    for name in (1, 2, 3):
        bench.store(name)
    getattr(bench, use)(1)
    bench.end()
    assert bench.in_pool(1, 2, 3) == [True, False, True]
    bench.end()
    assert bench.in_pool(1) == [True]


def test_what_the_tier_has_is_evicted_ahead_and_not_written_again() -> None:
    bench = Bench(Admission.ON_EVICT)
    for name in (1, 2, 3):
        bench.store(name)
    bench.load(1)
    bench.end()
    bench.load(3)
    bench.store(4)
    bench.end()
    assert bench.in_pool(1, 3, 4) == [False, True, True]
    assert [each for _, each in bench.tier.kept] == keys(1, 2)


@pytest.mark.parametrize(
    ("off", "per_day", "reason"),
    [("", None, WriteRefusal.QUEUE), ("out of order", None, WriteRefusal.OFF), ("", PAGE // 2, WriteRefusal.BUDGET)],
)
def test_what_is_evicted_before_it_was_written_is_counted(off: str, per_day: int | None, reason: WriteRefusal) -> None:
    bench = Bench(Admission.ON_EVICT, per_day=per_day)
    bench.tier.off = off
    bench.store(1, 2)
    bench.store(3, 4, 5)
    assert bench.refused == [(reason, 1)]
    assert bench.in_pool(1, 2) == [True, False]


def test_what_could_not_be_written_is_counted_once_and_evicted() -> None:
    bench = Bench(Admission.ON_EVICT)
    bench.store(1, 2, 3)
    bench.end(ok=False)
    assert bench.in_pool(1, 2, 3) == [True, True, False]
    assert bench.refused == [(WriteRefusal.FAILED, 1)]


def test_only_some_writes_are_begun_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_writes, "AHEAD_CHUNKS", 1)
    bench = Bench(Admission.ON_EVICT, queue=6)
    bench.store(1, 2, 3, 4)
    assert bench.written == [keys(4, 3)]
    bench.tier.end_write(bench.tier.writes[0])
    assert bench.written == [keys(2)]


@given(st.lists(st.one_of(st.integers(1, 4), st.sampled_from(["end", "load"])), max_size=30))
def test_every_block_is_in_the_pool_or_in_the_tier_or_counted(steps: list[int | str]) -> None:
    bench, stored = Bench(Admission.ON_EVICT), 0
    for step in (*steps, "end", 1):
        if step == "end":
            bench.end()
        elif step == "load":
            bench.load(*[name for name in range(stored) if bench.in_pool(name) == [True]][:1])
        else:
            names = range(stored, stored + int(step))
            grant = bench.cache.begin_store([(bench.space, 0, keys(*names))])
            if isinstance(grant, StoreGrant):
                bench.cache.seal_all(grant)
                bench.writes.stored(grant)
                stored += int(step)
    bench.end()
    kept = {each for _, each in bench.tier.kept}
    lost = [name for name in range(stored) if bench.in_pool(name) == [False] and keys(name)[0] not in kept]
    assert len(lost) == sum(blocks for _, blocks in bench.refused)


@pytest.mark.parametrize("fails", ["the write", "its end"])
async def test_a_write_that_fails_unexpectedly_is_heard_and_the_others_go_on(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["message"]))
    bench = Bench(Admission.ALL)
    owner, name = (bench.tier, "write") if fails == "the write" else (bench.cache.tiers, "end_write")
    fail_once(monkeypatch, owner, name)
    bench.store(1, 2, 3)
    bench.end()
    assert len(errors) == 1
    assert bench.refused == ([(WriteRefusal.FAILED, 2)] if fails == "the write" else [])
    assert bench.writes.writing_bytes == 0
    if fails == "the write":
        bench.store(4)
        assert bench.written == [keys(4)], "nothing is written any more"
        bench.end()
        bench.store(5, 6, 7)
        assert bench.in_pool(5, 6, 7) == [True] * 3, "blocks that were not written cannot be evicted"
        bench.end()
    assert len(errors) == 1
