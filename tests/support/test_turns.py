"""Turns of the loop between users: one after the other, and none longer than its share."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable

import pytest

from kvsidecar.support.loop_time import SECONDS, LoopTime
from kvsidecar.support.turns import BURST_SECONDS, FEW, SHARE, Turns
from tests.clock import Clock


async def turn_of_the_loop() -> None:
    await asyncio.sleep(0)
    await asyncio.sleep(0)


async def test_users_alternate_however_many_steps_one_of_them_has() -> None:
    clock = Clock()
    turns = Turns(LoopTime(clock))
    taken: list[str] = []

    def step(user: str) -> None:
        taken.append(user)
        clock.now += SECONDS / 2 + 1e-6

    for _ in range(10):
        turns.take("greedy", lambda: step("greedy"))
    for _ in range(3):
        turns.take("other", lambda: step("other"))
    await asyncio.sleep(0)
    assert taken == ["greedy", "other"], "as many as fit into a turn"
    while len(taken) < 13:
        await turn_of_the_loop()
    first_of_other = taken.index("other")
    assert first_of_other <= 3
    last_of_other = 12 - taken[::-1].index("other")
    assert last_of_other <= 9, taken


async def test_a_step_may_take_further_ones_of_its_user() -> None:
    turns = Turns(LoopTime(Clock()))
    taken: list[int] = []

    def step(number: int) -> None:
        taken.append(number)
        turns.charge("user", 0.0)
        if number in (0, 1):
            turns.take("user", functools.partial(step, 10 + number))

    failed: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
    for number in range(2):
        turns.take("user", functools.partial(step, number))
    for _ in range(20):
        await turn_of_the_loop()
    assert not failed
    assert sorted(taken) == [0, 1, 10, 11]


async def test_the_step_that_ends_its_turn_is_its_last_one() -> None:
    turns = Turns(LoopTime(Clock()))
    taken: list[int] = []

    def step(number: int) -> None:
        taken.append(number)
        turns.charge("user", 0.0)

    for number in range(3):
        turns.take("user", functools.partial(step, number))
    await asyncio.sleep(0)
    assert taken == [0]
    while len(taken) < 3:
        await turn_of_the_loop()
    assert taken == [0, 1, 2]


async def test_who_has_used_more_than_a_burst_waits_for_its_share_and_others_do_not() -> None:
    clock = Clock()
    turns = Turns(LoopTime(clock))
    taken: list[str] = []

    def long_step() -> None:
        taken.append("greedy")
        clock.now += BURST_SECONDS

    turns.take("greedy", long_step)
    await turn_of_the_loop()
    turns.take("greedy", long_step)
    turns.take("other", lambda: taken.append("other"))
    for _ in range(5):
        await turn_of_the_loop()
    assert taken == ["greedy", "other"]
    clock.now += BURST_SECONDS / SHARE
    async with asyncio.timeout(60):
        while len(taken) < 3:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.001)
    assert taken == ["greedy", "other", "greedy"]


@pytest.mark.parametrize(("share", "burst_seconds"), [(SHARE, BURST_SECONDS), (5 / 6, 0.001)])
async def test_who_asks_again_at_once_leaves_the_rest_of_its_share_to_others(
    share: float, burst_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when none of its steps waits at the end of one, since gRPC has not handed over the next call."""
    clock, loop = Clock(), asyncio.get_running_loop()
    rests: list[float] = []

    def rest(seconds: float, call: Callable[..., None], *arguments: object) -> None:
        rests.append(seconds)
        clock.now += seconds
        loop.call_soon(call, *arguments)

    monkeypatch.setattr(loop, "call_later", rest)
    turns, steps, seconds = Turns(LoopTime(clock), share=share, burst_seconds=burst_seconds), 100, 0.002

    def step() -> None:
        clock.now += seconds

    for _ in range(steps):
        await turns.run("user", step)
    owed = steps * seconds * (1 / share - 1)
    assert 0 <= owed - sum(rests) <= burst_seconds + seconds * (1 / share - 1) + 1e-9


async def test_calls_of_one_user_run_in_turns_of_the_loop_and_another_waits_for_one_of_them() -> None:
    clock = Clock()
    turns = Turns(LoopTime(clock))
    done: list[tuple[int, str]] = []
    rounds = 0

    def call(user: str) -> None:
        done.append((rounds, user))
        clock.now += SECONDS

    tasks = [asyncio.create_task(turns.run("many", functools.partial(call, "many"))) for _ in range(5)]
    tasks.append(asyncio.create_task(turns.run("one", functools.partial(call, "one"))))
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        rounds += 1
        assert rounds < 100
    assert len({round_ for round_, _ in done}) == 6, f"two ran in one round: {done}"
    assert [user for _, user in done].index("one") <= 1, "another user waits for the first one's"


async def test_a_call_that_nobody_waits_for_any_more_is_not_made() -> None:
    turns = Turns(LoopTime(Clock()))
    made: list[int] = []
    first, cancelled, last = (
        asyncio.create_task(turns.run("u", functools.partial(made.append, number))) for number in range(3)
    )
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait_for(last, 10)
    assert first.done()
    assert cancelled.cancelled()
    assert made == [0, 2]


async def test_what_a_call_returns_or_raises_reaches_who_waits_for_it() -> None:
    turns = Turns(LoopTime(Clock()))
    assert await turns.run("u", lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await turns.run("u", lambda: 1 // 0)


async def test_a_step_that_fails_does_not_hold_up_the_others() -> None:
    turns = Turns(LoopTime(Clock()))
    taken: list[int] = []
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: errors.append(context["exception"]))

    def bad() -> None:
        raise ZeroDivisionError

    turns.take("a", lambda: turns.charge("a", 0.0))
    turns.take("a", bad)
    turns.take("a", lambda: taken.append(1))
    while not taken:
        await turn_of_the_loop()
    assert isinstance(errors[0], ZeroDivisionError)


async def test_what_a_step_causes_is_charged_to_its_user_and_ends_the_turn() -> None:
    clock = Clock()
    turns = Turns(LoopTime(clock))
    taken: list[str] = []

    def caused(user: str, seconds: float) -> None:
        turns.charge(user, seconds)
        taken.append(user)

    turns.take("greedy", functools.partial(caused, "greedy", BURST_SECONDS))
    turns.take("other", functools.partial(caused, "other", SECONDS))
    await asyncio.sleep(0)
    assert taken == ["greedy"], "the first has ended the turn"
    turn = asyncio.get_running_loop().create_future()
    turns.take("other", lambda: turn.set_result(None))
    await turn
    turns.take("greedy", lambda: taken.append("greedy"))
    for _ in range(5):
        await turn_of_the_loop()
    assert taken == ["greedy", "other"], "the burst is used up"
    clock.now += BURST_SECONDS / SHARE
    async with asyncio.timeout(60):
        while len(taken) < 3:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.001)


async def test_what_a_step_says_that_it_has_caused_is_charged_too() -> None:
    clock = Clock()
    turns = Turns(LoopTime(clock))
    taken: list[str] = []
    turns.take("greedy", lambda: turns.charge("greedy", BURST_SECONDS))
    turns.take("greedy", lambda: taken.append("greedy"))
    turns.take("other", lambda: taken.append("other"))
    for _ in range(5):
        await turn_of_the_loop()
    assert taken == ["other"]


async def test_who_has_paid_for_all_is_forgotten_and_who_has_not_is_not() -> None:
    clock = Clock()
    turns = Turns(LoopTime(clock))
    for number in range(4 * FEW):
        turns.take(number, lambda: None)
        await turn_of_the_loop()
        clock.now += 1.0
    assert len(turns._users) <= FEW + 1

    def step() -> None:
        clock.now += 1.0

    turns.take("greedy", step)
    for number in range(2 * FEW):
        await turn_of_the_loop()
        turns.take(number, lambda: None)
    assert "greedy" in turns._users
