"""Lookups of one user take turns, so that other users are served between them.

One of 100,000 hashes takes tens of milliseconds of the event loop, and one user may have hundreds under way. Where only
a few of a user's wait, one runs each time the loop goes round. Where many do, there are pauses: gRPC hands new calls
over from a thread of its own, one at a time, and a loop that is never idle keeps that thread waiting (measured with 128
streams: another user's call came behind 1,800 large lookups; with pauses behind 90).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

FEW = 8
"""Lookups of a user that wait, and follow each other without a pause."""
PAUSE_SECONDS = 0.001
WORK_SECONDS = 0.005
"""How long a user's turns may take between two pauses."""


@dataclass(slots=True)
class _Queue:
    since: float
    """When its turns began after the last pause; monotonic seconds."""
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)


class Turns:
    """Used from the event loop."""

    def __init__(self) -> None:
        self._queues: dict[Hashable, _Queue] = {}
        """Queues of the users who have just had a turn."""

    async def wait(self, user: Hashable) -> None:
        """Return when it is this caller's turn; at once if the user has had none since the loop last went round."""
        loop = asyncio.get_running_loop()
        queue = self._queues.get(user)
        if queue is None:
            self._queues[user] = _Queue(time.monotonic())
            loop.call_soon(self._had_turn, user)
            return
        turn = loop.create_future()
        queue.waiting.append(turn)
        await turn

    def _had_turn(self, user: Hashable) -> None:
        queue = self._queues[user]
        if len(queue.waiting) > FEW and time.monotonic() - queue.since >= WORK_SECONDS:
            asyncio.get_running_loop().call_later(PAUSE_SECONDS, self._go_on, user)
        else:
            self._next(user)

    def _go_on(self, user: Hashable) -> None:
        self._queues[user].since = time.monotonic()
        self._next(user)

    def _next(self, user: Hashable) -> None:
        waiting = self._queues[user].waiting
        while waiting:
            turn = waiting.popleft()
            if not turn.done():  # its caller has not been cancelled
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._had_turn, user)
                return
        del self._queues[user]
