"""Reports to the daemon what a backend has of some spaces, and what changes: for watchers of what the node holds.

A backend's call only appends to a `ChangeLog`, and a thread of its own sends it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from kvsidecar.cache.change_log import ChangeLog
from kvsidecar.tiers.backend import Backend, ShardSpace
from kvsidecar.types import Residency

PIECES: Final = 8
"""Pieces that are sent before a pause: 160,000 shards a second, so that the daemon's loop has time for others."""
PAUSE_SECONDS: Final = 0.05


class ResidencyReporter:
    """Owns the log of changes; `run` sends it in its thread.

    Args:
        send: sends the number of a space, a kind of report, and hashes. May wait. Raises ConnectionError when the
            daemon has gone: then no more is reported.
        pause: waits between `PIECES`; takes seconds.
    """

    def __init__(
        self,
        backend: Backend,
        send: Callable[[int, Residency, bytes], object],
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        self._backend, self._send, self._pause = backend, send, pause
        self._changed = threading.Condition()
        """Guards all that follows. A backend holds its own lock when it reports a change, so it is not called with this
        one held."""
        self._spaces: dict[int, ShardSpace] = {}
        """The watched spaces by number."""
        self._log = ChangeLog[tuple[int, Residency, bytes]]()
        self._to_list: dict[int, Iterator[bytes]] = {}

    def watch(self, number: int, space: ShardSpace) -> None:
        """Report what is there of a space, then `Residency.COMPLETE`; and every change. A second call starts over."""
        self._backend.watch(space, partial(self._changed_in, number))  # first: what changes from here on is told
        with self._changed:
            self._spaces[number] = space
            self._to_list[number] = self._backend.pieces(space)
            self._changed.notify()

    def unwatch(self, number: int) -> None:
        with self._changed:
            space = self._spaces.pop(number, None)
            self._to_list.pop(number, None)
        if space is not None:
            self._backend.watch(space, None)

    def _changed_in(self, number: int, kind: Residency, _group: int, hashes: bytes) -> None:
        with self._changed:
            if number in self._spaces:
                self._log.add((number, kind, hashes), len(hashes))
                self._changed.notify()

    def run(self) -> None:
        """Send reports until the daemon has gone."""
        pieces = 0
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._log or self._log.flooded or self._to_list)
                for each in self._next():
                    self._send(*each)
                    pieces += 1
                if pieces >= PIECES:
                    pieces = 0
                    self._pause(PAUSE_SECONDS)
        except ConnectionError:
            return

    def _next(self) -> list[tuple[int, Residency, bytes]]:
        """The log so far; else the next piece of what is there."""
        with self._changed:
            flooded, log = self._log.flooded, self._log.take()
            spaces = dict(self._spaces)
            number, pieces = next(iter(self._to_list.items()), (0, iter(())))
        if flooded:
            for each, space in spaces.items():
                log.append((each, Residency.CLEARED, b""))
                self.watch(each, space)
        if log or not number:
            return log
        piece = next(pieces, None)
        if piece is not None:
            return [(number, Residency.STORED, piece)] if piece else []
        with self._changed:
            if self._to_list.get(number) is pieces:
                del self._to_list[number]
                return [(number, Residency.COMPLETE, b"")]
        return []
