"""Gives memory that is free in the C library's heap back to the system, which glibc does by itself only at its top."""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections.abc import Callable
from typing import Final

TRIM_BYTES: Final = 8 << 20
"""Drop in memory in use that makes it worth giving memory back."""
QUIET_SECONDS: Final = 25.0
"""Memory that is in use again within this time is kept: giving it back and getting it again delays whatever needs
memory."""

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""glibc's; musl has none, and keeps little."""


def give_back() -> None:
    """Takes milliseconds without holding the GIL. Code that needs memory of this heap waits meanwhile."""
    if _trim is not None:
        _trim(0)


class Peak:
    """Gives memory back when for `QUIET_SECONDS` much less was in use than at most."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._most = 0
        self._since = clock()
        """When it was about as much."""

    async def used(self, nbytes: int, most: int = 0) -> None:
        """Note how many bytes are in use now.

        Args:
            most: the peak since the last call, if known: what comes and goes between two calls is not seen otherwise.
        """
        now, most = self._clock(), max(nbytes, most)
        if most + TRIM_BYTES > self._most:
            self._most, self._since = max(self._most, most), now
        elif now - self._since >= QUIET_SECONDS:
            self._most, self._since = most, now
            await asyncio.to_thread(give_back)
