"""What requests say of their blocks reaches the daemon as the priority of their stores."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from kvsidecar.integrations.vllm.counters import Counters
from kvsidecar.integrations.vllm.metadata import RankReport, StoreJob
from kvsidecar.integrations.vllm.options import Options
from kvsidecar.integrations.vllm.scheduler import SchedulerSide
from kvsidecar.integrations.vllm.terms import MAX_ACTIONS, priority_of
from kvsidecar.types import Priority
from tests.integrations.engine import EPOCH, Clock, Request, Step, TinyPool, pooled, run, side, stored_hashes

LOW, NORMAL, HIGH = Priority.LOW, Priority.NORMAL, Priority.HIGH


@dataclass(eq=False)
class Hinted(Request):
    """As vLLM's request since 0.32."""

    kv_hints: Any = None
    priority: int = 0


def hints(*kinds: str) -> Any:
    return SimpleNamespace(actions=[SimpleNamespace(action_type=kind) for kind in kinds])


def asked(*kinds: str, number: int = 0, **options: bool) -> tuple[Priority, Counters]:
    counters = Counters()
    request = SimpleNamespace(kv_hints=hints(*kinds) if kinds else None, priority=number)
    return priority_of(request, counters, Options(**options)), counters


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (["kv.retain"], HIGH),
        (["Retain"], HIGH),
        (["kv.pin"], HIGH),
        (["kv.demote"], LOW),
        (["kv.demote", "kv.retain"], HIGH),
        (["kv.retain", "kv.demote"], HIGH),
        (["kv.prefetch"], NORMAL),
        (["kv.fetch"], NORMAL),
        ([], NORMAL),
    ],
)
def test_a_hint_means_a_priority(kinds: list[str], expected: Priority) -> None:
    assert asked(*kinds)[0] is expected


def test_hints_are_counted_and_those_of_other_kinds_ignored() -> None:
    priority, counters = asked("kv.retain", "kv.pin", "kv.prefetch", "kv.fetch", "", "x.y.z")
    assert (priority, counters.hints, counters.pin_hints, counters.unknown_hints) == (HIGH, 3, 1, 3)
    _, counters = asked(*["kv.retain"] * (MAX_ACTIONS + 5))
    assert (counters.hints, counters.unknown_hints) == (MAX_ACTIONS, 5)


def test_hints_can_be_switched_off() -> None:
    assert asked("kv.retain", kv_hints=False)[0] is NORMAL


@pytest.mark.parametrize(("number", "expected"), [(-1, HIGH), (0, NORMAL), (3, LOW)])
def test_the_schedulers_priority_counts_only_when_that_is_wanted(number: int, expected: Priority) -> None:
    assert asked(number=number)[0] is NORMAL
    assert asked(number=number, request_priority=True)[0] is expected
    assert asked("kv.retain", number=number, request_priority=True)[0] is HIGH, "a hint says it more clearly"


def test_a_request_of_a_version_without_hints_is_normal() -> None:
    assert priority_of(Request("r", [1]), Counters(), Options(request_priority=True)) is NORMAL


# -- in the scheduler ----------------------------------------------------------------------------------------------


def three(made: SchedulerSide, pool: TinyPool) -> dict[Priority, Request]:
    """Three requests in one step."""
    kinds = {HIGH: hints("kv.retain"), NORMAL: None, LOW: hints("kv.demote")}
    requests = {
        priority: Hinted(priority.name, list(range(100 * priority, 100 * priority + 13)), kv_hints=kind)
        for priority, kind in kinds.items()
    }
    for request in requests.values():
        made.on_new_request(request)
        run(made, pool, request, 13)
    return requests


def by_priority(jobs: tuple[StoreJob, ...]) -> dict[Priority, list[bytes]]:
    assert len({job.terms for job in jobs}) == len(jobs)
    return {job.terms.priority: stored_hashes((job,)) for job in jobs}


def test_the_blocks_of_requests_with_hints_are_stored_in_jobs_of_their_own() -> None:
    made, pool = pooled(128, store_interval=1000)
    requests = three(made, pool)
    for request in requests.values():
        made.request_finished(request)
    jobs = made.build_plan(Step()).stores
    assert by_priority(jobs) == {priority: request.block_hashes for priority, request in requests.items()}
    for job in jobs:
        made.take_report(RankReport(stored={job.number: 1}))
    assert not made.has_pending_push_work()
    assert not made._stores.terms, "a request that has ended is forgotten"
    assert made.counters.hints == 2


def test_requests_that_are_considered_together_are_told_apart() -> None:
    made, pool = pooled(128)
    requests = three(made, pool)
    tokens = {request.request_id: 1 for request in requests.values()}
    jobs = made.build_plan(Step(tokens)).stores
    assert by_priority(jobs) == {priority: request.block_hashes for priority, request in requests.items()}


def test_a_declined_store_is_tried_again_with_its_priority() -> None:
    clock = Clock()
    made, pool = pooled(128, clock=clock)
    requests = three(made, pool)
    for request in requests.values():
        made.request_finished(request)
    jobs = made.build_plan(Step()).stores
    assert len(jobs) == 3
    numbers = frozenset(job.number for job in jobs)
    made.take_report(RankReport(stored=dict.fromkeys(numbers, 1), not_stored=numbers))
    clock.now += 100
    again = made.build_plan(Step()).stores
    found = {priority: sorted(found) for priority, found in by_priority(again).items()}
    assert found == {priority: sorted(request.block_hashes) for priority, request in requests.items()}


def test_what_is_computed_without_a_daemon_is_stored_later_with_its_priority() -> None:
    pool = TinyPool(128)
    made = side(pool=pool)
    requests = three(made, pool)
    for request in requests.values():
        made.request_finished(request)
    made.take_report(RankReport(attached={0: EPOCH}))
    found = {priority: sorted(found) for priority, found in by_priority(made.build_plan(Step()).stores).items()}
    assert found == {priority: sorted(request.block_hashes) for priority, request in requests.items()}
