"""Many descriptors with news at once: a few of them in each iteration of the loop, and all of them in the end."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from functools import partial

from kvsidecar.support.poll_set import EVENTS, READABLE, WRITABLE, PollSet
from tests.harness import eventually_in_loop

PAIRS = 10 * EVENTS


async def test_a_few_have_their_turn_in_each_turn_of_the_loop() -> None:
    poll_set, iteration = PollSet(), 0
    calls, of = Counter[int](), Counter[int]()
    pairs = [socket.socketpair() for _ in range(PAIRS)]

    def tick() -> None:
        nonlocal iteration
        iteration += 1
        asyncio.get_running_loop().call_soon(tick)

    def readable(number: int, _events: int) -> None:
        calls[iteration] += 1
        of[number] += 1

    for number, (near, far) in enumerate(pairs):
        poll_set.watch(near.fileno(), READABLE, partial(readable, number))
        far.send(b"x")
    tick()
    await eventually_in_loop(lambda: len(of) == PAIRS)
    assert max(calls.values()) <= EVENTS
    assert max(of.values()) <= min(of.values()) + 1, "some are served before others"
    poll_set.close()
    for pair in pairs:
        for each in pair:
            each.close()


async def test_what_is_watched_no_more_is_not_called() -> None:
    poll_set, seen = PollSet(), list[str]()
    (one, _far), (two, _end) = socket.socketpair(), socket.socketpair()
    both = {"one": one, "two": two}

    def called(name: str, events: int) -> None:
        seen.append(name)
        assert events & WRITABLE
        for each in both.values():
            poll_set.watch(each.fileno(), 0, partial(called, name))

    for name, each in both.items():
        poll_set.watch(each.fileno(), READABLE | WRITABLE, partial(called, name))
    await eventually_in_loop(lambda: seen)
    await asyncio.sleep(0.05)
    assert len(seen) == 1

    def closes(_events: int) -> None:
        seen.append("again")
        poll_set.close()

    poll_set.watch(one.fileno(), WRITABLE, closes)
    await eventually_in_loop(lambda: len(seen) == 2)
    poll_set.close()
    for each in (one, two, _far, _end):
        each.close()
