"""Spreads what clients of a TCP port cause over iterations of the event loop, so that lookups do not wait for it.

Anybody who reaches the port may send as much as the network carries. Whatever they cause takes a turn: one in each
iteration of the loop, and so few in a second that they cost a small part of it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

RATE = 1000.0
"""Turns in a second, of all clients together: a request takes one, and so does a new connection."""
BURST = 100
"""Turns that are not spread over time after a pause."""
CONNECTION_EVERY = 4
"""While requests wait, one turn in this many is a new connection's: open ones cannot keep it out."""


class TcpTurns:
    """Calls functions in order of `take`, one in each iteration of the event loop."""

    def __init__(self) -> None:
        self._requests: deque[Callable[[], None]] = deque()
        self._connections: deque[Callable[[], None]] = deque()
        self._credit = float(BURST)
        self._credited_at = time.monotonic()
        self._count = 0
        self._scheduled = False

    def take(self, call: Callable[[], None], *, connection: bool = False) -> None:
        """Call ``call`` when it is its turn.

        Args:
            connection: it is for a new connection, not for a request.
        """
        (self._connections if connection else self._requests).append(call)
        self._schedule()

    async def wait(self, *, connection: bool = False) -> None:
        """Wait for a turn."""
        turn = asyncio.get_running_loop().create_future()
        self.take(lambda: None if turn.done() else turn.set_result(None), connection=connection)
        await turn

    def _schedule(self) -> None:
        if self._scheduled or not (self._requests or self._connections):
            return
        self._scheduled = True
        loop, now = asyncio.get_running_loop(), time.monotonic()
        self._credit = min(BURST, self._credit + (now - self._credited_at) * RATE)
        self._credited_at = now
        if self._credit >= 1:
            loop.call_soon(self._run)
        else:
            loop.call_later((1 - self._credit) / RATE, self._run)

    def _run(self) -> None:
        self._scheduled = False
        self._credit -= 1
        self._count += 1
        first, second = self._requests, self._connections
        if self._count % CONNECTION_EVERY == 0:
            first, second = second, first
        call = (first or second).popleft()
        self._schedule()
        call()
