"""Large lookups take turns."""

from __future__ import annotations

import asyncio

from kvsidecar.server.turns import Turns


async def test_one_user_has_one_turn_each_time_the_loop_goes_round_and_others_have_theirs() -> None:
    turns = Turns()
    done: list[tuple[int, str]] = []
    rounds = 0

    async def work(user: str) -> None:
        await turns.wait(user)
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
    turns = Turns()
    await turns.wait("u")
    next_one, cancelled, last = (asyncio.create_task(turns.wait("u")) for _ in range(3))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait_for(last, 10)
    assert next_one.done()
    assert cancelled.cancelled()
