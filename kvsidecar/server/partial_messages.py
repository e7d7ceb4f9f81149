"""Limits on incomplete messages: buffer space per user, and a time limit for the rest.

Room is taken for the whole message as soon as its length is known, so that every message that has room can be
completed; one that finds none waits unread for those before it. It never waits longer than a message may take.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from kvsidecar.errors import LimitExceeded, Unfinished
from kvsidecar.protocol.framing import MAX_MESSAGE_BYTES

MAX_PARTIAL_BYTES = 16 * MAX_MESSAGE_BYTES
"""The most bytes one user may have in messages whose end has not arrived."""
MESSAGE_SECONDS = 10.0
"""From the first byte of a message to its last."""


@dataclass(eq=False, slots=True)
class PartialMessage:
    """One incomplete message, from `PartialMessages.begin` to `PartialMessages.end`."""

    user: Hashable
    nbytes: int
    on_room: Callable[[], None]
    timer: asyncio.TimerHandle | None = None
    has_room: bool = False


@dataclass(slots=True)
class _OfUser:
    nbytes: int = 0
    """Held by the messages that have room."""
    waiting: deque[PartialMessage] = field(default_factory=deque)


class PartialMessages:
    """The incomplete messages of all connections. Used from the event loop."""

    def __init__(self, limit: int = MAX_PARTIAL_BYTES, seconds: float = MESSAGE_SECONDS) -> None:
        self._limit = limit
        self._seconds = seconds
        self._users: dict[Hashable, _OfUser] = {}

    def begin(
        self,
        user: Hashable,
        nbytes: int,
        *,
        on_room: Callable[[], None],
        on_late: Callable[[LimitExceeded | Unfinished], None],
    ) -> PartialMessage:
        """The first bytes of a message have come, which will have ``nbytes``, at most the limit.

        Args:
            on_room: called once there is room for it, if ``has_room`` is false.
            on_late: told why the connection must end. The message is still to be ended.
        """
        message = PartialMessage(user, nbytes, on_room)
        loop, half = asyncio.get_running_loop(), self._seconds / 2

        def half_time() -> None:
            message.timer = loop.call_later(half, lambda: on_late(self._why(message)))

        # In two halves: a daemon that was itself stopped finds its timers due before it reads what has come meanwhile.
        message.timer = loop.call_later(half, half_time)
        of_user = self._users.setdefault(user, _OfUser())
        of_user.waiting.append(message)
        self._give_room(of_user)
        return message

    def end(self, message: PartialMessage) -> None:
        """It is whole, or never will be."""
        if message.timer is not None:
            message.timer.cancel()
        of_user = self._users[message.user]
        if message.has_room:
            of_user.nbytes -= message.nbytes
        else:
            of_user.waiting.remove(message)
        for other in self._give_room(of_user):
            other.on_room()
        if not of_user.nbytes and not of_user.waiting:
            del self._users[message.user]

    def _give_room(self, of_user: _OfUser) -> list[PartialMessage]:
        """Those that have room from now on, in the order in which they began."""
        given = []
        while of_user.waiting and of_user.nbytes + of_user.waiting[0].nbytes <= self._limit:
            message = of_user.waiting.popleft()
            message.has_room = True
            of_user.nbytes += message.nbytes
            given.append(message)
        return given

    def _why(self, message: PartialMessage) -> LimitExceeded | Unfinished:
        if message.has_room:
            return Unfinished(
                f"a message of {message.nbytes} bytes was not complete {self._seconds:g} s after its first byte"
            )
        return LimitExceeded(
            f"one user may have {self._limit} bytes of messages whose end has not arrived: there was no room for one "
            f"of {message.nbytes} bytes in {self._seconds:g} s"
        )
