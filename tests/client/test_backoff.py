"""Delays between attempts: pure."""

from __future__ import annotations

import pytest

from kvsidecar.client import Backoff


def test_delays_grow_to_the_longest_and_stay_there() -> None:
    backoff = Backoff(0.1, 1.0, jitter=0)
    assert [backoff.next() for _ in range(6)] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0])


def test_jitter_shortens_a_delay_and_never_lengthens_it() -> None:
    numbers = iter([0.0, 0.5, 0.999])
    backoff = Backoff(1.0, 1.0, jitter=0.5, random=lambda: next(numbers))
    assert [backoff.next() for _ in range(3)] == pytest.approx([1.0, 0.75, 0.5005])


def test_engines_that_lose_a_daemon_together_do_not_come_back_together() -> None:
    assert len({Backoff().next() for _ in range(20)}) == 20


def test_after_a_success_the_delays_begin_again() -> None:
    backoff = Backoff(0.1, 1.0, jitter=0)
    for _ in range(5):
        backoff.next()
    backoff.reset()
    assert backoff.next() == 0.1


@pytest.mark.parametrize("bad", [{"first": 0}, {"first": 2, "longest": 1}, {"factor": 0.5}, {"jitter": 1.1}])
def test_numbers_that_make_no_backoff_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="backoff needs"):
        Backoff(**bad)
