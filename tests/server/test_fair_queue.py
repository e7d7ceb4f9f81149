"""Large lookups take turns."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from kvsidecar.server import fair_queue as module
from kvsidecar.server.fair_queue import FairQueue


async def test_one_user_has_one_turn_each_time_the_loop_goes_round_and_others_have_theirs() -> None:
    queue = FairQueue()
    done: list[tuple[int, str]] = []
    rounds = 0

    async def work(user: str) -> None:
        await queue.wait(user)
        done.append((rounds, user))

    tasks = [asyncio.create_task(work("many")) for _ in range(5)] + [asyncio.create_task(work("one"))]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        rounds += 1
        assert rounds < 100
    at = {user: [round_ for round_, of in done if of == user] for user in ("many", "one")}
    assert len(set(at["many"])) == 5, f"some of one user's ran in one round: {at}"
    assert at["one"] == at["many"][:1], "another user waits for the first one's"


async def test_a_turn_that_nobody_wants_any_more_goes_to_the_next() -> None:
    queue = FairQueue()
    await queue.wait("u")
    next_one, cancelled, last = (asyncio.create_task(queue.wait("u")) for _ in range(3))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait_for(last, 10)
    assert next_one.done()
    assert cancelled.cancelled()


async def test_a_user_who_asks_again_at_once_leaves_a_part_of_the_time_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also when none of the user's lookups waits at the end of a turn, since gRPC has not handed over the next."""
    now = 100.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))  # the loop has its own
    queue = FairQueue()
    pauses = 0
    for _ in range(100):
        turn = asyncio.ensure_future(queue.wait("u"))
        await asyncio.sleep(0)
        if not turn.done():
            pauses += 1
            await turn
            now += module.PAUSE_SECONDS
        now += 0.002
        await asyncio.sleep(0)  # the turn is over
    assert pauses >= 0.9 * 100 * module.PAUSE_SHARE * 0.002 / module.PAUSE_SECONDS
