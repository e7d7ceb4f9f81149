"""Changes that a watcher has received and not taken yet."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from kvsidecar.client.types import ResidencyChange
from kvsidecar.protocol.wire import RESIDENCY_FROM_WIRE
from kvsidecar.types import Residency
from kvsidecar.v1 import sidecar_pb2 as pb

MAX_BYTES = 4 * 1024 * 1024
"""Most bytes of hashes and notes that wait to be taken. Then nothing more is read, and the daemon sends a snapshot
later."""


class Inbox:
    """Filled by the session's reading thread, emptied by the watcher's.

    Args:
        on_news: called in the reading thread when there is something to take, after there was nothing.
    """

    def __init__(self, on_news: Callable[[], object]) -> None:
        self._on_news = on_news
        self._changes: deque[ResidencyChange] = deque()
        self._bytes = 0
        self._room = threading.Condition()
        self._has_received = False
        """Whether a change was received since the last `lost`."""

    def __bool__(self) -> bool:
        return bool(self._changes)

    def put(self, update: pb.Residency) -> None:
        changes = [
            ResidencyChange(RESIDENCY_FROM_WIRE[each.kind], each.group, each.hashes, each.notes)
            for each in update.changes
            if each.kind in RESIDENCY_FROM_WIRE
        ]
        if update.reset:
            changes.insert(0, ResidencyChange(Residency.RESET))
        if update.complete:
            changes.append(ResidencyChange(Residency.COMPLETE))
        self._has_received = True
        self._add(changes)

    def lost(self) -> None:
        """Note that the stream has ended."""
        if self._has_received:
            self._has_received = False
            self._add([ResidencyChange(Residency.LOST)])

    def _add(self, changes: list[ResidencyChange]) -> None:
        with self._room:
            was_empty = not self._changes
            self._changes += changes
            self._bytes += sum(map(_size, changes))
        if was_empty and changes:
            self._on_news()

    def wait_for_room(self, is_over: Callable[[], bool]) -> None:
        """Wait until more may be read. Returns at once when ``is_over``: see `wake`."""
        with self._room:
            self._room.wait_for(lambda: self._bytes <= MAX_BYTES or is_over())

    def wake(self) -> None:
        with self._room:
            self._room.notify_all()

    def take(self, most_bytes: int) -> list[ResidencyChange]:
        """Remove and return the first changes: about ``most_bytes`` of them, and at least one if there is any."""
        taken: list[ResidencyChange] = []
        with self._room:
            while self._changes and (not taken or most_bytes > 0):
                taken.append(self._changes.popleft())
                most_bytes -= _size(taken[-1])
                self._bytes -= _size(taken[-1])
            self._room.notify_all()
        return taken


def _size(change: ResidencyChange) -> int:
    return len(change.hashes) + len(change.notes) + 100
