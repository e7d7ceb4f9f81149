"""Whose copy is the next one, for any sequence of submissions."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from kvsidecar.copier.fair_copies import MAX_REMEMBERED, FairCopies


@dataclass(eq=False)
class Copy:
    number: int
    session: int
    nbytes: int = 1
    weight: int = 1


def given_out(turns: FairCopies[Copy], count: int | None = None) -> list[int]:
    """The numbers of the next copies, each taken whole."""
    numbers: list[int] = []
    while turns and (count is None or len(numbers) < count):
        copy = next(iter(turns))
        turns.remove(copy)
        turns.charge(copy, copy.nbytes)
        numbers.append(copy.number)
    return numbers


def test_one_session_is_served_in_order() -> None:
    turns: FairCopies[Copy] = FairCopies()
    for number in range(5):
        turns.add(Copy(number, 1, 5 - number))
    assert given_out(turns) == [0, 1, 2, 3, 4]


def test_a_session_with_many_copies_does_not_delay_another_by_more_than_one() -> None:
    turns: FairCopies[Copy] = FairCopies()
    for number in range(100):
        turns.add(Copy(number, 1))
    assert given_out(turns, 10) == list(range(10))
    turns.add(Copy(1000, 2))
    assert 1000 in given_out(turns, 2)


def test_turns_are_counted_in_bytes() -> None:
    turns: FairCopies[Copy] = FairCopies()
    for number in range(10):
        turns.add(Copy(number, 1, 4))
        turns.add(Copy(100 + number, 2, 1))
    first = given_out(turns, 10)
    assert sum(number >= 100 for number in first) == 8


def test_a_session_has_turns_by_its_weight() -> None:
    turns: FairCopies[Copy] = FairCopies()
    for number in range(40):
        turns.add(Copy(number, 1, 8))
        turns.add(Copy(100 + number, 2, 8, weight=3))
    first = given_out(turns, 40)
    assert sum(number >= 100 for number in first) == 30
    assert given_out(turns)[-26:] == list(range(14, 40)), "without another one it has all turns"


def test_nobody_saves_up_turns() -> None:
    turns: FairCopies[Copy] = FairCopies()
    turns.add(Copy(0, 2))
    for number in range(1, 101):
        turns.add(Copy(number, 1))
    given_out(turns, 51)
    for number in range(200, 300):
        turns.add(Copy(number, 2))
    assert sum(number >= 200 for number in given_out(turns, 20)) <= 11


def test_a_session_that_submits_one_at_a_time_has_no_more_turns_than_its_share() -> None:
    """It is never queued when it is charged: what it had is remembered."""
    turns: FairCopies[Copy] = FairCopies()
    for number in range(100):
        turns.add(Copy(number, 1))
    greedy = 0
    turns.add(Copy(1000, 2, 10))
    for _ in range(40):
        (number,) = given_out(turns, 1)
        if number >= 1000:
            greedy += 1
            turns.add(Copy(1000 + greedy, 2, 10))
    assert greedy <= 5


def test_what_was_put_back_is_the_first_of_its_session_and_not_paid_twice() -> None:
    turns: FairCopies[Copy] = FairCopies()
    for copy in (Copy(1, 1, 10), Copy(2, 1, 10), Copy(3, 2, 10)):
        turns.add(copy)
    first = next(iter(turns))
    turns.remove(first)
    turns.charge(first, first.nbytes)
    assert turns.others_first(1)
    turns.charge(first, -first.nbytes)
    turns.put_back(first)
    assert not turns.others_first(1)
    assert given_out(turns) == [1, 3, 2]


def test_what_is_remembered_of_idle_sessions_is_bounded() -> None:
    turns: FairCopies[Copy] = FairCopies()
    for number in range(10_000):
        turns.add(Copy(number, number))
        given_out(turns)
    assert len(turns._tags) <= MAX_REMEMBERED + 1


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 50)), min_size=1, max_size=60))
def test_all_come_out_once_in_the_order_of_their_session_and_by_fair_shares(copies: list[tuple[int, int]]) -> None:
    turns: FairCopies[Copy] = FairCopies()
    for number, (session, nbytes) in enumerate(copies):
        turns.add(Copy(number, session, nbytes))
    largest = max(nbytes for _, nbytes in copies)
    left = {session: sum(n for s, n in copies if s == session) for session, _ in copies}
    had = dict.fromkeys(left, 0)
    order = []
    while turns:
        (number,) = given_out(turns, 1)
        order.append(number)
        session, nbytes = copies[number]
        had[session] += nbytes
        left[session] -= nbytes
        waiting = [had[each] for each in left if left[each]]
        assert not waiting or max(had[session] - min(waiting), 0) <= largest
    assert sorted(order) == list(range(len(copies)))
    for session in left:
        own = [number for number in order if copies[number][0] == session]
        assert own == sorted(own)
