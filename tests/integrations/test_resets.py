from __future__ import annotations

import threading

import pytest

from kvsidecar.errors import DaemonUnreachable
from kvsidecar.integrations.vllm.resets import RETRY_SECONDS, Reset, State
from tests.harness import SECONDS
from tests.integrations.engine import Clock


class Daemon:
    def __init__(self) -> None:
        self.cleared, self.error, self.may_answer = 0, None, threading.Event()
        self.may_answer.set()

    def clear(self) -> None:
        assert self.may_answer.wait(SECONDS)
        if self.error is not None:
            raise self.error
        self.cleared += 1

    error: Exception | None


def settled(reset: Reset) -> State:
    while reset.state is State.CLEARING:
        reset.step(drained=True, attached=True)
    return reset.state


def test_a_daemon_that_is_slow_is_not_waited_for_longer_than_told_and_the_cache_stays_shut() -> None:
    daemon = Daemon()
    daemon.may_answer.clear()
    reset = Reset(daemon.clear, clock=Clock())

    assert reset.begin(drained=True, timeout=0.01) is True
    assert reset.state is State.CLEARING
    reset.step(drained=True, attached=True)
    assert reset.state is State.CLEARING
    daemon.may_answer.set()
    assert settled(reset) is State.OPEN


def test_what_could_not_be_cleared_is_tried_again_when_ranks_are_attached(caplog: pytest.LogCaptureFixture) -> None:
    daemon, clock = Daemon(), Clock()
    daemon.error = DaemonUnreachable("nobody is there")
    reset = Reset(daemon.clear, clock=clock)

    assert reset.begin(drained=True, timeout=SECONDS) is True
    for attached in (False, True):
        clock.now += RETRY_SECONDS
        reset.step(drained=True, attached=attached)
        assert settled(reset) is State.FAILED
    assert caplog.text.count("nobody is there") == 1  # once, not for each attempt

    daemon.error = None
    reset.step(drained=True, attached=True)
    assert reset.state is State.FAILED  # not in every step
    clock.now += RETRY_SECONDS
    reset.step(drained=True, attached=True)
    assert settled(reset) is State.OPEN
    assert daemon.cleared == 1


def test_any_error_of_the_thread_is_heard(caplog: pytest.LogCaptureFixture) -> None:
    daemon = Daemon()
    daemon.error = RuntimeError("a bug")
    reset = Reset(daemon.clear, clock=Clock())

    reset.begin(drained=True, timeout=SECONDS)
    assert reset.state is State.FAILED
    assert "a bug" in caplog.text


def test_nothing_is_cleared_before_jobs_are_over() -> None:
    daemon = Daemon()
    reset = Reset(daemon.clear, clock=Clock())

    assert reset.begin(drained=False, timeout=SECONDS) is False
    reset.step(drained=False, attached=True)
    assert (reset.state, daemon.cleared) == (State.DRAINING, 0)
    reset.step(drained=True, attached=True)
    assert settled(reset) is State.OPEN
    assert daemon.cleared == 1
