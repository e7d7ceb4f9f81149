"""Lookups of one user take turns, so that other users are served between them.

One of 100,000 hashes takes tens of milliseconds of the event loop, and one user may have hundreds under way. One of
a user's runs each time the loop goes round, and the user's turns leave a part of the time to others: gRPC hands new
calls over from a thread of its own, one at a time, and a loop that is never idle keeps that thread waiting (measured
with 128 lookups of 20,000 hashes under way: another user's call came behind all of them; with pauses, on an otherwise
idle machine, behind none).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

PAUSE_SECONDS = 0.001
"""The shortest pause; turns whose pauses come to less follow each other."""
PAUSE_SHARE = 0.2
"""Of the time that a turn has taken."""


@dataclass(slots=True)
class _UserQueue:
    began: float
    """When its last turn began; monotonic seconds, as all times here."""
    paid: float
    """When its turns, and pauses for all of them, would have been over."""
    running: bool = True
    """A turn or a pause is under way."""
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)


class FairQueue:
    """Used from the event loop."""

    def __init__(self) -> None:
        self._queues: dict[Hashable, _UserQueue] = {}
        """Queues of the users whose turns are not paid for."""

    async def wait(self, user: Hashable) -> None:
        """Return when it is this caller's turn; at once if the user has had none since the loop last went round."""
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
        asyncio.get_running_loop().call_soon(self._had_turn, user, queue)

    def _had_turn(self, user: Hashable, queue: _UserQueue) -> None:
        now = time.monotonic()
        queue.paid = max(queue.paid, queue.began) + (now - queue.began) * (1 + PAUSE_SHARE)
        if (pause := queue.paid - now) >= PAUSE_SECONDS:
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
        if not queue.running and time.monotonic() >= queue.paid and self._queues.get(user) is queue:
            del self._queues[user]
