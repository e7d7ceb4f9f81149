"""Limits on partially received messages: buffer space per user, and a time limit for the rest of a message.

Space for the whole message is reserved as soon as its length is known, so that every message with space can be
completed. A message without space waits unread for those before it, at most for the time limit.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from kvsidecar.errors import LimitExceeded, Unfinished
from kvsidecar.protocol.framing import MAX_MESSAGE_BYTES

MAX_PARTIAL_BYTES = 16 * MAX_MESSAGE_BYTES
"""Limit per user on the bytes of partially received messages."""
MESSAGE_SECONDS = 10.0
"""Time limit from the first byte of a message to its last."""


@dataclass(eq=False, slots=True)
class PartialMessage:
    """A message between `PartialMessages.begin` and `PartialMessages.end`."""

    user: Hashable
    nbytes: int
    on_room: Callable[[], None]
    timer: asyncio.TimerHandle | None = None
    has_room: bool = False


@dataclass(slots=True)
class _UserSpace:
    nbytes: int = 0
    """Bytes of the messages that have space."""
    waiting: deque[PartialMessage] = field(default_factory=deque)


class PartialMessages:
    """The partially received messages of all connections. Used from the event loop."""

    def __init__(self, limit: int = MAX_PARTIAL_BYTES, seconds: float = MESSAGE_SECONDS) -> None:
        self._limit = limit
        self._seconds = seconds
        self._users: dict[Hashable, _UserSpace] = {}

    def begin(
        self,
        user: Hashable,
        nbytes: int,
        *,
        on_room: Callable[[], None],
        on_late: Callable[[LimitExceeded | Unfinished], None],
    ) -> PartialMessage:
        """Register a message whose first bytes have arrived.

        Args:
            nbytes: length of the whole message; at most the limit.
            on_room: called when there is space for it, if ``has_room`` is false.
            on_late: called with the reason why the connection must end. The caller must still `end` the message.
        """
        message = PartialMessage(user, nbytes, on_room)
        loop, half = asyncio.get_running_loop(), self._seconds / 2

        def half_time() -> None:
            message.timer = loop.call_later(half, lambda: on_late(self._why(message)))

        # Two timers in a row: after a pause of the daemon itself, timers fire before it reads the data of the meantime.
        message.timer = loop.call_later(half, half_time)
        held = self._users.setdefault(user, _UserSpace())
        held.waiting.append(message)
        self._reserve(held)
        return message

    def end(self, message: PartialMessage) -> None:
        """Remove a message that is complete or will never be."""
        if message.timer is not None:
            message.timer.cancel()
        held = self._users[message.user]
        if message.has_room:
            held.nbytes -= message.nbytes
        else:
            held.waiting.remove(message)
        for other in self._reserve(held):
            other.on_room()
        if not held.nbytes and not held.waiting:
            del self._users[message.user]

    def _reserve(self, held: _UserSpace) -> list[PartialMessage]:
        """Reserve space in the order of `begin`. Returns the messages that got it."""
        given = []
        while held.waiting and held.nbytes + held.waiting[0].nbytes <= self._limit:
            message = held.waiting.popleft()
            message.has_room = True
            held.nbytes += message.nbytes
            given.append(message)
        return given

    def _why(self, message: PartialMessage) -> LimitExceeded | Unfinished:
        if message.has_room:
            return Unfinished(
                f"a message of {message.nbytes} bytes was not complete {self._seconds:g} s after its first byte"
            )
        return LimitExceeded(
            f"one user may have {self._limit} bytes of incomplete messages: there was no room for one "
            f"of {message.nbytes} bytes in {self._seconds:g} s"
        )
