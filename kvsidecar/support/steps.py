"""Shares the event loop between the steps of jobs and everything that must not wait for them."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Final

SECONDS: Final = 0.0002
"""How long steps begin in one turn of the loop: one of a large job, several of small ones."""
CALL_SECONDS: Final = 1.0
"""How long after a call the next one is expected. Schedulers make some in each step of their engines."""


class Steps:
    """Steps of jobs, a few per turn of the event loop.

    A turn of the loop reads every socket that has something to read. When the ranks' jobs keep the loop busy, a turn
    would take as many steps as there are ranks and copiers, and a scheduler's lookup would wait for all of them. With
    this, a lookup waits for the steps of `SECONDS`, however many wait: the loop looks at its sockets before it goes on.
    To look after each step takes a tenth more of a loop that is busy with jobs alone, so it is done for `CALL_SECONDS`
    after a call.

    Whoever has a step asks `may_begin`, and passes it to `later` if it may not; steps that wait begin in that order,
    before any new one.

    Args:
        clock: monotonic seconds.
        seconds: the length of a turn's steps, but for the last one.
        call_seconds: see `CALL_SECONDS`.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        seconds: float = SECONDS,
        call_seconds: float = CALL_SECONDS,
    ) -> None:
        self._clock, self._seconds, self._call_seconds = clock, seconds, call_seconds
        self._calls_until = -math.inf
        """Until then, more calls are expected."""
        self._waiting: deque[Callable[[], None]] = deque()
        self._until: float | None = None
        """When this turn begins no more steps; None before its first. If it is not None, `_next_turn` is scheduled."""

    def called(self) -> None:
        """Somebody has made a call, which must not wait for many steps."""
        self._calls_until = self._clock() + self._call_seconds

    def may_begin(self) -> bool:
        """Whether a step may begin now."""
        return not self._waiting and self._has_time()

    def later(self, step: Callable[[], None]) -> None:
        """Take a step in one of the next turns."""
        if self._until is None:
            self._begin_turn()
        self._waiting.append(step)

    def _has_time(self) -> bool:
        now = self._clock()
        if now >= self._calls_until:
            return True
        if self._until is None:
            self._begin_turn()
            return True
        return now < self._until

    def _begin_turn(self) -> None:
        self._until = self._clock() + self._seconds
        asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._until = None
        while self._waiting and self._has_time():
            self._waiting.popleft()()
