"""Which blocks of the GPU's prefix cache count as written, and what becomes of those that never will be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvsidecar.integrations.vllm.metadata import RankReport, StepPlan
from kvsidecar.integrations.vllm.scheduler import SchedulerSide
from kvsidecar.integrations.vllm.written import MAX_STEPS
from tests.integrations.engine import Block, LiveTables, Request, Step, TinyPool, attached, stored_hashes


class Engine:
    """Requests whose steps are in flight until a test says otherwise."""

    def __init__(self, **options: Any) -> None:
        self.pool, self.tables = TinyPool(40), dict[str, list[Block]]()
        self.side = attached(pool=self.pool, of=SchedulerSide, block_ids=self.block_ids, **options)
        self.steps: list[Step] = []
        self.requests: dict[str, Request] = {}

    def block_ids(self, request_id: str) -> list[list[int]]:
        return [[block.block_id for block in self.tables.get(request_id, ())]]

    def enter(self, request: Request, tokens: int, hit: Sequence[Block] = ()) -> None:
        """vLLM schedules so many more tokens of a request, and enters the blocks that they fill into its cache."""
        self.requests[request.request_id] = request
        table = self.tables.setdefault(request.request_id, list(hit))
        self.pool.touch(hit)
        first, end = len(table), (request.num_computed_tokens + tokens) // 4
        table += self.pool.take(end - first)
        if not request.num_computed_tokens or hit:
            self.side.update_state_after_alloc(request, LiveTables([table]), 0)
        self.pool.cache_full_blocks(request, table, first, end)

    def schedule(self, *requests: tuple[Request, int], preempted: Sequence[Request] = ()) -> StepPlan:
        step = Step({each.request_id: tokens for each, tokens in requests}, {each.request_id for each in preempted})
        self.steps.append(step)
        plan = self.side.build_plan(step)
        for each, tokens in requests:
            each.num_computed_tokens += tokens
        return plan

    def compute(self, request: Request, tokens: int, hit: Sequence[Block] = ()) -> StepPlan:
        request.num_computed_tokens += 4 * len(hit)
        self.enter(request, tokens, hit)
        return self.schedule((request, tokens))

    def process(self, invalid: Sequence[Block] = ()) -> None:
        """The output of the oldest step in flight is processed."""
        self.side.begin_output(self.steps.pop(0), {each.block_id for each in invalid})
        self.side.end_output()

    def cached(self, name: str) -> list[bool]:
        return [block.block_hash is not None for block in self.tables[name]]

    def all_stored(self) -> list[bytes]:
        """What is planned once nothing is in flight, and all requests have ended."""
        while self.steps:
            self.process()
        for each in self.requests.values():
            self.side.request_finished(each)
        self.requests.clear()
        return stored_hashes(self.schedule().stores)


@pytest.fixture
def request_of_8() -> Request:
    return Request("r", list(range(9)))


def test_a_block_is_stored_when_the_output_of_its_step_is_processed(request_of_8: Request) -> None:
    engine = Engine()
    assert not engine.compute(request_of_8, 8).stores
    assert not engine.schedule((request_of_8, 1)).stores
    engine.process()
    assert stored_hashes(engine.schedule((request_of_8, 1)).stores) == request_of_8.block_hashes


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_what_a_request_leaves_behind_in_flight_is_stored_when_it_is_written(request_of_8: Request, mode: str) -> None:
    engine = Engine(store_mode=mode)
    engine.compute(request_of_8, 8)
    engine.side.request_finished(request_of_8)
    engine.pool.free_blocks(reversed(engine.tables.pop("r")))
    assert not engine.schedule().stores
    assert engine.side.counters.given_up_blocks == 0
    assert engine.all_stored() == request_of_8.block_hashes


def test_nobody_hits_the_blocks_of_a_request_that_was_preempted_in_the_step_that_would_have_written_them(
    request_of_8: Request,
) -> None:
    engine = Engine()
    engine.compute(request_of_8, 4)
    engine.enter(request_of_8, 4)
    engine.schedule(preempted=[request_of_8])
    assert engine.cached("r") == [True, False], "the first block is written by the step before"
    assert engine.all_stored() == request_of_8.block_hashes[:1]


def test_a_block_that_was_given_to_another_request_in_the_same_step_stays(request_of_8: Request) -> None:
    engine, other = Engine(), Request("other", list(range(50, 59)))
    engine.enter(request_of_8, 8)
    taken = engine.tables["r"]
    engine.pool.free_blocks(reversed(taken))
    for block in taken:
        engine.pool.uncache(block)
    engine.pool.free_block_queue.blocks.sort(key=lambda block: block not in taken)
    engine.enter(other, 8)
    assert set(engine.tables["other"]) == set(taken)
    engine.schedule((other, 8), preempted=[request_of_8])
    assert engine.cached("other") == [True, True]
    assert engine.all_stored() == other.block_hashes


def test_what_was_computed_on_blocks_that_were_not_loaded_leaves_the_cache(request_of_8: Request) -> None:
    engine, other = Engine(), Request("other", list(range(50, 59)))
    engine.enter(request_of_8, 8)
    engine.enter(other, 8)
    engine.schedule((request_of_8, 8), (other, 8))
    engine.process(invalid=engine.tables["r"][:1])
    assert engine.cached("r") == [False, False]
    assert engine.all_stored() == other.block_hashes, "it has nothing to do with it"


def test_a_request_that_shares_a_block_that_was_not_loaded_may_be_computed_before_that(request_of_8: Request) -> None:
    """vLLM computes the block again with the first of them, in as many steps as that takes."""
    engine, longer = Engine(), Request("longer", list(range(17)))
    engine.enter(request_of_8, 8)
    longer.num_computed_tokens = 8
    engine.enter(longer, 4, hit=engine.tables["r"])
    engine.schedule((request_of_8, 8), (longer, 4))
    engine.process(invalid=engine.tables["r"][:1])
    engine.compute(longer, 4)
    assert engine.cached("longer") == [False] * 4
    assert engine.all_stored() == []


def test_null_blocks_in_front_of_a_window_are_nobodys(request_of_8: Request) -> None:
    engine = Engine()
    engine.tables["r"] = [engine.pool.null_block, *engine.pool.take(1)]
    engine.side.update_state_after_alloc(request_of_8, LiveTables([engine.tables["r"]]), 0)
    engine.pool.cache_full_blocks(request_of_8, engine.tables["r"], 1, 2)
    engine.side._written._entered("r", [engine.pool.null_block] * 2)
    engine.schedule((request_of_8, 8))
    engine.process()
    assert not engine.side._written.unwritten


def test_a_request_of_a_later_step_that_has_hit_them_enters_nothing_until_it_is_computed_anew(
    request_of_8: Request,
) -> None:
    engine, longer = Engine(), Request("longer", list(range(17)))
    engine.compute(request_of_8, 8)
    engine.compute(longer, 4, hit=engine.tables["r"])
    engine.process(invalid=engine.tables["r"][:1])
    engine.compute(longer, 4)
    assert engine.cached("longer") == [False] * 4
    assert engine.all_stored() == []
    engine.pool.free_blocks(reversed(engine.tables.pop("longer")))
    longer.num_computed_tokens = 0
    engine.enter(longer, 16)
    engine.schedule((longer, 16), preempted=[longer])
    assert engine.all_stored() == longer.block_hashes


def test_what_a_request_read_that_has_lost_its_blocks_is_not_known(request_of_8: Request) -> None:
    engine, longer = Engine(), Request("longer", list(range(17)))
    engine.compute(request_of_8, 8)
    engine.compute(longer, 8, hit=engine.tables["r"])
    engine.side.request_finished(longer)
    engine.pool.free_blocks(reversed(left := engine.tables.pop("longer")))
    engine.process(invalid=engine.tables["r"][:1])
    assert [block.block_hash for block in left] == [None] * 4
    assert engine.all_stored() == []


def test_a_lost_step_has_written_nothing_and_its_jobs_come_again(request_of_8: Request) -> None:
    engine, other = Engine(), Request("other", list(range(50, 59)))
    engine.compute(request_of_8, 8)
    engine.process()
    engine.enter(other, 8)
    lost = engine.schedule((other, 8), (request_of_8, 1))
    assert stored_hashes(lost.stores) == request_of_8.block_hashes
    engine.steps.clear()
    engine.side.abort_all()
    assert (engine.cached("r"), engine.cached("other")) == ([True, True], [False, False])
    assert not engine.schedule().repeat, "its output may come"
    engine.process()
    plan = engine.schedule()
    assert (plan.repeat, [each.stores for each in plan.lost]) == (True, [lost.stores])
    engine.side.take_report(RankReport(stored={lost.stores[0].number: 1}))
    assert not engine.schedule().repeat


def test_steps_in_flight_are_bounded(request_of_8: Request) -> None:
    engine = Engine()
    engine.compute(request_of_8, 8)
    for _ in range(MAX_STEPS - 1):
        engine.schedule()
    assert engine.cached("r") == [True, True]
    engine.schedule()
    assert engine.cached("r") == [False, False]


def test_a_reset_empties_the_cache_while_stores_run_and_they_keep_their_blocks(request_of_8: Request) -> None:
    engine = Engine()
    engine.compute(request_of_8, 8)
    engine.process()
    (job,) = engine.schedule((request_of_8, 1)).stores
    blocks = engine.tables.pop("r")
    engine.side.request_finished(request_of_8)
    engine.pool.free_blocks(reversed(blocks))
    engine.side.begin_reset()
    assert engine.pool.num_free == 39
    for block in blocks:
        engine.pool.uncache(block)
    assert engine.side.reset_cache()
    engine.side.end_reset()
    assert [block.ref_cnt for block in blocks] == [1, 1]
    again = Request("again", list(range(9)))
    engine.compute(again, 8)
    engine.side.take_report(RankReport(stored={job.number: 1}))
    assert [block.ref_cnt for block in blocks] == [0, 0]
    assert len(engine.all_stored()) == 2, "of the new weights, under other keys"
