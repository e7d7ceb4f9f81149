"""Steps in which nothing is stored or loaded: nearly all, and so what the connector costs an engine without hits."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from kvsidecar.integrations.vllm.metadata import IDLE, NOTHING, RankReport, StepPlan
from kvsidecar.integrations.vllm.stores import RETRY_SECONDS
from kvsidecar.integrations.vllm.worker import WorkerSide
from tests.integrations.engine import Clock, Request, Step, computed, pooled, run, stored_hashes
from tests.integrations.workers import StubClient, load, store, stubbed

INTERVAL = 60.0


class Unseen(dict[str, int]):
    """What is scheduled in a step that must not look at its requests."""

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("the requests of a step with nothing to do were looked through")


def test_until_the_interval_ends_no_request_is_looked_at() -> None:
    clock = Clock()
    made, pool = pooled(32, clock=clock, store_interval=INTERVAL)
    request = Request("r", list(range(12)))
    run(made, pool, request, 4)
    (job,) = made.build_plan(Step({"r": 4})).stores
    made.take_report(RankReport(stored={job.number: 1}))
    run(made, pool, request, 12)
    for _ in range(3):
        clock.now += INTERVAL / 4
        assert made.build_plan(Step(Unseen(r=1))) is NOTHING
    clock.now += INTERVAL / 4
    (job,) = made.build_plan(Step({"r": 1})).stores
    assert stored_hashes((job,)) == request.block_hashes[1:]
    assert made.build_plan(Step()) is IDLE


def test_the_blocks_of_a_preempted_request_are_not_waited_for() -> None:
    clock = Clock()
    made, pool = pooled(32, clock=clock, store_interval=INTERVAL)
    first, request = Request("first", [*range(100, 104)]), Request("r", list(range(8)))
    run(made, pool, first, 4)
    made.build_plan(Step({"first": 1}))
    blocks = run(made, pool, request, 8)
    pool.free_blocks(reversed(blocks))
    (job,) = made.build_plan(Step(Unseen(first=1), preempted_req_ids={"r"})).stores
    assert stored_hashes((job,)) == request.block_hashes


def test_what_is_due_is_not_waited_for() -> None:
    clock = Clock()
    made, pool = pooled(32, clock=clock, store_interval=INTERVAL)
    request, _ = computed(made, pool, 8)
    (job,) = made.build_plan(Step({"r": 1})).stores
    made.take_report(RankReport(stored={job.number: 1}, not_stored=frozenset({job.number})))
    clock.now += RETRY_SECONDS
    (job,) = made.build_plan(Step(Unseen(r=1))).stores
    assert stored_hashes((job,)) == request.block_hashes


def test_counters_are_read_behind_a_step_that_did_something_alone() -> None:
    clock = Clock()
    made, pool = pooled(32, clock=clock, store_interval=INTERVAL)
    request = Request("r", list(range(8)))
    run(made, pool, request, 4)
    made.build_plan(Step({"r": 1}))
    assert made.take_counts()["stores"] == 1
    made.build_plan(Step(Unseen(r=1)))
    made.counters.stores += 1  # nobody does
    assert made.take_counts() == {}
    made.request_finished(request)
    assert made.take_counts() == {"stores": 1}


class Asked(StubClient):
    """Notes what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Any] = []

    def set_idle(self, idle: bool, *, soon: bool) -> None:
        self.asked.append(idle)

    def poll(self) -> list[Any]:
        self.asked.append("poll")
        return super().poll()


def asked() -> tuple[WorkerSide, Asked]:
    worker, client = stubbed()[0], Asked()
    worker.side._new_client = lambda: client  # type: ignore[assignment, return-value]
    return worker.register(attached=False).side, client


def quiet(side: WorkerSide, orders: Any = NOTHING) -> None:
    side.bind(orders)
    side.submit_rest()
    side.poll()


def test_the_client_is_not_asked_for_ends_while_no_job_runs() -> None:
    side, client = asked()
    for _ in range(3):
        quiet(side)
    assert client.asked == []
    side.bind(StepPlan((store(1, "a", at=[0]),), (load(2, "b", at=[1]),)))
    side.submit_rest()
    for _ in range(2):
        side.poll()
    assert client.asked == ["poll", "poll"]


def test_the_daemon_hears_of_an_idle_gpu_once_with_the_poll_of_that_step() -> None:
    side, client = asked()
    for orders in (NOTHING, IDLE, IDLE, NOTHING, NOTHING):
        quiet(side, orders)
    assert client.asked == [True, "poll", False, "poll"]


def test_nothing_is_little_to_send_to_a_worker() -> None:
    pytest.importorskip("vllm")
    from kvsidecar.integrations.vllm.connector import NO_PLAN

    sent = pickle.dumps(NO_PLAN, pickle.HIGHEST_PROTOCOL)
    assert b"StepPlan" not in sent
    assert pickle.loads(sent) == NO_PLAN
