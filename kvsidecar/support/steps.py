"""Steps of jobs, which share the event loop with everything that must not wait for them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Final

from kvsidecar.support.loop_time import LoopTime

CALL_SECONDS: Final = 1.0
"""How long after a call the next one is expected. Schedulers make calls in each step of their engines."""


class Steps:
    """Steps of jobs in the order in which they came: a lane of the loop's time.

    When the ranks' jobs keep the loop busy, one iteration would take as many steps as there are ranks and copiers, and
    a scheduler's lookup would wait for all of them. To look at the sockets after each step takes a tenth more of a loop
    that is busy with jobs alone, so it is done for `CALL_SECONDS` after a call.

    The owner of a step asks `may_begin`, and passes it to `later` if it may not; steps that wait begin in that order,
    before any new one.
    """

    def __init__(self, loop_time: LoopTime | None = None, *, call_seconds: float = CALL_SECONDS) -> None:
        self.loop_time = LoopTime() if loop_time is None else loop_time
        self._call_seconds = call_seconds
        self._calls_until = -math.inf
        """Time until which more calls are expected."""
        self._waiting: deque[Callable[[], None]] = deque()

    def called(self) -> None:
        """A call has been made, which must not wait for many steps."""
        self._calls_until = self.loop_time.clock() + self._call_seconds

    def may_begin(self) -> bool:
        """Whether a step may begin now: while calls are expected, none does before all sockets have been read."""
        return not self._waiting and not self._calls_expected

    def later(self, step: Callable[[], None]) -> None:
        """Take a step in one of the next iterations."""
        self._waiting.append(step)
        self.loop_time.join(self)

    @property
    def _calls_expected(self) -> bool:
        return self.loop_time.clock() < self._calls_until

    @property
    def waits(self) -> bool:
        return bool(self._waiting)

    def step(self) -> None:
        for _ in range(1 if self._calls_expected else len(self._waiting)):
            self._waiting.popleft()()
