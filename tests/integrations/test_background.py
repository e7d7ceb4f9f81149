"""Calls that nobody waits for: each is made, in order, whatever the others do."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from kvsidecar.integrations.vllm.background import PAUSE_SECONDS, Background

SECONDS = 30.0


def come_to_rest(background: Background) -> None:
    deadline = time.monotonic() + SECONDS
    while background.busy:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_calls_are_made_in_order_and_busy_until_the_last_has_ended() -> None:
    background, made, go = Background(), [], threading.Event()
    assert not background.busy
    background(lambda: made.append(go.wait(SECONDS)))
    for number in range(100):
        background(lambda number=number: made.append(number))
    assert background.busy
    assert not made
    go.set()
    come_to_rest(background)
    assert made == [True, *range(100)]
    background.close()


def test_a_call_that_fails_is_logged_and_the_next_is_made(caplog: pytest.LogCaptureFixture) -> None:
    background, made = Background(), []
    with caplog.at_level(logging.ERROR):
        background(lambda: made.append(1 // 0))
        background(lambda: made.append(2))
        come_to_rest(background)
    assert made == [2]
    assert "ZeroDivisionError" in caplog.text
    background.close()


def test_close_ends_the_thread_behind_what_was_given() -> None:
    background, made = Background(), []
    background(lambda: made.append(threading.current_thread()))
    background.close()
    come_to_rest(background)
    made[0].join(SECONDS)
    assert not made[0].is_alive()


def test_the_first_call_begins_when_the_step_that_gave_it_may_be_over_and_the_next_ones_at_once() -> None:
    background, begun = Background(), []
    for _ in range(100):
        background(lambda: begun.append(time.monotonic()))
    given = time.monotonic()
    come_to_rest(background)
    assert begun[0] - given > PAUSE_SECONDS / 2
    assert begun[-1] - begun[0] < 100 * PAUSE_SECONDS
    background.close()
