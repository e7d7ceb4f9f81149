"""Which blocks of the GPU's prefix cache count as written, and what becomes of those that never will be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from kvsidecar.integrations.vllm.groups import GroupKind
from kvsidecar.integrations.vllm.metadata import RankReport, StepPlan
from kvsidecar.integrations.vllm.scheduler import SchedulerSide
from kvsidecar.integrations.vllm.selection import group_suffix
from kvsidecar.integrations.vllm.written import MAX_STEPS
from tests.integrations.engine import Block, LiveTables, Request, Step, TinyPool, attached, full, group, stored_hashes


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


class Inside:
    """A request whose prompt of 15 tokens ends inside blocks of 8, with a group of full attention and one of states.

    vLLM computes it to its last hash, after 12 tokens, and keeps the state there under that.
    """

    SIZES: ClassVar = {"block_tokens": 8, "hash_tokens": 4, "alignment": 8, "grain": 4}

    def __init__(self, **options: Any) -> None:
        self.groups = [full(0, **self.SIZES), group(1, GroupKind.STATE, **self.SIZES)]
        self.pool = TinyPool(20)
        self.side = attached(self.groups, self.pool, of=SchedulerSide, **options)
        self.request = Request("r", list(range(15)))
        self.tables = [self.pool.take(2), self.pool.take(2)]
        self.steps: list[Step] = []
        self.side.update_state_after_alloc(self.request, LiveTables(self.tables), 0)
        for each, table in zip(self.groups, self.tables, strict=True):
            self.pool.cache_full_blocks(self.request, table, 0, 1, each)
            self.pool.cache_partial_block(
                self.request, table[1], num_tokens=12, kv_cache_group_id=each.index, block_size=8
            )
        self.schedule(12)

    def schedule(self, tokens: int) -> StepPlan:
        """Plan a step with so many tokens of the request."""
        self.steps.append(Step({"r": tokens} if tokens else {}))
        plan = self.side.build_plan(self.steps[-1])
        self.request.num_computed_tokens += tokens
        return plan

    def process(self) -> None:
        self.side.begin_output(self.steps.pop(0), ())
        self.side.end_output()

    def go_on(self) -> Block:
        """vLLM moves the hash of the state to a copy, because the next tokens write over it."""
        (copy,) = self.pool.take(1)
        self.pool.move_block_hashes(self.tables[1][1], copy)
        self.pool.free_blocks([copy])
        return copy

    def stored(self, plan: StepPlan) -> list[tuple[int, bytes, int]]:
        """Group, hash and GPU block of all that is stored."""
        return [
            (each.group, name, number)
            for job in plan.stores
            for each in job.blocks
            for name, number in zip(each.split(), each.ids(), strict=True)
        ]


def test_a_state_inside_a_block_is_stored_from_its_copy_when_that_is_made() -> None:
    engine = Inside()
    engine.process()
    copy = engine.go_on()
    inside = engine.request.block_hashes[2]
    assert inside not in [name for _, name, _ in engine.stored(engine.schedule(3))], "the copy is made in this step"
    engine.process()
    assert engine.stored(engine.schedule(1)) == [
        (0, inside, engine.tables[0][1].block_id),
        (1, inside, copy.block_id),
    ]


def test_a_state_inside_a_block_is_not_stored_from_where_another_request_goes_on() -> None:
    """Two requests with the same prompt have computed it at the same time. One of them waits for its next step, which
    may begin before a copier reads."""
    engine, other = Inside(), Request("other", list(range(15)))
    engine.process()
    inside = engine.request.block_hashes[2]
    (theirs,) = engine.pool.take(1)
    mine = engine.go_on()
    engine.pool.uncache(mine)
    engine.pool.cache_partial_block(other, theirs, num_tokens=12, kv_cache_group_id=1, block_size=8)
    engine.pool.cache(mine, inside + group_suffix(1))
    for tokens in (3, 1, 1):
        assert (1, inside, theirs.block_id) not in engine.stored(engine.schedule(tokens))
        engine.process()
    engine.pool.move_block_hashes(theirs, *engine.pool.take(1))
    assert (1, inside, mine.block_id) in engine.stored(engine.schedule(1))


def test_a_state_inside_a_block_of_a_request_that_ends_is_stored_from_there() -> None:
    engine = Inside()
    engine.side.request_finished(engine.request)
    assert not engine.stored(engine.schedule(0)), "its step is in flight"
    engine.process()
    inside = engine.request.block_hashes[2]
    plan = engine.schedule(0)
    assert (1, inside, engine.tables[1][1].block_id) in engine.stored(plan)


def test_a_block_that_its_request_has_filled_while_it_was_stored_is_stored_again() -> None:
    engine = Inside()
    engine.process()
    engine.go_on()
    engine.schedule(3)
    engine.process()
    plan = engine.schedule(1)
    engine.request.append([15])
    block = engine.tables[0][1]
    engine.pool.uncache(block)  # as vLLM does when it is full
    engine.pool.cache_full_blocks(engine.request, engine.tables[0], 1, 2, engine.groups[0])
    engine.process()
    while engine.steps:
        engine.process()
    whole = (0, engine.request.block_hashes[3], block.block_id)
    assert whole not in engine.stored(engine.schedule(1)), "one job would have it twice"
    engine.process()
    for job in plan.stores:
        engine.side.take_report(RankReport(stored={job.number: 1}))
    assert whole in [each for _ in range(3) for each in engine.stored(engine.schedule(1))]


def test_in_an_engine_whose_hits_end_with_blocks_none_is_stored_that_is_not_full() -> None:
    class Coarse(Inside):
        SIZES: ClassVar = {**Inside.SIZES, "grain": 0}

    engine = Coarse()
    engine.process()
    engine.go_on()
    plans = []
    for tokens in (3, 1, 1):
        plans.append(engine.schedule(tokens))
        engine.process()
    engine.side.request_finished(engine.request)
    plans.append(engine.schedule(0))
    stored = [name for plan in plans for _, name, _ in engine.stored(plan)]
    assert stored == [engine.request.block_hashes[1]] * 2


def test_a_block_with_the_hashes_of_two_places_is_in_no_job_twice() -> None:
    engine = Inside()
    engine.process()
    engine.go_on()
    for job in engine.schedule(3).stores:
        engine.side.take_report(RankReport(stored={job.number: 1}))
    engine.process()
    block = engine.tables[0][1]
    inside = engine.request.block_hashes[2]
    engine.request.append([15])
    engine.pool.uncache(block)
    engine.pool.cache_full_blocks(engine.request, engine.tables[0], 1, 2, engine.groups[0])
    engine.pool.cached_block_hash_to_block.blocks[inside + group_suffix(0)] = [block]  # another request's prompt
    stored: list[tuple[int, bytes, int]] = []
    for _ in range(4):
        plan = engine.schedule(1)
        for job in plan.stores:
            for each in job.blocks:
                assert len(set(each.ids())) == len(each.ids())
            engine.side.take_report(RankReport(stored={job.number: 1}))
        stored += engine.stored(plan)
        engine.process()
    assert {(0, inside, block.block_id), (0, engine.request.block_hashes[3], block.block_id)} <= set(stored)
