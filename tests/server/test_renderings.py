"""What is rendered when: for a reader who asks alone each time, for a crowd once in a second, never in one piece."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterator
from itertools import pairwise
from typing import Any

import pytest

from kvsidecar.server.renderings import CROWD_SECONDS, FEW, PAUSE, Rendering, Steps
from kvsidecar.support.loop_time import LoopTime
from kvsidecar.support.tasks import TaskSet

STEPS = 20
STEP_SECONDS = 0.001


class Figures:
    """What is rendered: how many renderings there were before. Each step takes `STEP_SECONDS` of its clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.begun: list[float] = []
        self.is_rendering = asyncio.Event()
        self.fails = False
        self.errors: list[BaseException] = []
        self.tasks = TaskSet(lambda _, error: self.errors.append(error))
        self.rendering = Rendering(
            self.steps,
            self.tasks,
            LoopTime(lambda: self.now),
            lambda: self.now,
        )

    def steps(self) -> Steps:
        self.begun.append(self.now)
        self.is_rendering.set()
        number = len(self.begun)
        for _ in range(STEPS):
            self.now += STEP_SECONDS
            if self.fails:
                raise ValueError("no figures")
            yield
        return b"%d" % number

    async def crowd(self, count: int = FEW + 1) -> list[bytes]:
        return await asyncio.gather(*(self.rendering.text() for _ in range(count)))


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Figures:
    """Pauses pass at once."""
    found, sleep = Figures(), asyncio.sleep

    async def pass_time(seconds: float) -> None:
        found.now += seconds
        await sleep(0)

    monkeypatch.setattr("kvsidecar.server.renderings.asyncio.sleep", pass_time)
    return found


async def test_who_asks_alone_gets_figures_of_after_the_question(figures: Figures) -> None:
    assert [await figures.rendering.text() for _ in range(5)] == [b"1", b"2", b"3", b"4", b"5"]
    pauses = [after - before for before, after in pairwise(figures.begun)]
    assert all(pause >= PAUSE * STEPS * STEP_SECONDS for pause in pauses), "a loop of its own has the daemon's"


async def test_a_question_during_a_rendering_gets_the_next_one(figures: Figures) -> None:
    first = asyncio.ensure_future(figures.rendering.text())
    await figures.is_rendering.wait()
    assert await figures.rendering.text() == b"2"
    assert await first == b"1"


async def test_a_crowd_gets_one_in_a_second(figures: Figures) -> None:
    assert await figures.crowd() == [b"1"] * (FEW + 1)
    assert await figures.crowd(100) == [b"1"] * 100
    assert await figures.rendering.text() == b"1"
    figures.now = figures.begun[0] + CROWD_SECONDS
    assert await figures.rendering.text() == b"2"
    assert await figures.rendering.text() == b"3", "the crowd is gone"
    for _ in range(1000):
        await figures.crowd()
        figures.now += 0.01
    begun = figures.begun[3:]
    assert all(after - before >= CROWD_SECONDS for before, after in pairwise(begun))


class Resumed:
    """Awaits a text, and notes each iteration of the loop in which it goes on."""

    def __init__(self, figures: Figures, iterations: Iterator[int], noted: list[int]) -> None:
        self._figures, self._iterations, self._noted = figures, iterations, noted

    def __await__(self) -> Generator[Any, Any, None]:
        for waits in self._figures.rendering.text().__await__():
            yield waits
            self._noted.append(next(self._iterations))


async def test_a_crowd_goes_on_one_in_each_iteration_of_the_loop(figures: Figures) -> None:
    noted: list[int] = []
    iteration = 0

    async def count() -> None:
        nonlocal iteration
        while True:
            await asyncio.sleep(0)
            iteration += 1

    async def ask() -> None:
        await Resumed(figures, iter(lambda: iteration, -1), noted)

    counting = asyncio.ensure_future(count())
    await asyncio.gather(*(ask() for _ in range(50)))
    counting.cancel()
    assert len(noted) == len(set(noted)) == 50


async def test_who_asks_gets_no_answer_from_a_rendering_that_is_cancelled(figures: Figures) -> None:
    asking = asyncio.ensure_future(figures.rendering.text())
    await asyncio.sleep(0)
    await figures.tasks.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_who_shares_gets_one_in_a_second_and_takes_none_from_who_does_not(figures: Figures) -> None:
    for _ in range(100):
        assert await figures.rendering.text(shared=True) == b"1"
    assert await figures.rendering.text() == b"2", "is fresh"
    assert await figures.rendering.text(shared=True) == b"2"
    figures.now = figures.begun[1] + CROWD_SECONDS
    assert await figures.rendering.text(shared=True) == b"3"


async def test_who_shares_takes_the_one_that_is_under_way(figures: Figures) -> None:
    first = asyncio.ensure_future(figures.rendering.text())
    await figures.is_rendering.wait()
    assert await figures.rendering.text(shared=True) == b"1"
    assert await first == b"1"


async def test_a_crowd_that_comes_during_a_rendering_shares_it(figures: Figures) -> None:
    first = asyncio.ensure_future(figures.rendering.text())
    await figures.is_rendering.wait()
    assert await figures.crowd(10) == [b"1"] * 10
    assert await first == b"1"


async def test_who_goes_away_takes_the_text_from_nobody(figures: Figures) -> None:
    first, second = (asyncio.ensure_future(figures.rendering.text()) for _ in range(2))
    await figures.is_rendering.wait()
    first.cancel()
    assert await second == b"1"


async def test_a_rendering_that_fails_is_an_error_of_those_who_asked(figures: Figures) -> None:
    figures.fails = True
    with pytest.raises(ValueError, match="no figures"):
        await figures.rendering.text()
    figures.fails = False
    assert await figures.rendering.text() == b"2"
    assert len(figures.errors) == 1
