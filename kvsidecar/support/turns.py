"""Shares the event loop between users who may send more than it can take, and everything else that it does."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from kvsidecar.support.loop_time import LoopTime, as_step

T = TypeVar("T")

SHARE: Final = 0.3
"""Part of the loop's time that one user's steps may take in the long run, even if nobody uses the rest: a loop that is
never idle waits longer for its core."""
BURST_SECONDS: Final = 0.05
"""Time that a user's steps may take before `SHARE` holds."""
FEW: Final = 64
"""Number of users that are remembered in any case."""


@dataclass(slots=True)
class _User:
    used: float = 0.0
    """Monotonic time at which everything it has taken is paid for."""
    waiting: deque[Callable[[], None]] = field(default_factory=deque)
    resting: bool = False
    lined_up: bool = False
    """It is in `Turns._next`. A step may take further ones of its user, and must not queue the user twice."""


class Turns:
    """Steps of users, a lane of the loop's time: one user after the other, and each user's in their order."""

    def __init__(
        self, loop_time: LoopTime | None = None, *, share: float = SHARE, burst_seconds: float = BURST_SECONDS
    ) -> None:
        self.loop_time = LoopTime() if loop_time is None else loop_time
        self._share, self._burst_seconds = share, burst_seconds
        self._users: dict[Hashable, _User] = {}
        """Users whose steps wait or whose time is not paid for; others stay until `_forget`."""
        self._few = FEW
        self._next: deque[Hashable] = deque()
        """Users with steps that wait and may begin."""

    def take(self, user: Hashable, step: Callable[[], None]) -> None:
        """Take a step in one of the next iterations of the loop."""
        now = self.loop_time.clock()
        queue = self._users.get(user)
        if queue is None:
            if len(self._users) > self._few:
                self._forget(now)
            queue = self._users[user] = _User()
        queue.waiting.append(step)
        if len(queue.waiting) == 1:
            self._line_up(user, queue, now)

    async def run(self, user: Hashable, call: Callable[[], T]) -> T:
        """Make the call as a step, unless this is cancelled before. Returns, or raises, what it does."""
        step, result = as_step(call)
        self.take(user, step)
        return await result

    def charge(self, user: Hashable, seconds: float) -> None:
        """Make the running step the last one of this iteration: it has made about this much work for others, which the
        user pays for."""
        queue = self._users.setdefault(user, _User())
        queue.used = max(queue.used, self.loop_time.clock()) + seconds / self._share
        self.loop_time.end()

    @property
    def waits(self) -> bool:
        return bool(self._next)

    def step(self) -> None:
        user = self._next.popleft()
        queue = self._users[user]
        queue.lined_up = False
        try:
            self._run(queue, queue.waiting.popleft(), self.loop_time.clock())
        finally:
            if queue.waiting:
                self._line_up(user, queue, self.loop_time.clock())

    def _line_up(self, user: Hashable, queue: _User, now: float) -> None:
        rest = queue.used - now - self._burst_seconds
        if rest <= 0:
            self._let_begin(user, queue)
        elif not (queue.resting or queue.lined_up):
            queue.resting = True
            asyncio.get_running_loop().call_later(rest, self._rested, user, queue)

    def _let_begin(self, user: Hashable, queue: _User) -> None:
        if not queue.lined_up:
            queue.lined_up = True
            self._next.append(user)
            self.loop_time.join(self)

    def _rested(self, user: Hashable, queue: _User) -> None:
        queue.resting = False
        if queue.waiting:
            self._let_begin(user, queue)

    def _run(self, queue: _User, step: Callable[[], None], began: float) -> None:
        try:
            step()
        finally:
            queue.used = max(queue.used, began) + (self.loop_time.clock() - began) / self._share

    def _forget(self, now: float) -> None:
        """Forget users with nothing that waits or is not paid for. Runs less often the more users stay."""
        for user in [each for each, queue in self._users.items() if not queue.waiting and queue.used < now]:
            del self._users[user]
        self._few = max(FEW, 2 * len(self._users))
