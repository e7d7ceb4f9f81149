"""Turns: one in an iteration of the loop, so many in a second, and new connections among them."""

from __future__ import annotations

import asyncio

from kvsidecar.server.tcp_turns import BURST, CONNECTION_EVERY, RATE, TcpTurns


async def test_each_has_an_iteration_of_its_own() -> None:
    turns, iterations, found = TcpTurns(), 0, []
    for number in range(BURST // 2):
        turns.take(lambda number=number: found.append((number, iterations)))  # type: ignore[misc]
    while len(found) < BURST // 2:
        iterations += 1
        await asyncio.sleep(0)
    assert [number for number, _ in found] == list(range(BURST // 2)), "not in order"
    assert len({iteration for _, iteration in found}) == BURST // 2, "several in one iteration"


async def test_a_flood_is_spread_over_time() -> None:
    turns, loop = TcpTurns(), asyncio.get_running_loop()
    count = BURST + 100
    began = loop.time()
    for _ in range(count - 1):
        turns.take(lambda: None)
    await turns.wait()
    assert loop.time() - began >= 0.9 * (count - BURST) / RATE


async def test_new_connections_are_not_kept_out() -> None:
    turns, found = TcpTurns(), []
    for _ in range(40):
        turns.take(lambda: found.append("request"))
    for _ in range(3):
        turns.take(lambda: found.append("connection"), connection=True)
    await turns.wait()
    assert [index for index, what in enumerate(found, 1) if what == "connection"] == [
        CONNECTION_EVERY * each for each in (1, 2, 3)
    ]


async def test_who_does_not_wait_any_more_is_passed_over() -> None:
    turns = TcpTurns()
    gone = asyncio.ensure_future(turns.wait())
    await asyncio.sleep(0)
    gone.cancel()
    await turns.wait()


async def test_what_fails_keeps_nobody_from_a_turn() -> None:
    turns, errors = TcpTurns(), []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))
    turns.take(lambda: 1 // 0)
    await turns.wait()
    assert [type(error) for error in errors] == [ZeroDivisionError]
