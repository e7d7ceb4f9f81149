"""Calls that nobody waits for: each is made, in order, whatever the others do, and none in the step that gave it."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from kvsidecar.integrations.vllm.background import Background

SECONDS = 30.0


def come_to_rest(background: Background) -> None:
    deadline = time.monotonic() + SECONDS
    while background.busy:
        assert time.monotonic() < deadline
        background.step()
        time.sleep(0.001)


def test_calls_are_made_in_order_and_busy_until_the_last_has_ended() -> None:
    background, made, go = Background(), [], threading.Event()
    assert not background.busy
    background(lambda: made.append(go.wait(SECONDS)))
    for number in range(100):
        background(lambda number=number: made.append(number))
    for _ in range(2):
        background.step()
    assert background.busy
    assert not made
    go.set()
    come_to_rest(background)
    assert made == [True, *range(100)]
    background.close()


def test_a_call_begins_in_the_step_behind_the_one_that_gave_it() -> None:
    background, begun = Background(), [threading.Event(), threading.Event()]
    background(begun[0].set)
    background.step()
    background(begun[1].set)
    assert not begun[0].wait(0.02)
    background.step()
    assert begun[0].wait(SECONDS)
    assert not begun[1].wait(0.02)
    background.step()
    assert begun[1].wait(SECONDS)
    background.close()


def test_each_call_is_made_once_in_whatever_steps_they_are_given() -> None:
    background, made = Background(), []
    for number in range(100):
        background(lambda number=number: made.append(number))
        for _ in range(number % 4):
            background.step()
    come_to_rest(background)
    assert made == list(range(100))
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


def test_close_ends_the_thread_behind_what_was_begun_and_no_other_call_begins() -> None:
    background, made = Background(), []
    background(lambda: made.append(threading.current_thread()))
    come_to_rest(background)
    background(lambda: made.append(threading.current_thread()))
    background.close()
    made[0].join(SECONDS)
    assert not made[0].is_alive()
    assert len(made) == 1
