"""What requests say of the times of their blocks reaches the daemon with their stores."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from kvsidecar.integrations.vllm.counters import Counters
from kvsidecar.integrations.vllm.metadata import RankReport
from kvsidecar.integrations.vllm.options import Options
from kvsidecar.integrations.vllm.terms import DEFAULT_TERMS, SHORTEST, Terms, terms_of
from kvsidecar.types import MAX_IDLE_SECONDS
from tests.integrations.engine import Clock, Request, Step, pooled, run, stored_hashes


@dataclass(eq=False)
class Timed(Request):
    """As vLLM's request."""

    kv_transfer_params: Any = None


def terms(params: Any) -> tuple[Terms, Counters]:
    counters = Counters()
    request = SimpleNamespace(kv_transfer_params=params, kv_hints=None)
    return terms_of(request, counters, Options()), counters


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({"ttl": 600}, Terms(ttl=600)),
        ({"idle_ttl": "1min"}, Terms(idle_ttl=60)),
        ({"ttl": 0.2, "idle_ttl": "1500ms"}, Terms(ttl=1, idle_ttl=2)),
        ({"ttl": None, "idle_ttl": 9e8}, Terms(idle_ttl=MAX_IDLE_SECONDS)),
        ({}, Terms()),
        ({"ttl": 60, "pause": "soon"}, Terms(ttl=60)),
    ],
)
def test_a_request_bounds_how_long_its_blocks_are_kept(times: Any, expected: Terms) -> None:
    found, counters = terms({"kvsidecar": times, "another's": {"ttl": "?"}})
    assert found == expected
    assert (counters.ttl_requests, counters.bad_ttls) == (1, 0)


@pytest.mark.parametrize(
    "times", [{"ttl": "soon"}, {"ttl": 0}, {"ttl": True}, {"ttl": 10**400}, {"tttl": 5}, {"ttl": [1]}, 5, [], "ttl"]
)
def test_a_time_that_cannot_be_read_is_the_shortest_and_counted(times: Any) -> None:
    found, counters = terms({"kvsidecar": times})
    assert found == Terms(ttl=SHORTEST)
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
    found, counters = terms(params)
    assert (found, counters.ttl_requests) == (DEFAULT_TERMS, 0)


def test_requests_with_times_of_their_own_are_told_apart_also_when_they_are_stored_later() -> None:
    clock = Clock()
    made, pool = pooled(128, clock=clock)
    expected, requests = {}, []
    for number, times in enumerate(({"ttl": 5}, {"idle_ttl": 5}, {"ttl": 5, "idle_ttl": 5}, None)):
        tokens = list(range(100 * number, 100 * number + 13))
        request = Timed(str(number), tokens, kv_transfer_params={"kvsidecar": times})
        requests.append(request)
        made.on_new_request(request)
        run(made, pool, request, 13)
        expected[Terms(**(times or {}))] = request.block_hashes
    for request in requests:
        made.request_finished(request)
    assert not made._stores.terms, "a request that has ended is forgotten"
    jobs = made.build_plan(Step()).stores
    assert {job.terms: stored_hashes((job,)) for job in jobs} == expected
    numbers = frozenset(job.number for job in jobs)
    made.take_report(RankReport(stored=dict.fromkeys(numbers, 1), not_stored=numbers))
    clock.now += 100
    again = made.build_plan(Step()).stores
    assert {job.terms: sorted(stored_hashes((job,))) for job in again} == {
        each: sorted(found) for each, found in expected.items()
    }
