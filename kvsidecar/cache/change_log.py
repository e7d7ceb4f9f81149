"""Changes to the blocks of a namespace, for their readers: watchers of the pool, and the daemon of a tier.

The code that makes a change calls an `Outlet`, which only appends to a log: a copy never waits for a reader. Between
two pieces of the log its reader reports what was there at the beginning, piece by piece: a block may be reported twice,
but the last report on each is right.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from kvsidecar.types import Residency

Outlet = Callable[[Residency, int, bytes], object]
"""Called after blocks of a group (block hashes, joined) have become readable (`Residency.STORED`) or are lost
(`Residency.REMOVED`), or after all readable ones are lost (`Residency.CLEARED`)."""

MAX_LOG_BYTES: Final = 4 * 1024 * 1024
"""Hashes and notes of one log that wait to be sent. Beyond it, everything is sent again."""
CHANGE_BYTES: Final = 256
"""Bytes that each change takes besides."""

_Change = TypeVar("_Change")


class ChangeLog(Generic[_Change]):
    """Changes that wait to be sent, in their order. Not for several threads at once."""

    def __init__(self) -> None:
        self._changes: deque[tuple[_Change, int]] = deque()
        self.nbytes = 0
        self.flooded = False
        """The log was given up: nothing is kept until the next `take`."""

    def __bool__(self) -> bool:
        return bool(self._changes)

    def add(self, change: _Change, nbytes: int) -> None:
        if self.flooded:
            return
        self.nbytes += nbytes + CHANGE_BYTES
        if self.nbytes > MAX_LOG_BYTES:
            self.give_up()
        else:
            self._changes.append((change, nbytes))

    def give_up(self) -> None:
        """Keep nothing until the next `take`."""
        self.flooded, self.nbytes = True, 0
        self._changes.clear()

    def take(self, most_bytes: int = MAX_LOG_BYTES) -> list[_Change]:
        """Remove and return the first changes, of about this many bytes."""
        taken, before, self.flooded = list[_Change](), self.nbytes, False
        while self._changes and before - self.nbytes < most_bytes:
            change, nbytes = self._changes.popleft()
            self.nbytes -= nbytes + CHANGE_BYTES
            taken.append(change)
        return taken
