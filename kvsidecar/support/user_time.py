"""Divides what an iteration of the event loop reads among users."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Final

SECONDS: Final = 0.0005
"""How long the requests of one user may take in an iteration of the loop."""


class UserTime:
    """Time that the requests of each user may take in an iteration of the loop, on all of its connections together.

    An iteration reads every socket that has something to read. One user may have a thousand of them, and without a
    limit the lookups of all others would wait for each. A user whose time is used up continues in the next iteration,
    its connections in the order in which they came to wait. A request that has begun is finished. For a user who is
    alone this costs no more than a look at the sockets for each `SECONDS`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, seconds: float = SECONDS) -> None:
        self.clock = clock
        self._seconds = seconds
        self._spent: dict[Hashable, float] = {}
        self._waiting: dict[Hashable, deque[Callable[[], None]]] = {}
        self._scheduled = False

    def left(self, user: Hashable) -> bool:
        """Whether a request of this user may begin in this iteration."""
        return self._spent.get(user, 0.0) < self._seconds

    def spend(self, user: Hashable, seconds: float) -> None:
        spent = self._spent[user] = self._spent.get(user, 0.0) + seconds
        if spent > self._seconds / 4:  # rare: few requests take so long, and an iteration costs as much as one of them
            self._schedule()

    def later(self, user: Hashable, go_on: Callable[[], None]) -> None:
        """Call it in the next iteration in which the user has time left and the calls before it have been made."""
        self._waiting.setdefault(user, deque()).append(go_on)
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._next_iteration)

    def _next_iteration(self) -> None:
        self._scheduled = False
        self._spent.clear()
        try:
            for user, waiting in list(self._waiting.items()):
                try:
                    for _ in range(len(waiting)):  # those that come to wait again are not asked twice
                        if not self.left(user):
                            break
                        waiting.popleft()()
                finally:
                    if not waiting:
                        del self._waiting[user]
        finally:
            if self._waiting:  # also those that were not reached, if one has failed
                self._schedule()
