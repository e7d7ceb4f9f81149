"""Gives memory that is free in the C library's heap back to the system, which glibc does by itself only at its top."""

from __future__ import annotations

import asyncio
import ctypes
from typing import Final

TRIM_BYTES: Final = 8 << 20
"""From how much less memory in use on it is worth to give memory back."""

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""glibc's; musl has none, and keeps little."""


def give_back() -> None:
    """Takes milliseconds, and waits for no lock of Python."""
    if _trim is not None:
        _trim(0)


class Peak:
    """Gives memory back when much less is in use than was at most."""

    def __init__(self) -> None:
        self._most = 0

    async def used(self, nbytes: int, most: int = 0) -> None:
        """So much is in use now.

        Args:
            most: what was at most since the last call, if that is known: what comes and goes between two of them is not
                seen otherwise.
        """
        self._most = max(self._most, nbytes, most)
        if nbytes + TRIM_BYTES <= self._most:
            self._most = nbytes
            await asyncio.to_thread(give_back)
