"""Chooses the next queued copy: sessions take turns by bytes, so that one that submits much delays the others by a
slice of a copy, not by all of its copies.

Start-time fair queueing (Goyal, Vin and Cheng, 1996). Each session has a tag: the bytes it was given, divided by its
weight then, and at least the tag of the session that had the last turn, so that nobody saves up turns while idle. The
lowest tag is next. Within a session, copies keep the order of their submission.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

MAX_REMEMBERED = 64
"""Tags of idle sessions that are kept. Beyond it the lowest are forgotten, and newcomers begin no lower."""


class Queued(Protocol):
    @property
    def number(self) -> int: ...

    @property
    def session(self) -> int: ...

    @property
    def weight(self) -> int: ...


T = TypeVar("T", bound=Queued)


class FairCopies(Generic[T]):
    def __init__(self) -> None:
        self._queues: dict[int, deque[T]] = {}
        """Each session's queued copies; none is empty."""
        self._tags: dict[int, float] = {}
        self._now = 0.0
        """The tag of the session that had the last turn."""

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __iter__(self) -> Iterator[T]:
        """All copies in the order of turns, if a session's copies are all taken at its turn. The queue may change
        meanwhile."""
        sessions = list(self._queues)
        if len(sessions) > 1:
            sessions.sort(key=self._tags.__getitem__)
        for session in sessions:
            yield from tuple(self._queues.get(session, ()))

    def add(self, copy: T) -> None:
        queue = self._queues.get(copy.session)
        if queue is None:
            queue = self._queues[copy.session] = deque()
            self._tags[copy.session] = max(self._now, self._tags.get(copy.session, 0.0))
        queue.append(copy)

    def charge(self, copy: T, nbytes: int) -> None:
        """Charge the copy's session for this many bytes; a negative number gives them back."""
        tag = self._tags.get(copy.session, self._now)
        self._now = max(self._now, tag)
        self._tags[copy.session] = tag + nbytes / copy.weight
        if len(self._tags) - len(self._queues) > MAX_REMEMBERED:
            idle = [each for each in self._tags if each not in self._queues]
            for each in sorted(idle, key=self._tags.__getitem__)[: MAX_REMEMBERED // 2]:
                self._now = max(self._now, self._tags.pop(each))

    def put_back(self, copy: T) -> None:
        """Make a copy that was removed the first one of its session again."""
        self._queues.setdefault(copy.session, deque()).appendleft(copy)
        self._tags.setdefault(copy.session, self._now)

    def others_first(self, session: int) -> bool:
        """True if it is another session's turn."""
        own = self._tags.get(session, self._now)
        return any(self._tags[each] < own for each in self._queues if each != session)

    def remove(self, copy: T) -> None:
        queue = self._queues[copy.session]
        queue.remove(copy)
        if not queue:
            del self._queues[copy.session]

    def find(self, number: int) -> T | None:
        return next((copy for queue in self._queues.values() for copy in queue if copy.number == number), None)

    def prioritize(self, copy: T) -> None:
        """Make it the next one of its session."""
        queue = self._queues[copy.session]
        queue.remove(copy)
        queue.appendleft(copy)
