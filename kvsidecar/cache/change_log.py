"""What becomes of the blocks of a namespace, for those who are told: watchers of the pool, and the daemon of a tier.

Whoever makes a change calls an `Outlet`, which only appends to a log: a copy never waits for a reader. Between two
pieces of the log its reader tells what is there at the beginning, piece by piece: a block may be told twice, but the
last word on each is right.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from kvsidecar.types import Residency

Outlet = Callable[[Residency, int, bytes], object]
"""Is told, after the change, that blocks of a group (block hashes, joined) have become readable (`Residency.STORED`) or
are lost (`Residency.REMOVED`), or that all readable ones are (`Residency.CLEARED`)."""

MAX_LOG_BYTES: Final = 4 * 1024 * 1024
"""Of one log, hashes and notes that wait to be sent. With more, everything is sent again."""
CHANGE_BYTES: Final = 256
"""What each change takes besides."""

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
        """Remove and return the first changes, of about so many bytes."""
        taken, before, self.flooded = list[_Change](), self.nbytes, False
        while self._changes and before - self.nbytes < most_bytes:
            change, nbytes = self._changes.popleft()
            self.nbytes -= nbytes + CHANGE_BYTES
            taken.append(change)
        return taken
