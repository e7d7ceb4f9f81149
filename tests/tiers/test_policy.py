"""Budgets and estimates."""

from __future__ import annotations

from kvsidecar.tiers.policy import DAY_SECONDS, GUESSED_PREFILL, Estimate, WriteBudget


def test_a_budget_is_spent_and_grows_again_within_a_day() -> None:
    budget = WriteBudget(1000, now=0.0)
    assert budget.take(900, 0.0)
    assert not budget.take(101, 0.0)
    assert budget.left(0.0) == 100
    assert budget.left(DAY_SECONDS / 2) == 600
    assert budget.left(9 * DAY_SECONDS) == 1000, "what was left on one day is not left on the next"
    assert not budget.take(1001, 9 * DAY_SECONDS)


def test_without_a_limit_everything_may_be_written() -> None:
    budget = WriteBudget(None, now=0.0)
    assert budget.take(1 << 60, 0.0)
    assert budget.left(0.0) is None


def test_a_fetch_is_worth_it_if_it_beats_the_computation_with_what_waits_before_it() -> None:
    def worth_it(waiting_bytes: int, prefill_rate: float) -> bool:
        return Estimate(1000, waiting_bytes, 1000.0, tokens=100, prefill_rate=prefill_rate).worth_it

    assert worth_it(0, 99.0)
    assert not worth_it(0, 101.0)
    assert not worth_it(100, 99.0)
    assert Estimate(1, 0, 1e9, int(GUESSED_PREFILL), 0.0).worth_it, "an engine that does not say is guessed"
