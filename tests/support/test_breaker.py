"""Delays between attempts, and the circuit breaker over a clock of the test's own."""

from __future__ import annotations

import pytest

from kvsidecar.client import Backoff, BreakerState, CircuitBreaker
from tests.clock import Clock


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


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> CircuitBreaker:
    return CircuitBreaker(failures=3, silence=0.0, backoff=Backoff(1.0, 4.0, jitter=0), clock=clock)


def opened(breaker: CircuitBreaker) -> CircuitBreaker:
    for _ in range(3):
        breaker.failed()
    assert breaker.state is BreakerState.OPEN
    return breaker


def test_it_opens_after_so_many_failures_in_a_row_and_says_so_once(breaker: CircuitBreaker) -> None:
    assert [breaker.failed() for _ in range(2)] == [False, False]
    assert breaker.allows
    assert breaker.failed()
    assert not breaker.allows
    assert not breaker.failed(), "a call from before it opened"


def test_waits_in_vain_count_only_when_the_silence_has_lasted(clock: Clock) -> None:
    breaker = CircuitBreaker(failures=2, silence=1.0, clock=clock)
    breaker.called()
    for _ in range(20):
        clock.now += 0.05 - 1e-9
        assert not breaker.failed()
        breaker.called()
    clock.now += 0.05
    assert [breaker.failed(), breaker.failed()] == [False, True]


def test_by_default_steps_of_five_milliseconds_do_not_open_it_for_a_quarter_of_a_second(clock: Clock) -> None:
    breaker = CircuitBreaker(clock=clock)
    breaker.called()
    for _ in range(49):
        clock.now += 0.005
        assert not breaker.failed()
    for _ in range(4):
        clock.now += 0.005
        breaker.failed()
    assert not breaker.allows


def test_an_answer_ends_the_silence(clock: Clock) -> None:
    breaker = CircuitBreaker(failures=1, silence=1.0, clock=clock)
    for _ in range(10):
        breaker.called()
        clock.now += 0.9
        assert not breaker.failed()
        breaker.succeeded()
    clock.now += 100.0
    breaker.called()  # nothing was asked in the meantime
    clock.now += 0.9
    assert not breaker.failed()
    clock.now += 0.1
    assert breaker.failed()


def test_the_silence_begins_when_one_of_several_calls_is_answered(clock: Clock) -> None:
    breaker = CircuitBreaker(failures=1, silence=1.0, clock=clock)
    breaker.called()
    breaker.called()
    clock.now += 5.0
    breaker.succeeded()
    clock.now += 5.0
    assert not breaker.failed(), "the other one may have been waited for only now"
    clock.now += 1.0
    assert breaker.failed()


def test_what_fails_surely_needs_no_silence(clock: Clock) -> None:
    breaker = CircuitBreaker(failures=1, silence=1.0, clock=clock)
    assert breaker.failed(surely=True)


def test_an_answer_in_between_begins_the_count_again(breaker: CircuitBreaker) -> None:
    for _ in range(5):
        breaker.failed()
        breaker.failed()
        breaker.succeeded()
    assert breaker.allows


def test_a_probe_is_due_after_the_backoff_and_only_one_at_a_time(breaker: CircuitBreaker, clock: Clock) -> None:
    assert breaker.probe_in() is None
    opened(breaker)
    assert breaker.probe_in() == 1.0
    assert not breaker.begin_probe()
    clock.now += 1.0
    assert breaker.probe_in() == 0.0
    assert breaker.begin_probe()
    assert breaker.state is BreakerState.HALF_OPEN
    assert not breaker.begin_probe()
    assert not breaker.allows, "while the probe is under way nobody else asks"
    assert breaker.probe_in() is None


def test_a_probe_that_is_answered_closes_it(breaker: CircuitBreaker, clock: Clock) -> None:
    opened(breaker)
    clock.now += 1.0
    assert breaker.begin_probe()
    assert breaker.succeeded()
    assert breaker.allows
    assert [breaker.failed() for _ in range(2)] == [False, False], "the count begins again"


def test_a_probe_that_is_not_answered_makes_the_next_one_wait_longer(breaker: CircuitBreaker, clock: Clock) -> None:
    opened(breaker)
    for wait in (1.0, 2.0, 4.0, 4.0):
        assert breaker.probe_in() == wait
        clock.now += wait
        assert breaker.begin_probe()
        assert not breaker.failed()
        assert breaker.state is BreakerState.OPEN


def test_an_answer_from_before_it_opened_does_not_close_it(breaker: CircuitBreaker) -> None:
    opened(breaker)
    assert not breaker.succeeded()
    assert not breaker.allows


def test_another_daemon_is_given_a_fresh_start(breaker: CircuitBreaker, clock: Clock) -> None:
    opened(breaker)
    breaker.reset()
    assert breaker.allows
    opened(breaker)
    assert breaker.probe_in() == 1.0


def test_a_breaker_that_never_closes_calls_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="at least one"):
        CircuitBreaker(failures=0)
