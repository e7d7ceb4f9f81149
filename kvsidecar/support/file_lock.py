"""Locks of files, by flock(2): every process that holds a copy of the descriptor holds the lock."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import time
from collections.abc import Callable

RETRY_SECONDS = 0.05
"""Interval between attempts to take a lock that another process holds."""


async def lock_within(fd: int, seconds: float, stop: asyncio.Event, on_wait: Callable[[], None]) -> bool:
    """Take the lock of a file. False if ``stop`` was set while another process held it.

    Args:
        on_wait: called once, if it is not free at once.

    Raises:
        TimeoutError: it is still held after so many seconds.
    """
    deadline = time.monotonic() + seconds
    waits = False
    # Polling, because a thread that blocks in flock() could not be stopped.
    while not try_lock(fd):
        if (left := deadline - time.monotonic()) <= 0:
            raise TimeoutError
        if not waits:
            on_wait()
            waits = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), min(left, RETRY_SECONDS))
            return False
    return True


def try_lock(fd: int) -> bool:
    """Take the lock of a file. False if another process holds it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        return False
    return True
