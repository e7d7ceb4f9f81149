"""What one user sends takes a bounded time of each iteration of the loop."""

from __future__ import annotations

import asyncio
from functools import partial

from kvsidecar.support.user_time import UserTime
from tests.clock import Clock

SECONDS = 1.0


class Work:
    """Requests of users, each of which takes a while."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.users = UserTime(self.clock, SECONDS)
        self.done: list[str] = []

    def ask(self, user: str, request: str, seconds: float) -> None:
        if not self.users.left(user):
            self.users.later(user, partial(self.ask, user, request, seconds))
            return
        self.done.append(request)
        self.users.spend(user, seconds)


async def test_a_user_continues_in_the_next_iteration_when_the_time_is_used_up() -> None:
    work = Work()
    for request in "abcde":
        work.ask("one", request, SECONDS / 2)
    assert work.done == ["a", "b"]
    await asyncio.sleep(0)
    assert work.done == ["a", "b", "c", "d"]
    await asyncio.sleep(0)
    assert work.done == ["a", "b", "c", "d", "e"]


async def test_another_user_has_time_of_its_own() -> None:
    work = Work()
    for request in "abc":
        work.ask("one", request, SECONDS)
    work.ask("two", "x", SECONDS)
    assert work.done == ["a", "x"]
    await asyncio.sleep(0)
    assert work.done == ["a", "x", "b"]


async def test_who_comes_later_does_not_overtake() -> None:
    work = Work()
    for request in "abc":
        work.ask("one", request, SECONDS)
    await asyncio.sleep(0)
    work.ask("one", "d", 0.0)
    assert work.done == ["a", "b"]
    for _ in range(3):
        await asyncio.sleep(0)
    assert work.done == ["a", "b", "c", "d"]


async def test_short_requests_of_many_turns_do_not_add_up() -> None:
    work = Work()
    for number in range(100):
        work.ask("one", str(number), SECONDS / 10)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert work.done[-1] == str(number)


async def test_a_request_that_raises_holds_up_no_other() -> None:
    work = Work()
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))

    def bad() -> None:
        raise ValueError("bad")

    work.users.spend("one", SECONDS)
    work.users.later("one", bad)
    work.ask("one", "a", 0.0)
    work.users.spend("two", SECONDS)
    work.users.later("two", bad)
    work.users.spend("three", SECONDS)
    work.ask("three", "b", 0.0)
    for _ in range(4):
        await asyncio.sleep(0)
    assert sorted(work.done) == ["a", "b"]
    assert len(errors) == 2
