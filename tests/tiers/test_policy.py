"""Budgets and estimates."""

from __future__ import annotations

import pytest

from kvsidecar.tiers.policy import DAY_SECONDS, GUESSED_PREFILL, GUESSED_RATE, Estimate, ReadRate, WriteBudget


def test_a_budget_is_spent_and_grows_again_within_a_day() -> None:
    budget = WriteBudget(1000, now=0.0)
    assert budget.take(3, 300, 0.0) == 3
    assert budget.take(1, 101, 0.0) == 0
    assert budget.left(0.0) == 100
    assert budget.left(DAY_SECONDS / 2) == 600
    assert budget.left(9 * DAY_SECONDS) == 1000, "what was left on one day is not left on the next"
    assert budget.take(1, 1001, 9 * DAY_SECONDS) == 0


def test_of_more_than_is_left_as_much_as_is_left_may_be_written() -> None:
    budget = WriteBudget(1000, now=0.0)
    assert budget.take(64, 300, 0.0) == 3
    assert budget.left(0.0) == 100


def test_what_others_have_spent_is_not_left() -> None:
    budget = WriteBudget(1000, now=0.0)
    budget.at_most(2000)
    assert budget.left(0.0) == 1000
    budget.at_most(300)
    budget.spend(500, 0.0)
    assert budget.left(0.0) == 0
    assert budget.take(1, 1, 0.0) == 0
    assert budget.left(DAY_SECONDS / 2) == 300


def test_without_a_limit_everything_may_be_written() -> None:
    budget = WriteBudget(None, now=0.0)
    assert budget.take(1 << 30, 1 << 30, 0.0) == 1 << 30
    assert budget.left(0.0) is None


def test_a_fetch_is_worth_it_if_it_beats_the_computation_with_what_waits_before_it() -> None:
    def worth_it(waiting_bytes: int, prefill_rate: float) -> bool:
        return Estimate(1000, waiting_bytes, 1000.0, tokens=100, prefill_rate=prefill_rate).worth_it

    assert worth_it(0, 99.0)
    assert not worth_it(0, 101.0)
    assert not worth_it(100, 99.0)
    assert Estimate(1, 0, 1e9, int(GUESSED_PREFILL), 0.0).worth_it, "an engine that does not say is guessed"


def test_the_rate_is_guessed_until_something_was_read() -> None:
    rate = ReadRate()
    assert rate.value == GUESSED_RATE
    rate.ended(100, began=1.0, now=3.0)
    assert rate.value == 50.0


@pytest.mark.parametrize("together", [1, 8])
def test_the_rate_is_that_of_all_calls_that_run_at_a_time(together: int) -> None:
    """Each call ends a second after the one before it, and began when ``together`` calls were left to end."""
    rate = ReadRate()
    for end in range(10, 60):
        rate.ended(100, began=end - together, now=end)
    assert rate.value == pytest.approx(100.0, rel=0.01)


def test_time_in_which_nothing_was_read_does_not_count_and_old_reads_count_little() -> None:
    rate = ReadRate()
    for end in range(1, 50):
        rate.ended(100, began=end - 1, now=end)
    for end in range(1000, 1050):
        rate.ended(100, began=end - 0.5, now=end - 0.25)
    assert rate.value == pytest.approx(400.0, rel=0.01)
