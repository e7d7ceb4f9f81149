"""Steps take turns with everything else that the loop does."""

from __future__ import annotations

import asyncio
import socket
from functools import partial

import pytest

from kvsidecar.support.loop_time import LoopTime
from kvsidecar.support.steps import Steps


class Clock:
    """Steps take as long as they say."""

    def __init__(self) -> None:
        self.now = 100.0
        self.taken: list[int] = []
        self.steps = Steps(LoopTime(lambda: self.now, 1.0), call_seconds=50.0)
        self.steps.called()

    def ask(self, number: int, seconds: float) -> None:
        step = partial(self.take, number, seconds)
        if self.steps.may_begin():
            step()
        else:
            self.steps.later(step)

    def take(self, number: int, seconds: float) -> None:
        self.taken.append(number)
        self.now += seconds


async def test_a_long_step_is_the_only_one_of_its_turn() -> None:
    clock = Clock()
    for number in range(4):
        clock.ask(number, seconds=1.0)
    seen = []
    while len(clock.taken) < 4:
        seen.append(len(clock.taken))
        await asyncio.sleep(0)
    assert seen == [0, 1, 2, 3]
    assert clock.taken == [0, 1, 2, 3]


async def test_short_steps_share_a_turn() -> None:
    clock = Clock()
    for number in range(7):
        clock.ask(number, seconds=0.4)
    await asyncio.sleep(0)
    assert clock.taken == [0, 1, 2]
    await asyncio.sleep(0)
    assert clock.taken == [0, 1, 2, 3, 4, 5]
    await asyncio.sleep(0)
    assert clock.taken == [0, 1, 2, 3, 4, 5, 6]


async def test_a_new_step_waits_for_those_that_wait() -> None:
    clock = Clock()
    clock.ask(0, seconds=1.0)
    clock.ask(1, seconds=0.1)
    clock.now += 50.0  # no more calls are expected
    clock.ask(2, seconds=0.1)
    assert clock.taken == []
    await asyncio.sleep(0)
    assert clock.taken == [0, 1, 2]


async def test_a_socket_is_read_between_two_turns() -> None:
    clock, loop = Clock(), asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        seen = loop.create_future()
        loop.add_reader(ours, lambda: seen.done() or seen.set_result(len(clock.taken)))
        theirs.send(b"a lookup")
        for number in range(40):
            clock.ask(number, seconds=1.0)
        assert await seen <= 3
        loop.remove_reader(ours)


async def test_all_steps_begin_while_nobody_calls() -> None:
    clock = Clock()
    for number in range(3):
        clock.ask(number, seconds=1.0)
    assert clock.taken == []
    clock.now += 50.0
    await asyncio.sleep(0)
    assert clock.taken == [0, 1, 2]
    for number in range(3, 60):
        clock.ask(number, seconds=1.0)
    assert clock.taken == list(range(60))
    clock.steps.called()
    clock.ask(60, seconds=1.0)
    clock.ask(61, seconds=1.0)
    for count in (61, 62):
        assert clock.taken == list(range(count - 1))
        await asyncio.sleep(0)
        assert clock.taken == list(range(count))


@pytest.mark.filterwarnings("ignore")
async def test_a_step_that_raises_costs_no_other() -> None:
    clock, loop = Clock(), asyncio.get_running_loop()
    reported: list[str] = []
    loop.set_exception_handler(lambda _, context: reported.append(str(context["exception"])))

    def fail() -> None:
        raise ValueError("planned")

    clock.ask(0, seconds=1.0)
    clock.steps.later(fail)
    clock.ask(1, seconds=1.0)
    clock.ask(2, seconds=1.0)
    for _ in range(4):
        await asyncio.sleep(0)
    assert clock.taken == [0, 1, 2]
    assert reported == ["planned"]
