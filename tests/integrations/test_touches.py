"""Blocks of a request that has ended are used once more, when its last ones are stored."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvsidecar.errors import ClientError
from kvsidecar.integrations.vllm import touches
from tests.integrations.engine import EPOCH, Clock, Request, Step, TinyDaemon, TinyPool
from tests.integrations.test_scheduler import attached, run


def ended(count: int, **kwargs: object) -> tuple[Callable[[], None], TinyDaemon, Clock, list[Request]]:
    """Requests that have ended; a call is a step of the engine."""
    pool, daemon, clock = TinyPool(64), TinyDaemon(), Clock()
    made = attached(pool=pool, daemon=daemon, clock=clock, **kwargs)
    requests = [Request(f"r{number}", list(range(9 + 4 * number))) for number in range(count)]
    for request in requests:
        run(made, pool, request, 8)
        made.request_finished(request)
    return lambda: made.build_plan(Step()) and None, daemon, clock, requests  # type: ignore[func-returns-value]


def test_all_blocks_of_a_request_are_touched_once_a_while_after_its_end() -> None:
    step, daemon, clock, (request,) = ended(1)
    step()
    assert daemon.touched == []
    clock.now += touches.AFTER_SECONDS
    for _ in range(3):
        step()
    assert daemon.touched == [{0: b"".join(request.block_hashes[:2])}]


def test_a_step_touches_one_request_and_of_very_many_those_that_ended_first_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(touches, "MAX_WAITING", 2)
    step, daemon, clock, requests = ended(3)
    clock.now += touches.AFTER_SECONDS
    step()
    assert len(daemon.touched) == 1
    step()
    step()
    assert [len(each[0]) // 32 for each in daemon.touched] == [
        (len(request.all_token_ids) - 1) // 4 for request in requests[1:]
    ]


def test_of_a_long_request_the_head_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(touches, "MAX_HASHES", 1)
    step, daemon, clock, (request,) = ended(1)
    clock.now += touches.AFTER_SECONDS
    step()
    assert daemon.touched == [{0: request.block_hashes[0]}]


def test_a_touch_that_is_refused_disturbs_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    step, daemon, clock, _ = ended(1)
    clock.now += touches.AFTER_SECONDS

    def refuse(*_: object) -> None:
        raise ClientError("refused")

    monkeypatch.setattr(daemon, "touch_nowait", refuse)
    step()
    assert daemon.epoch == EPOCH


def test_after_a_reset_nothing_of_before_is_touched() -> None:
    pool, daemon, clock = TinyPool(64), TinyDaemon(), Clock()
    made = attached(pool=pool, daemon=daemon, clock=clock)
    request = Request("r", list(range(9)))
    run(made, pool, request, 8)
    made.request_finished(request)
    made.reset_cache()
    clock.now += touches.AFTER_SECONDS
    made.build_plan(Step())
    assert daemon.touched == []
