"""What can wait shares an iteration of the event loop, and nobody who waits is forgotten."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Generator
from itertools import pairwise

import pytest

from kvsidecar.errors import InvalidRequest
from kvsidecar.support.loop_time import LoopTime
from kvsidecar.support.steps import Steps
from kvsidecar.support.turns import Turns


class Clock:
    """Steps take as long as they say."""

    def __init__(self) -> None:
        self.now = 100.0
        self.taken: list[str] = []

    def __call__(self) -> float:
        return self.now

    def take(self, name: str, seconds: float = 1.0) -> None:
        self.taken.append(name)
        self.now += seconds


async def test_all_kinds_of_steps_together_have_the_time_of_one_turn() -> None:
    clock = Clock()
    time = LoopTime(clock, 1.0)
    steps, turns = Steps(time, call_seconds=50.0), Turns(time)
    steps.called()
    assert not steps.may_begin()
    for _ in range(2):
        steps.later(lambda: clock.take("job"))
    for user in range(2):
        turns.take(user, lambda: clock.take("user"))
        time.later(lambda: clock.take("news"))
    seen = []
    while len(clock.taken) < 6:
        seen.append(len(clock.taken))
        await asyncio.sleep(0)
    assert seen == [0, 1, 2, 3, 4, 5], "one step per iteration"
    assert clock.taken == ["job", "user", "news", "job", "user", "news"], "they take turns"


async def test_a_step_that_ends_the_turn_does_so_for_all() -> None:
    clock = Clock()
    time = LoopTime(clock, 1.0)
    steps, turns = Steps(time, call_seconds=50.0), Turns(time)
    turns.take("user", lambda: turns.charge("user", 0.1))
    steps.later(lambda: clock.take("job"))
    await asyncio.sleep(0)
    assert clock.taken == []
    await asyncio.sleep(0)
    assert clock.taken == ["job"]


async def test_no_step_begins_before_all_sockets_are_read() -> None:
    time, loop = LoopTime(), asyncio.get_running_loop()
    ready, order, done = [socket.socketpair() for _ in range(4)], list[str](), loop.create_future()

    def read(ours: socket.socket) -> None:
        loop.remove_reader(ours)
        order.append("read")
        time.later(lambda: order.append("step"))
        time.later(lambda: done.done() or done.set_result(None))

    for ours, theirs in ready:
        theirs.send(b"a message")
        loop.add_reader(ours, read, ours)
    await done
    assert order[:5] == ["read"] * 4 + ["step"]
    for pair in ready:
        for each in pair:
            each.close()


async def test_of_many_who_wait_for_a_turn_one_comes_in_each() -> None:
    time, loop, turn = LoopTime(), asyncio.get_running_loop(), 0
    came: list[int] = []

    def tick() -> None:
        nonlocal turn
        turn += 1
        loop.call_soon(tick)

    async def wait() -> None:
        await time.turn()
        came.append(turn)

    tick()
    gone = asyncio.create_task(time.turn())
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(*(wait() for _ in range(20)))
    assert len(set(came)) == 20


@pytest.mark.filterwarnings("ignore")
async def test_a_step_that_raises_costs_neither_its_lane_nor_another_a_turn() -> None:
    clock, loop = Clock(), asyncio.get_running_loop()
    time = LoopTime(clock, 0.5)
    turns = Turns(time)
    reported: list[str] = []
    loop.set_exception_handler(lambda _, context: reported.append(str(context["exception"])))

    def fail() -> None:
        raise ValueError("planned")

    time.later(fail)
    time.later(lambda: clock.take("news"))
    turns.take("user", lambda: clock.take("user"))
    for _ in range(6):
        await asyncio.sleep(0)
    assert (sorted(clock.taken), reported) == (["news", "user"], ["planned"])


async def test_many_who_compute_take_turns_and_the_loop_goes_on_between_any_two_steps() -> None:
    time, order = LoopTime(seconds=0.0), list[str]()

    def steps(name: str, count: int) -> Generator[None, None, str]:
        for number in range(count):
            order.append(f"{name}{number}")
            yield
        return name

    async def bystander() -> None:
        while True:
            order.append("|")
            await asyncio.sleep(0)

    others = asyncio.create_task(bystander())
    await asyncio.sleep(0)
    assert await asyncio.gather(*(time.run(steps(*each)) for each in (("a", 20), ("b", 20), ("c", 1)))) == [*"abc"]
    others.cancel()
    taken = [each[0] for each in order]
    assert all("|" in pair for pair in pairwise(taken)), "two steps without a look at the others"
    assert order.index("c0") < order.index("a2"), "a short computation waits for a long one"


async def test_a_computation_that_fails_lets_the_others_have_their_turns() -> None:
    time = LoopTime()

    def fails() -> Generator[None, None, None]:
        yield
        raise InvalidRequest("no")

    def goes_on() -> Generator[None, None, int]:
        yield
        yield
        return 7

    outcomes = await asyncio.gather(time.run(fails()), time.run(goes_on()), return_exceptions=True)
    assert [type(outcomes[0]), outcomes[1]] == [InvalidRequest, 7]
    cancelled = asyncio.create_task(time.run(goes_on()))
    await asyncio.sleep(0)
    cancelled.cancel()
    assert await time.run(goes_on()) == 7


async def test_a_long_computation_leaves_nothing_to_the_garbage_collector() -> None:
    time = LoopTime()

    def steps() -> Generator[None, None, int]:
        yield
        yield
        return 3

    gc.collect()
    gc.disable()  # the daemon collects all of it every ten minutes only
    try:
        for _ in range(100):
            assert await time.run(steps()) == 3
        assert gc.collect() < 100
    finally:
        gc.enable()
