"""Turns: one in an iteration of the loop, so many in a second, and new connections among them."""

from __future__ import annotations

import asyncio

from kvsidecar.server.pace import BURST, CONNECTION_EVERY, RATE, Pace


async def test_each_has_an_iteration_of_its_own() -> None:
    pace, iterations, found = Pace(), 0, []
    for number in range(BURST // 2):
        pace.take(lambda number=number: found.append((number, iterations)))  # type: ignore[misc]
    while len(found) < BURST // 2:
        iterations += 1
        await asyncio.sleep(0)
    assert [number for number, _ in found] == list(range(BURST // 2)), "not in order"
    assert len({iteration for _, iteration in found}) == BURST // 2, "several in one iteration"


async def test_a_flood_is_spread_over_time() -> None:
    pace, loop = Pace(), asyncio.get_running_loop()
    count = BURST + 100
    began = loop.time()
    for _ in range(count - 1):
        pace.take(lambda: None)
    await pace.wait()
    assert loop.time() - began >= 0.9 * (count - BURST) / RATE


async def test_new_connections_are_not_kept_out() -> None:
    pace, found = Pace(), []
    for _ in range(40):
        pace.take(lambda: found.append("request"))
    for _ in range(3):
        pace.take(lambda: found.append("connection"), connection=True)
    await pace.wait()
    assert [index for index, what in enumerate(found, 1) if what == "connection"] == [
        CONNECTION_EVERY * each for each in (1, 2, 3)
    ]


async def test_who_does_not_wait_any_more_is_passed_over() -> None:
    pace = Pace()
    gone = asyncio.ensure_future(pace.wait())
    await asyncio.sleep(0)
    gone.cancel()
    await pace.wait()


async def test_what_fails_keeps_nobody_from_a_turn() -> None:
    pace, errors = Pace(), []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))
    pace.take(lambda: 1 // 0)
    await pace.wait()
    assert [type(error) for error in errors] == [ZeroDivisionError]
