"""Fair queueing of large lookups between users.

A lookup of 100,000 hashes takes tens of milliseconds on the event loop, and one user may have hundreds outstanding. In
each iteration of the loop, one lookup per user runs. Pauses between the lookups of a user leave time to others: gRPC
hands over new calls from its own thread, one at a time, and a loop that is never idle keeps that thread waiting.
(Measured with 128 outstanding lookups of 20,000 hashes: another user's call waited for all of them. With pauses, on an
otherwise idle machine, it waited for none.)
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

PAUSE_SECONDS = 0.001
"""Shortest pause. Shorter ones accumulate over several turns."""
PAUSE_SHARE = 0.2
"""Length of the pause as a share of the turn's time."""


@dataclass(slots=True)
class _UserQueue:
    began: float
    """Start of the last turn, in monotonic seconds."""
    busy_until: float
    """End of all turns including their pauses, in monotonic seconds."""
    running: bool = True
    """Whether a turn or a pause is in progress."""
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)


class FairQueue:
    """Gives each user one turn per iteration of the event loop."""

    def __init__(self) -> None:
        self._queues: dict[Hashable, _UserQueue] = {}
        """Queues of users with a turn or pause in progress."""

    async def wait(self, user: Hashable) -> None:
        """Wait for the user's next turn. Returns at once if the user has no turn or pause in progress."""
        now = time.monotonic()
        queue = self._queues.setdefault(user, _UserQueue(now, now, running=False))
        if queue.running:
            turn = asyncio.get_running_loop().create_future()
            queue.waiting.append(turn)
            await turn
        else:
            self._begin(user, queue)

    def _begin(self, user: Hashable, queue: _UserQueue) -> None:
        queue.running = True
        queue.began = time.monotonic()
        asyncio.get_running_loop().call_soon(self._end, user, queue)

    def _end(self, user: Hashable, queue: _UserQueue) -> None:
        now = time.monotonic()
        queue.busy_until = max(queue.busy_until, queue.began) + (now - queue.began) * (1 + PAUSE_SHARE)
        if (pause := queue.busy_until - now) >= PAUSE_SECONDS:
            asyncio.get_running_loop().call_later(pause, self._next, user, queue)
        else:
            self._next(user, queue)

    def _next(self, user: Hashable, queue: _UserQueue) -> None:
        while queue.waiting:
            turn = queue.waiting.popleft()
            if not turn.done():  # its caller has not been cancelled
                turn.set_result(None)
                self._begin(user, queue)
                return
        queue.running = False
        asyncio.get_running_loop().call_later(PAUSE_SECONDS, self._forget, user, queue)

    def _forget(self, user: Hashable, queue: _UserQueue) -> None:
        if not queue.running and time.monotonic() >= queue.busy_until and self._queues.get(user) is queue:
            del self._queues[user]
