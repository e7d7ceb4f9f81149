"""What requests say of their blocks reaches the daemon with their stores: priorities, and how long they are kept."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from kvsidecar.integrations.vllm.counters import Counters
from kvsidecar.integrations.vllm.metadata import RankReport, StoreJob
from kvsidecar.integrations.vllm.options import ConnectorOptions
from kvsidecar.integrations.vllm.retention import (
    DEFAULT_RETENTION,
    MAX_ACTIONS,
    SHORTEST,
    Retention,
    priority_of,
    retention_of,
)
from kvsidecar.integrations.vllm.scheduler import SchedulerSide
from kvsidecar.types import MAX_IDLE_SECONDS, Priority
from tests.integrations.engine import ATTACHED, Clock, Request, Step, TinyPool, pooled, run, side, stored_hashes

LOW, NORMAL, HIGH = Priority.LOW, Priority.NORMAL, Priority.HIGH


@dataclass(eq=False)
class Said(Request):
    """As vLLM's request since 0.32."""

    kv_hints: Any = None
    priority: int = 0
    kv_transfer_params: Any = None


def hints(*kinds: str) -> Any:
    return SimpleNamespace(actions=[SimpleNamespace(action_type=kind) for kind in kinds])


def asked(*kinds: str, number: int = 0, **options: bool) -> tuple[Priority, Counters]:
    counters = Counters()
    request = SimpleNamespace(kv_hints=hints(*kinds) if kinds else None, priority=number)
    return priority_of(request, counters, ConnectorOptions(**options)), counters


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
    assert priority_of(Request("r", [1]), Counters(), ConnectorOptions(request_priority=True)) is NORMAL


def retention(params: Any) -> tuple[Retention, Counters]:
    counters = Counters()
    request = SimpleNamespace(kv_transfer_params=params, kv_hints=None)
    return retention_of(request, counters, ConnectorOptions()), counters


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({"ttl": 600}, Retention(ttl=600)),
        ({"idle_ttl": "1min"}, Retention(idle_ttl=60)),
        ({"ttl": 0.2, "idle_ttl": "1500ms"}, Retention(ttl=1, idle_ttl=2)),
        ({"ttl": None, "idle_ttl": 9e8}, Retention(idle_ttl=MAX_IDLE_SECONDS)),
        ({}, Retention()),
        ({"ttl": 60, "pause": "soon"}, Retention(ttl=60)),
    ],
)
def test_a_request_bounds_how_long_its_blocks_are_kept(times: Any, expected: Retention) -> None:
    found, counters = retention({"kvsidecar": times, "another's": {"ttl": "?"}})
    assert found == expected
    assert (counters.ttl_requests, counters.bad_ttls) == (1, 0)


@pytest.mark.parametrize(
    "times", [{"ttl": "soon"}, {"ttl": 0}, {"ttl": True}, {"ttl": 10**400}, {"tttl": 5}, {"ttl": [1]}, 5, [], "ttl"]
)
def test_a_time_that_cannot_be_read_is_the_shortest_and_counted(times: Any) -> None:
    found, counters = retention({"kvsidecar": times})
    assert found == Retention(ttl=SHORTEST)
    assert counters.bad_ttls == 1


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"do_remote_prefill": False},
        {"kvsidecar": None},
        ["kvsidecar"],
        {"kvsidecar": {"pause": 9, "over": True}},
    ],
)
def test_a_request_without_times_has_the_terms_of_others(params: Any) -> None:
    found, counters = retention(params)
    assert (found, counters.ttl_requests) == (DEFAULT_RETENTION, 0)


# -- in the scheduler ----------------------------------------------------------------------------------------------


def said() -> dict[Retention, Request]:
    """A request for each of several retention."""
    kinds: dict[Retention, dict[str, Any]] = {
        DEFAULT_RETENTION: {},
        Retention(HIGH): {"kv_hints": hints("kv.retain")},
        Retention(LOW): {"kv_hints": hints("kv.demote")},
        Retention(ttl=5): {"kv_transfer_params": {"kvsidecar": {"ttl": 5}}},
        Retention(ttl=5, idle_ttl=5): {"kv_transfer_params": {"kvsidecar": {"ttl": 5, "idle_ttl": 5}}},
    }
    return {
        retention: Said(str(number), list(range(100 * number, 100 * number + 13)), **words)
        for number, (retention, words) in enumerate(kinds.items())
    }


def computed(made: SchedulerSide, pool: TinyPool) -> dict[Retention, list[bytes]]:
    """Let each request of `said` be computed, and end. Returns their blocks."""
    requests = said()
    for request in requests.values():
        made.on_new_request(request)
        run(made, pool, request, 13)
    for request in requests.values():
        made.request_finished(request)
    return {retention: request.block_hashes for retention, request in requests.items()}


def by_retention(jobs: tuple[StoreJob, ...]) -> dict[Retention, list[bytes]]:
    assert len({job.retention for job in jobs}) == len(jobs)
    return {job.retention: stored_hashes((job,)) for job in jobs}


def in_any_order(blocks: dict[Retention, list[bytes]]) -> dict[Retention, list[bytes]]:
    return {retention: sorted(hashes) for retention, hashes in blocks.items()}


def test_blocks_of_requests_with_terms_of_their_own_are_stored_in_jobs_of_their_own_also_when_tried_again() -> None:
    clock = Clock()
    made, pool = pooled(128, store_interval=1000, clock=clock)
    expected = computed(made, pool)
    assert made.counters.hints == 2
    jobs = made.build_plan(Step()).stores
    assert by_retention(jobs) == expected
    numbers = frozenset(job.number for job in jobs)
    made.take_report(RankReport(stored=dict.fromkeys(numbers, 1), not_stored=numbers))
    clock.now += 100
    again = made.build_plan(Step()).stores
    assert in_any_order(by_retention(again)) == in_any_order(expected)
    for job in again:
        made.take_report(RankReport(stored={job.number: 1}))
    assert not made.has_pending_push_work()


def test_terms_end_with_their_request() -> None:
    made, pool = pooled(128)
    computed(made, pool)
    made.build_plan(Step())
    others = [Request(str(number), list(range(900 + 10 * number, 910 + 10 * number))) for number in range(len(said()))]
    for other in others:
        run(made, pool, other, 10)
    for other in others:
        made.request_finished(other)
    assert {job.retention for job in made.build_plan(Step()).stores} == {DEFAULT_RETENTION}


def test_requests_that_are_considered_together_are_told_apart() -> None:
    made, pool = pooled(128)
    requests = said()
    for request in requests.values():
        made.on_new_request(request)
        run(made, pool, request, 13)
    jobs = made.build_plan(Step({request.request_id: 1 for request in requests.values()})).stores
    assert by_retention(jobs) == {retention: request.block_hashes for retention, request in requests.items()}


def test_what_is_computed_without_a_daemon_is_stored_later_with_its_terms() -> None:
    pool = TinyPool(128)
    made = side(pool=pool)
    expected = computed(made, pool)
    made.take_report(ATTACHED)
    assert in_any_order(by_retention(made.build_plan(Step()).stores)) == in_any_order(expected)
