"""Texts that are rendered on request, such as /metrics: in short steps, and for a crowd once a second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from functools import partial

from kvsidecar.support.loop_time import LoopTime
from kvsidecar.support.tasks import TaskSet

Steps = Generator[None, None, bytes]
"""Renders a text: a generator that yields where the event loop may do other work, and returns the text."""

CROWD_SECONDS = 1.0
"""How old a text may be that is served to a crowd."""
FEW = 2
"""Simultaneous askers that are no crowd yet. Each of them gets a text that was begun after its request."""
PAUSE = 10.0
"""The pause between two renderings for `FEW` askers is this many times as long as the first took on the loop."""


class Rendering:
    """One text. Used from the event loop.

    A reader who asks alone gets figures from after its request, also if it asks again and again. When more than `FEW`
    ask at the same time, the text is served for `CROWD_SECONDS`, so that many scrapers cost no more than one.

    Args:
        steps: begins to render.
    """

    def __init__(
        self,
        steps: Callable[[], Steps],
        tasks: TaskSet,
        loop_time: LoopTime,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steps, self._tasks, self._time, self._clock = steps, tasks, loop_time, clock
        self._task: asyncio.Task[bytes] | None = None
        """The rendering that is under way, or waits for the end of the pause."""
        self._begun = False
        self._asked: list[asyncio.Future[bytes]] = []
        """Askers that wait for its text."""
        self._may_begin_at = 0.0
        self._text = b""
        self._recent_until = 0.0
        """Until when the text may be given to askers that accept a shared one."""
        self._shared_until = 0.0
        """Until when the text may be given to everybody."""

    async def text(self, *, shared: bool = False) -> bytes:
        """The text, of which the caller changes nothing.

        Args:
            shared: it may be as old as in a crowd.
        """
        while self._clock() >= (self._recent_until if shared else self._shared_until):
            if self._task is None:
                self._task = self._tasks.spawn(self._render(), name="render")
                self._task.add_done_callback(self._rendered)
            answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
            self._asked.append(answer)
            old = self._begun and len(self._asked) <= FEW
            text = await answer
            if not old:
                return text
        return self._text

    async def _render(self) -> bytes:
        await asyncio.sleep(max(0.0, self._may_begin_at - self._clock()))
        self._begun, began = True, self._clock()
        text = await self._time.run(self._timed(self._steps()))
        self._text, self._recent_until = text, began + CROWD_SECONDS
        if len(self._asked) > FEW:
            self._shared_until = self._recent_until
        return text

    def _rendered(self, task: asyncio.Task[bytes]) -> None:
        """Answer all who asked, one in each iteration of the loop: each then writes its response."""
        asked, self._asked, self._task, self._begun = self._asked, [], None, False
        for each in asked:
            self._time.later(partial(self._answer, each, task))

    def _answer(self, asked: asyncio.Future[bytes], task: asyncio.Task[bytes]) -> None:
        if asked.done():
            return  # its client is gone
        self._time.end()
        if task.cancelled():
            asked.cancel()
        elif (error := task.exception()) is not None:
            asked.set_exception(error)
        else:
            asked.set_result(task.result())

    def _timed(self, steps: Steps) -> Steps:
        """Take the steps, and measure them: their time decides when the next rendering may begin."""
        busy = 0.0
        while True:
            began = self._clock()
            try:
                next(steps)
            except StopIteration as end:
                text: bytes = end.value
                return text
            finally:
                busy += self._clock() - began
                self._may_begin_at = self._clock() + min(CROWD_SECONDS, PAUSE * busy)
            yield
