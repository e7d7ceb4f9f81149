"""What is stored later: blocks that could not be stored with their request, and what lazy mode leaves for idle
steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsidecar.integrations.stored_filter import tags_of
from kvsidecar.integrations.vllm import stores
from kvsidecar.integrations.vllm.backlog import Backlog, BlockHashes
from kvsidecar.integrations.vllm.groups import GroupKind
from kvsidecar.integrations.vllm.metadata import RankReport
from kvsidecar.integrations.vllm.scheduler import SchedulerSide
from kvsidecar.integrations.vllm.selection import group_suffix
from kvsidecar.integrations.vllm.stores import RETRY_SECONDS
from kvsidecar.integrations.vllm.waking import Alarm
from tests.integrations.engine import (
    ATTACHED,
    EPOCH,
    Block,
    CachedRequests,
    Clock,
    LiveTables,
    NewRequest,
    Request,
    Step,
    TinyDaemon,
    TinyPool,
    attached,
    chain,
    computed,
    full,
    group,
    pooled,
    run,
    side,
    stored_hashes,
)

IDLE = Step()


def part(group: int, hashes: Sequence[bytes]) -> BlockHashes:
    return BlockHashes(group, b"".join(hashes), tags_of(group, b"".join(hashes), len(hashes)))


def names(parts: Sequence[BlockHashes]) -> list[tuple[int, bytes]]:
    return [(each.group, one) for each in parts for one in each.split()]


def ends(made: SchedulerSide, pool: TinyPool, request: Request, blocks: Sequence[Block]) -> None:
    """As vLLM does it: the connector is told, then the blocks are freed, the end of the prefix first."""
    made.request_finished(request)
    pool.free_blocks(reversed(blocks))


def over(made: SchedulerSide, pool: TinyPool, tokens: int, name: str = "r", first: int = 0) -> Request:
    """A request that was computed and has ended."""
    request, blocks = computed(made, pool, tokens, name, first)
    ends(made, pool, request, blocks)
    return request


def drain(made: SchedulerSide, failed: bool = False) -> list[list[bytes]]:
    """Idle steps until there is nothing to do. Returns what each job stored."""
    jobs = []
    while made.has_pending_push_work():
        for job in made.build_plan(IDLE).stores:
            jobs.append(stored_hashes((job,)))
            made.take_report(RankReport(stored={job.number: 1}, not_stored=frozenset([job.number] * failed)))
    return jobs


# -- the list ------------------------------------------------------------------------------------------------------


@given(
    most=st.integers(1, 12),
    script=st.lists(
        st.one_of(
            st.tuples(st.integers(0, 1), st.lists(st.integers(0, 20), max_size=6, unique=True)), st.integers(0, 8)
        ),
        max_size=30,
    ),
)
def test_each_block_is_due_once_and_the_first_ones_are_taken_or_pushed_out_first(
    most: int, script: list[tuple[int, list[int]] | int]
) -> None:
    hashes, due = chain(range(100)), Backlog(most)
    model: list[tuple[int, bytes]] = []
    for each in script:
        if isinstance(each, int):
            expected, model = model[:each], model[each:]
            assert names(due.take(each)) == expected
        else:
            group, numbers = each
            model += [(group, hashes[i]) for i in numbers if (group, hashes[i]) not in model]
            count = max(0, len(model) - most)
            expected, model = model[:count], model[count:]
            assert names(due.add(part(group, [hashes[i] for i in numbers]))) == expected
        assert due.count == len(model)


# -- eager ---------------------------------------------------------------------------------------------------------


def test_what_a_step_has_no_room_for_when_a_request_ends_is_stored_by_later_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stores, "STEP_BLOCKS", 4)
    made, pool = pooled(80, store_interval="1h")
    made.build_plan(Step({"nobody": 1}))
    request = Request("r", list(range(44)))
    blocks = pool.take(11)
    for block, each in zip(blocks, request.block_hashes, strict=True):
        pool.cache(block, each + bytes(4))
    made.update_state_after_alloc(request, LiveTables([blocks]), 0)
    ends(made, pool, request, blocks)
    jobs = drain(made)
    assert [len(each) for each in jobs] == [4, 4, 3]
    assert [each for job in jobs for each in job] == request.block_hashes
    assert made.counters.given_up_blocks == 0
    assert pool.num_free == 79


@pytest.mark.parametrize(("waits", "most"), [(True, 12), (False, 4)], ids=["waits", "never waits"])
def test_what_is_due_leaves_room_for_the_longest_request_or_most_blocks_where_vllm_cannot_wait(
    waits: bool, most: int
) -> None:
    pool = TinyPool(33)
    made = side(pool=pool, longest_blocks=20, waits=waits)
    request = over(made, pool, 80)
    made.take_report(ATTACHED)
    (job,) = made.build_plan(IDLE).stores
    assert len(stored_hashes((job,))) == most
    assert made.build_plan(IDLE).stores == ()
    made.take_report(RankReport(stored={job.number: 1}))
    assert [each for one in [stored_hashes((job,)), *drain(made)] for each in one] == request.block_hashes


def test_a_step_takes_as_many_blocks_that_are_due_as_it_computes_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "BACKLOG_BLOCKS", 2)
    pool = TinyPool(80)
    made = side(pool=pool)
    request = over(made, pool, 44)
    made.take_report(ATTACHED)
    taken = [stored_hashes(made.build_plan(step).stores) for step in (IDLE, Step({"other": 1}), Step({"other": 5}))]
    assert [len(each) for each in taken] == [2, 2, 5]
    assert {each for one in taken for each in one} < set(request.block_hashes)


def test_of_a_request_that_ends_what_is_stored_already_takes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "STEP_BLOCKS", 4)
    made, pool = pooled(80)
    request, blocks = computed(made, pool, 32)
    ends(made, pool, request, blocks)
    drain(made)
    longer = Request("longer", list(range(44)))
    more = pool.take(3)
    for block, each in zip(more, longer.block_hashes[8:], strict=True):
        pool.cache(block, each + bytes(4))
    pool.touch(blocks)
    made.update_state_after_alloc(longer, LiveTables([[*blocks, *more]]), 0)
    ends(made, pool, longer, [*blocks, *more])
    assert pool.num_free == 76, "the new ones are held, and not left for later"
    assert drain(made) == [longer.block_hashes[8:]]


def test_what_a_running_request_has_no_room_for_is_stored_in_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "STEP_BLOCKS", 4)
    made, pool = pooled(80, store_interval="1h")
    request, _ = computed(made, pool, 44)
    made.take_report(RankReport())
    jobs = [stored_hashes(made.build_plan(Step({"r": 1})).stores) for _ in range(4)]
    assert jobs == [request.block_hashes[:4], request.block_hashes[4:8], request.block_hashes[8:], []]


def test_null_blocks_before_what_a_request_has_hit_are_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [full(), group(1, GroupKind.SLIDING_WINDOW, 4, window=8)]
    daemon, pool = TinyDaemon(), TinyPool(80)
    made = attached(groups, pool=pool, daemon=daemon)
    request = Request("r", list(range(80)))
    daemon.put(0, request.block_hashes[:16])
    daemon.put(1, request.block_hashes[14:16])
    assert made.get_num_new_matched_tokens(request, 0) == (64, True)
    table = LiveTables([pool.take(20), [pool.null_block] * 14 + pool.take(6)])
    made.update_state_after_alloc(request, table, 64)
    looked_for: list[bytes] = []
    monkeypatch.setattr(pool.cached_block_hash_to_block, "get_one_block", looked_for.append)
    made.request_finished(request)
    nulls = {each + group_suffix(1) for each in request.block_hashes[:14]}
    assert looked_for
    assert nulls.isdisjoint(looked_for)


def test_what_was_computed_without_a_daemon_is_stored_when_there_is_one_as_far_as_the_gpu_has_it() -> None:
    pool = TinyPool(16)
    made = side(pool=pool)
    request = over(made, pool, 20)
    pool.take(12)  # the ten that were never used, and the last two of the prefix
    assert not made.has_pending_push_work()
    made.take_report(ATTACHED)
    assert [each for job in drain(made) for each in job] == request.block_hashes[:3]
    assert made.counters.given_up_blocks == 2
    assert not made.has_pending_push_work()


def test_a_declined_store_is_tried_again_later_and_later_until_one_is_stored() -> None:
    made, pool = pooled(40, clock=(clock := Clock()))
    request = over(made, pool, 8)
    tries = []
    for _ in range(60):
        if drain(made, failed=True):
            tries.append(clock.now)
        clock.now += 0.5
    assert [round(after - before) for before, after in pairwise(tries)] == [1, 2, 4, 8, 8]
    other = Request("s", list(range(100, 108)))
    run(made, pool, other, 8)
    (job,) = made.build_plan(Step({"s": 1})).stores
    made.take_report(RankReport(stored={job.number: 1}))
    clock.now += 1
    assert drain(made) == [request.block_hashes]  # now that the daemon takes something


def test_a_store_that_is_not_admitted_is_no_failure_and_is_not_tried_again() -> None:
    made, pool = pooled(40, clock=(clock := Clock()))
    over(made, pool, 8)
    (job,) = made.build_plan(IDLE).stores
    number = frozenset({job.number})
    made.take_report(RankReport(stored={job.number: 1}, not_stored=number, not_admitted=number))
    clock.now += 60
    assert drain(made) == []
    assert pool.num_free == 39, "its blocks are free"
    assert (made.counters.failed_stores, made.counters.not_admitted_stores) == (0, 1)
    again = Request("s", list(range(8)))
    run(made, pool, again, 8)
    (job,) = made.build_plan(Step({"s": 1})).stores
    assert stored_hashes((job,)) == again.block_hashes, "whoever computes or hits it again stores it"


def test_a_sleeping_engine_is_woken_when_a_declined_store_may_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    alarms: list[float] = []
    monkeypatch.setattr(Alarm, "set", lambda _, seconds: alarms.append(seconds))
    made, pool = pooled(40, clock=(clock := Clock()))
    request = over(made, pool, 8)
    assert drain(made, failed=True)
    assert alarms.pop() == pytest.approx(RETRY_SECONDS, abs=1e-3)
    clock.now += RETRY_SECONDS / 4
    assert not made.has_pending_push_work()
    assert alarms.pop() == pytest.approx(RETRY_SECONDS * 3 / 4, abs=1e-3)
    clock.now += RETRY_SECONDS
    assert drain(made) == [request.block_hashes]
    assert not made.has_pending_push_work()
    assert not alarms


def test_without_a_daemon_nobody_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Alarm, "set", lambda *_: pytest.fail("woken"))
    pool = TinyPool(16)
    made = side(pool=pool)
    over(made, pool, 8)
    assert not made.has_pending_push_work()


def test_another_run_of_the_daemon_is_given_at_once_what_the_one_before_did_not_take() -> None:
    made, pool = pooled(40)
    request = over(made, pool, 8)
    drain(made, failed=True)
    assert not made.has_pending_push_work()
    made.take_report(RankReport(attached={0: EPOCH + 1}))
    assert drain(made) == [request.block_hashes]


def test_a_store_that_ends_after_the_daemon_was_restarted_is_made_again() -> None:
    """Nobody knows which of the two runs stored it."""
    made, pool = pooled(40, clock=(clock := Clock()))
    request = over(made, pool, 8)
    (job,) = made.build_plan(IDLE).stores
    made.take_report(RankReport(attached={0: EPOCH + 1}, stored={job.number: 1}))
    clock.now += RETRY_SECONDS
    assert drain(made) == [request.block_hashes]


def test_a_reset_forgets_what_is_due_and_what_running_stores_leave() -> None:
    made, pool = pooled(40, clock=(clock := Clock()))
    over(made, pool, 8)
    drain(made, failed=True)
    over(made, pool, 8, "s", 100)
    (job,) = made.build_plan(IDLE).stores
    assert made.reset_cache() is False
    made.take_report(RankReport(stored={job.number: 1}, not_stored=frozenset({job.number})))
    while made.has_pending_push_work():
        assert made.build_plan(IDLE).stores == ()
    clock.now += RETRY_SECONDS
    assert not made.has_pending_push_work()
    assert pool.num_free == 39


def test_what_no_step_comes_to_is_bounded_by_what_the_gpu_has_and_counted() -> None:
    pool = TinyPool(9)
    made = side(pool=pool)
    for number in range(5):
        over(made, pool, 16, f"r{number}", 100 * number)
    assert made.counters.given_up_blocks == 11
    made.take_report(ATTACHED)
    assert sum(len(each) for each in drain(made)) == 8
    assert made.counters.given_up_blocks == 12


# -- lazy ----------------------------------------------------------------------------------------------------------


def lazy(pool: TinyPool) -> SchedulerSide:
    return attached(pool=pool, store_mode="lazy", lazy_watermark=1)


def busy(request: Request, tokens: int = 1) -> Step:
    return Step({request.request_id: tokens}, scheduled_cached_reqs=CachedRequests([request.request_id], [None]))


def test_lazy_mode_stores_what_a_request_hits_and_leaves_the_rest_for_an_idle_step() -> None:
    pool = TinyPool(80)
    made = lazy(pool)
    system = list(range(8))
    first, second = Request("a", system + [1] * 8), Request("b", system + [2] * 8)
    blocks = run(made, pool, first, 16)
    assert made.build_plan(busy(first)).stores == ()
    fresh = pool.take(2)
    pool.touch(blocks[:2])
    made.update_state_after_alloc(second, LiveTables([[*blocks[:2], *fresh]]), 0)
    new = NewRequest("b", ([block.block_id for block in (*blocks[:2], *fresh)],), num_computed_tokens=8)
    (job,) = made.build_plan(Step({"b": 8}, scheduled_new_reqs=[new])).stores
    assert stored_hashes((job,)) == second.block_hashes[:2]
    made.take_report(RankReport(stored={job.number: 1}))
    ends(made, pool, first, blocks)
    assert made.build_plan(busy(second)).stores == (), "while requests run, only what is hit or evicted is stored"
    assert drain(made) == [first.block_hashes[2:]]
    assert not made.has_pending_push_work()


def test_lazy_mode_keeps_the_order_in_which_the_gpu_evicts() -> None:
    pool = TinyPool(80)
    made = lazy(pool)
    older, newer = Request("a", list(range(8))), Request("b", list(range(100, 112)))
    chains = [run(made, pool, older, 8), run(made, pool, newer, 12)]
    ends(made, pool, older, chains[0])
    ends(made, pool, newer, chains[1])
    before = [block for block in pool.free_block_queue.blocks if block.block_hash is not None]
    assert sum(len(each) for each in drain(made)) == 5
    after = [block for block in pool.free_block_queue.blocks if block.block_hash is not None]
    assert after == before


def test_blocks_that_lazy_mode_stores_before_they_are_evicted_keep_their_order_too() -> None:
    made, pool = pooled(13, store_mode="lazy", lazy_watermark=12)
    _, blocks = computed(made, pool, 16)
    pool.free_blocks(reversed(blocks))
    other = pool.take(3)
    step = Step({"s": 12}, scheduled_new_reqs=[NewRequest("s", ([each.block_id for each in other],))])
    (job,) = made.build_plan(step).stores
    made.take_report(RankReport(stored={job.number: 1}))
    assert [block for block in pool.free_block_queue.blocks if block.block_hash is not None] == blocks[::-1]
