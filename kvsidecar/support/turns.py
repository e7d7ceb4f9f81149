"""Shares the event loop between users who may send more than it can take, and everything else that it does."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Final

SECONDS: Final = 0.0002
"""How long steps begin in one turn of the loop."""
SHARE: Final = 0.3
"""Of the loop's time, what one user's steps may take for long. What is left is not theirs, even if nobody uses it: a
loop that is never idle waits longer for its core."""
BURST_SECONDS: Final = 0.05
"""Time that a user's steps may take before `SHARE` holds."""


_Step = tuple[Callable[[], None], float]
"""With the seconds of what it causes."""


@dataclass(slots=True)
class _User:
    used: float = 0.0
    """When what it has taken is paid for, in monotonic seconds."""
    waiting: deque[_Step] = field(default_factory=deque)
    resting: bool = False
    lined_up: bool = False
    """It is among `Turns._next`. A step may take further ones of its user, and must not line it up twice."""


class Turns:
    """Steps of users, some in each turn of the event loop: one user after the other, and each user's in their order.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._users: dict[Hashable, _User] = {}
        """Those with steps that wait, or whose time is not paid for."""
        self._next: deque[Hashable] = deque()
        """Those with steps that wait and may begin."""
        self._scheduled = False
        """Whether this turn of the loop has begun, and `_turn` is going to begin the next one."""
        self._until = 0.0
        """When this turn begins no more steps."""

    def take(self, user: Hashable, step: Callable[[], None], seconds: float = 0.0) -> None:
        """Take a step: now, if nobody waits and this turn of the loop has time, or in one of the next ones.

        Args:
            seconds: about how long that takes which the step causes and does not do itself, such as a task that it
                wakes. The user is charged for it; and if it is not 0, the step is the last one of its turn of the loop.
        """
        now = self._clock()
        queue = self._users.get(user)
        if queue is None:
            queue = self._users[user] = _User()
        elif queue.waiting or queue.used > now + BURST_SECONDS:
            self._wait(user, queue, (step, seconds), now)
            return
        if self._next or (self._scheduled and now >= self._until):
            self._wait(user, queue, (step, seconds), now)
            return
        if not self._scheduled:
            self._begin(now)
        self._run(queue, (step, seconds), now)

    def end(self) -> None:
        """The step that runs is the last one of this turn of the loop: it has made work for somebody else."""
        self._until = 0.0

    def _wait(self, user: Hashable, queue: _User, step: _Step, now: float) -> None:
        queue.waiting.append(step)
        if len(queue.waiting) == 1:
            self._line_up(user, queue, now)

    def _line_up(self, user: Hashable, queue: _User, now: float) -> None:
        rest = queue.used - now - BURST_SECONDS
        if queue.lined_up:
            return
        if rest <= 0:
            queue.lined_up = True
            self._next.append(user)
            if not self._scheduled:
                self._begin(now)
        elif not queue.resting:
            queue.resting = True
            asyncio.get_running_loop().call_later(rest, self._rested, user, queue)

    def _rested(self, user: Hashable, queue: _User) -> None:
        queue.resting = False
        if queue.waiting:
            self._line_up(user, queue, max(self._clock(), queue.used - BURST_SECONDS))

    def _begin(self, now: float) -> None:
        self._scheduled, self._until = True, now + SECONDS
        asyncio.get_running_loop().call_soon(self._turn)

    def _run(self, queue: _User, step: _Step, began: float) -> float:
        call, seconds = step
        if seconds:
            self.end()
        try:
            call()
        finally:
            now = self._clock()
            queue.used = max(queue.used, began) + (now - began + seconds) / SHARE
        return now

    def _turn(self) -> None:
        self._scheduled = False
        if not self._next:
            self._forget()
            return
        now = self._clock()
        self._begin(now)
        while self._next and now < self._until:
            user = self._next.popleft()
            queue = self._users[user]
            queue.lined_up = False
            step = queue.waiting.popleft()
            try:
                now = self._run(queue, step, now)
            finally:
                if queue.waiting:
                    self._line_up(user, queue, now)

    def _forget(self) -> None:
        if len(self._users) > 64:
            now = self._clock()
            for user in [each for each, queue in self._users.items() if not queue.waiting and queue.used < now]:
                del self._users[user]
