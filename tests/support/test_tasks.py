from __future__ import annotations

import asyncio

import pytest

from kvsidecar.support import tasks as module
from kvsidecar.support.tasks import TaskSet
from tests.harness import SECONDS


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


async def test_a_part_that_lasts_begins_again_after_each_error_which_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AGAIN_SECONDS", 0.0)
    heard: list[tuple[str, str]] = []
    tasks = TaskSet(lambda name, error: heard.append((name, str(error))))
    begun, works = 0, asyncio.Event()

    async def part() -> None:
        nonlocal begun
        begun += 1
        if begun < 3:
            raise ValueError(f"broken {begun}")
        works.set()
        await asyncio.Event().wait()

    task = tasks.keep(part, name="part")
    async with asyncio.timeout(SECONDS):
        await works.wait()
    assert heard == [("part", "broken 1"), ("part", "broken 2")]
    await tasks.cancel()
    assert task.cancelled()
    assert len(heard) == 2


async def test_a_part_that_has_come_to_its_end_does_not_begin_again() -> None:
    tasks, begun = TaskSet(lambda *_: None), 0

    async def part() -> None:
        nonlocal begun
        begun += 1

    await asyncio.wait_for(tasks.keep(part, name="part"), SECONDS)
    assert (begun, len(tasks)) == (1, 0)


def test_a_call_that_fails_is_heard_and_keeps_no_other_from_being_made() -> None:
    heard: list[str] = []
    tasks = TaskSet(lambda name, error: heard.append(f"{name}: {type(error).__name__}"))
    made: list[str] = []
    for name, call in (("bad", lambda: 1 // 0), ("good", lambda: made.append("good"))):
        tasks.attempt(call, name=name)  # type: ignore[arg-type]
    assert (heard, made) == (["bad: ZeroDivisionError"], ["good"])
