"""Requests are asked for when they arrive: no step waits for each of them in turn."""

from __future__ import annotations

from typing import Any

import pytest

from kvsidecar.errors import ClientError
from kvsidecar.integrations.vllm.early_lookups import EARLY_REQUESTS, EARLY_SECONDS
from kvsidecar.integrations.vllm.metadata import RankReport
from kvsidecar.integrations.vllm.scheduler import SchedulerSide
from tests.integrations.engine import EPOCH, Allocated, Clock, Request, Step, TinyDaemon, TinyPool, side


class Waited(TinyDaemon):
    """Counts the lookups that a step waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.waited = 0

    def lookup(self, *args: Any, **options: Any) -> Any:
        self.waited += options["timeout"] > 0
        return super().lookup(*args, **options)


@pytest.fixture
def daemon() -> Waited:
    return Waited()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def engine(daemon: Waited, clock: Clock) -> SchedulerSide:
    made = side(daemon=daemon, clock=clock, pool=TinyPool(64))
    made.take_report(RankReport(attached={0: EPOCH}))
    daemon.waited = 0
    return made


def request(name: str, blocks: int = 4) -> Request:
    return Request(name, list(range(4 * blocks + 1)))


def test_a_wave_of_requests_waits_for_no_answer(engine: SchedulerSide, daemon: Waited) -> None:
    wave = [request(f"r{i}") for i in range(20)]
    daemon.put(0, wave[0].block_hashes[:3])
    for each in wave:
        engine.on_new_request(each)
    assert [engine.get_num_new_matched_tokens(each, 0) for each in wave] == [(12, True)] * 20
    assert daemon.waited == 0
    assert len(daemon.leases) == 20


@pytest.mark.parametrize("local", [0, 4, 8, 12])
def test_the_answer_is_right_wherever_the_gpus_own_hit_ends(engine: SchedulerSide, daemon: Waited, local: int) -> None:
    asked = request("r")
    daemon.put(0, asked.block_hashes[1:3])  # the first was evicted; the GPU may have it
    engine.on_new_request(asked)
    tokens, _ = engine.get_num_new_matched_tokens(asked, local)
    assert tokens == {0: 0, 4: 8, 8: 4, 12: 0}[local]
    assert daemon.waited == 0
    engine.update_state_after_alloc(asked, Allocated([5, 6, 7, 8]), tokens)
    orders = engine.build_plan(Step())
    loaded = [each.hashes for job in orders.loads for each in job.blocks]
    assert loaded == ([b"".join(asked.block_hashes[local // 4 : 3])] if tokens else [])


def test_an_answer_that_is_too_old_is_given_up_and_asked_for_again(
    engine: SchedulerSide, daemon: Waited, clock: Clock
) -> None:
    asked, other = request("r"), request("s")
    daemon.put(0, asked.block_hashes[:2])
    engine.on_new_request(asked)
    engine.on_new_request(other)
    clock.now += EARLY_SECONDS
    daemon.put(0, asked.block_hashes[2:3])
    assert engine.get_num_new_matched_tokens(asked, 0) == (12, True)
    assert daemon.waited == 1
    engine.build_plan(Step())
    assert len(daemon.leases) == 1, "that of the request that vLLM has not asked for is dropped"


def test_a_request_that_goes_before_its_first_step_leaves_no_lease(engine: SchedulerSide, daemon: Waited) -> None:
    asked = request("r")
    daemon.put(0, asked.block_hashes)
    engine.on_new_request(asked)
    assert daemon.leases
    engine.request_finished(asked)
    assert not daemon.leases


def test_nothing_is_taken_over_from_another_run_of_the_daemon_or_other_weights(
    engine: SchedulerSide, daemon: Waited
) -> None:
    asked = request("r")
    daemon.put(0, asked.block_hashes)
    engine.on_new_request(asked)
    daemon.epoch += 1
    daemon.blocks.clear()
    engine.take_report(RankReport(attached={0: daemon.epoch}))
    assert not daemon.leases
    assert engine.get_num_new_matched_tokens(asked, 0) == (0, False)

    daemon.put(0, asked.block_hashes)
    again = request("s")
    engine.on_new_request(again)
    assert engine.reset_cache()
    assert engine.get_num_new_matched_tokens(again, 0) == (0, False)
    assert not daemon.leases


def test_a_request_that_has_grown_is_asked_for_again(engine: SchedulerSide, daemon: Waited) -> None:
    asked = request("r")
    engine.on_new_request(asked)
    asked.append(range(4))
    daemon.put(0, asked.block_hashes)
    assert engine.get_num_new_matched_tokens(asked, 0) == (20, True)


def test_only_so_many_are_asked_ahead(engine: SchedulerSide, daemon: Waited) -> None:
    wave = [request(f"r{i}") for i in range(EARLY_REQUESTS + 3)]
    for each in wave:
        engine.on_new_request(each)
        engine.on_new_request(each)
    for each in wave:
        engine.get_num_new_matched_tokens(each, 0)
    assert daemon.waited == 3


def test_a_daemon_that_cannot_be_asked_at_once_or_refuses_is_asked_in_the_step(
    engine: SchedulerSide, daemon: Waited, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise ClientError("too many hashes")

    for number, begin in enumerate((lambda *_, **__: None, refuses)):
        monkeypatch.setattr(daemon, "begin_lookup", begin)
        asked = request(f"r{number}")
        engine.on_new_request(asked)
        assert engine.get_num_new_matched_tokens(asked, 0) == (0, False)
        assert daemon.waited == number + 1


def test_a_request_that_must_not_read_or_has_no_whole_block_is_not_asked_for(
    engine: SchedulerSide, daemon: Waited
) -> None:
    daemon.asked.clear()
    engine.on_new_request(Request("r", list(range(9)), skip_reading_prefix_cache=True))
    engine.on_new_request(Request("s", list(range(4))))
    side(daemon=daemon).on_new_request(request("not attached"))
    assert not daemon.asked
