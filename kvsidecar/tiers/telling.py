"""Tells the daemon what an engine has of some spaces, and what changes: for those who watch what the node holds.

An engine's call only appends to a log, whoever reads it. A thread of its own sends the log, and between two pieces of
the log what is there at the beginning, piece by piece: a shard may be told twice, but the last word on each is right.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Final, Protocol, runtime_checkable

from kvsidecar.cache.block_table import Outlet
from kvsidecar.tiers.engine import ShardSpace

MAX_LOG_BYTES: Final = 4 << 20
"""Hashes that wait to be sent. With more, everything is told anew."""
PIECES: Final = 8
"""That are sent before a pause: 160,000 shards a second, so that the daemon's loop has time for others."""
PAUSE_SECONDS: Final = 0.05


class Told(IntEnum):
    """What the daemon is told about shards of a space."""

    STORED = 1
    REMOVED = 2
    CLEARED = 3
    """None is there."""
    LISTED = 4
    """All that was there when the space began to be watched has been told."""


@runtime_checkable
class Listed(Protocol):
    """What an engine has besides if it knows what it has."""

    def watch(self, space: ShardSpace, outlet: Outlet | None) -> None:
        """Tell an outlet of every change of what is there of this space from now on; None: nobody."""
        ...

    def pieces(self, space: ShardSpace) -> Iterator[bytes]:
        """What is there, as hashes joined in pieces of 32 KiB at most, some of which may be empty. Each is as of the
        moment when it is asked for."""
        ...


class _Log:
    """The changes of one space. An `Outlet`."""

    def __init__(self, teller: Teller, number: int) -> None:
        self._teller, self._number = teller, number

    def stored(self, _group: int, hashes: bytes) -> None:
        self._teller.changed(self._number, Told.STORED, hashes)

    def removed(self, _group: int, hashes: bytes) -> None:
        self._teller.changed(self._number, Told.REMOVED, hashes)

    def cleared(self, _group: int) -> None:
        self._teller.changed(self._number, Told.CLEARED, b"")


class Teller:
    """
    Args:
        send: sends the number of a space, what is told, and hashes. May wait. Raises ConnectionError when the daemon
            has gone: then nobody is told anything more.
        pause: between `PIECES`; takes seconds.
    """

    def __init__(
        self,
        engine: object,
        send: Callable[[int, Told, bytes], object],
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        self._engine = engine if isinstance(engine, Listed) else None
        self._send, self._pause = send, pause
        self._changed = threading.Condition()
        """Guards all that follows. An engine holds its own lock when it tells of a change, so it is not called with
        this one held."""
        self._spaces: dict[int, ShardSpace] = {}
        """Those that are watched."""
        self._log: deque[tuple[int, Told, bytes]] = deque()
        self._bytes = 0
        self._flooded = False
        """The log was given up."""
        self._to_list: dict[int, Iterator[bytes]] = {}

    def watch(self, number: int, space: ShardSpace) -> None:
        """Tell what is there of a space, then `Told.LISTED`; and every change. Again: from the beginning."""
        if self._engine is not None:
            self._engine.watch(space, _Log(self, number))  # first: what changes from here on is told
        with self._changed:
            self._spaces[number] = space
            self._to_list[number] = iter(()) if self._engine is None else self._engine.pieces(space)
            self._changed.notify()

    def unwatch(self, number: int) -> None:
        with self._changed:
            space = self._spaces.pop(number, None)
            self._to_list.pop(number, None)
        if space is not None and self._engine is not None:
            self._engine.watch(space, None)

    def changed(self, number: int, what: Told, hashes: bytes) -> None:
        with self._changed:
            if self._flooded or number not in self._spaces:
                return
            self._bytes += len(hashes) + 16
            if self._bytes > MAX_LOG_BYTES:
                self._flooded, self._bytes = True, 0
                self._log.clear()
            else:
                self._log.append((number, what, hashes))
            self._changed.notify()

    def run(self) -> None:
        """Until the daemon has gone."""
        pieces = 0
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._log or self._flooded or self._to_list)
                for each in self._next():
                    self._send(*each)
                    pieces += 1
                if pieces >= PIECES:
                    pieces = 0
                    self._pause(PAUSE_SECONDS)
        except ConnectionError:
            return

    def _next(self) -> list[tuple[int, Told, bytes]]:
        """The log so far; else the next piece of what is there."""
        with self._changed:
            log, self._log, self._bytes = self._log, deque(), 0
            flooded, self._flooded = self._flooded, False
            spaces = dict(self._spaces)
            number, pieces = next(iter(self._to_list.items()), (0, iter(())))
        if flooded:
            for each, space in spaces.items():
                log.append((each, Told.CLEARED, b""))
                self.watch(each, space)
        if log or not number:
            return list(log)
        piece = next(pieces, None)
        if piece is not None:
            return [(number, Told.STORED, piece)] if piece else []
        with self._changed:
            if self._to_list.get(number) is pieces:
                del self._to_list[number]
                return [(number, Told.LISTED, b"")]
        return []
