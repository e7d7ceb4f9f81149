"""Large lookups of one user take turns: one in a turn of the event loop, so that between two of them everybody else
is served. (A lookup of 100,000 hashes takes tens of milliseconds; one user may have hundreds under way.)"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable


class Turns:
    """Used from the event loop."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}
        """Of users who had a turn in this turn of the loop."""

    async def wait(self, user: Hashable) -> None:
        """Return when it is this caller's turn; at once if the user has had none since the loop last went round."""
        loop = asyncio.get_running_loop()
        waiting = self._waiting.get(user)
        if waiting is None:
            self._waiting[user] = deque()
            loop.call_soon(self._next, user)
            return
        turn = loop.create_future()
        waiting.append(turn)
        await turn

    def _next(self, user: Hashable) -> None:
        waiting = self._waiting[user]
        while waiting:
            turn = waiting.popleft()
            if not turn.done():  # its caller has not been cancelled
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._next, user)
                return
        del self._waiting[user]
