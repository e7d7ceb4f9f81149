from __future__ import annotations

import asyncio

from kvsidecar.support.tasks import TaskSet


async def test_a_failing_task_is_heard_and_does_not_end_its_siblings() -> None:
    heard: list[tuple[str, str]] = []
    tasks = TaskSet(lambda name, error: heard.append((name, str(error))))
    gate = asyncio.Event()

    async def fail() -> None:
        raise ValueError("broken")

    tasks.spawn(fail(), name="bad")
    sibling = tasks.spawn(gate.wait(), name="good")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert heard == [("bad", "broken")]
    assert not sibling.done()
    gate.set()
    assert await tasks.join() == 0
    assert len(tasks) == 0


async def test_join_says_how_many_tasks_it_left_running() -> None:
    tasks = TaskSet(lambda *_: None)
    gate = asyncio.Event()
    tasks.spawn(gate.wait(), name="slow")
    assert await tasks.join(timeout=0.01) == 1
    gate.set()
    assert await tasks.join() == 0


async def test_cancel_waits_for_the_ends_and_reports_no_error() -> None:
    heard: list[str] = []
    tasks = TaskSet(lambda name, _: heard.append(name))
    ended = asyncio.Event()

    async def run() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    tasks.spawn(run(), name="x")
    await asyncio.sleep(0)
    await tasks.cancel()
    assert ended.is_set()
    assert heard == []


async def test_a_task_may_join_the_set_that_owns_it() -> None:
    tasks = TaskSet(lambda *_: None)
    task = tasks.spawn(tasks.join(), name="self")
    assert await asyncio.wait_for(task, 30) == 0
