"""Progress of reading and replaying a long file, on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Final, TextIO

EVERY_SECONDS: Final = 5.0


class ReplayProgress:
    """Prints a line every `EVERY_SECONDS`, so nothing about what takes less.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, out: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._out, self._clock = out or sys.stderr, clock
        self._began = self._said = clock()

    def read(self, name: str, lines: int) -> None:
        """Note how many lines of a file are read."""
        if lines % 64 == 0:
            self._say(lambda: f"{name}, {lines} lines read")

    def replayed(self, what: str, done: int, total: int) -> None:
        """Note how many of all requests are replayed."""
        self._say(lambda: f"{what}, {done / total:.0%} of the requests replayed")

    def _say(self, text: Callable[[], str]) -> None:
        now = self._clock()
        if now >= self._said + EVERY_SECONDS:
            self._said = now
            print(f"{now - self._began:.0f} s: {text()}", file=self._out, flush=True)
