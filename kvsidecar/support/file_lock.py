"""Locks of files, by flock(2): every process that holds a copy of the descriptor holds the lock.

So a lock is held until the last process of a daemon has ended, and does not show whether the daemon is about to end.
That is shown by a second lock on the same file, of the other kind (fcntl(2), of an open file), the *running mark*: the
main process holds it from when it takes the first lock until it begins to stop, and the kernel takes it from a process
that dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import struct
import time
from collections.abc import Callable
from typing import Final

RETRY_SECONDS = 0.05
"""Interval between attempts to take a lock that another process holds."""
RUNNING_SECONDS: Final = 1.0
"""A holder that is still marked running after this wait is not about to stop: a signal to it has arrived by then."""

_FLOCK: Final = struct.Struct("hhqqi4x")
"""``struct flock`` of 64-bit Linux: type, whence, start, length, pid."""


async def lock_within(
    fd: int,
    seconds: float,
    stop: asyncio.Event,
    on_wait: Callable[[], None],
    ends: Callable[[], bool] = lambda: False,
) -> bool:
    """Take the lock of a file. False if ``stop`` was set while another process held it.

    Args:
        on_wait: called once, if it is not free at once.
        ends: whether a holder that is marked running is ending nevertheless: it was killed, and keeps its files for a
            while.

    Raises:
        TimeoutError: it is still held after this many seconds, or its holder keeps running.
    """
    refused_at = deadline = time.monotonic() + seconds
    was_running = waits = False
    # Polling, because a thread that blocks in flock() could not be stopped.
    while not try_lock(fd):
        now = time.monotonic()
        running = is_marked_running(fd) and not ends()
        if running != was_running:
            was_running, refused_at = running, min(deadline, now + RUNNING_SECONDS) if running else deadline
        if now >= refused_at:
            raise TimeoutError
        if not waits:
            on_wait()
            waits = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), min(refused_at - now, RETRY_SECONDS))
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


class RunningMark:
    """Marks a file or directory that this process has locked: the process keeps running. Cannot be set again after
    `remove`."""

    def __init__(self) -> None:
        self._fd: int | None = None
        """Holds the second lock. It must not be given to another process."""
        self._removed = False

    def set(self, fd: int) -> str:
        """Mark this file instead of the last one. Returns why it cannot be marked; empty if it is."""
        if self._removed:
            return ""
        self._close()
        try:
            # Opened again, by a path that cannot be another file by now: the lock is that of an open file, and copies
            # of ``fd`` are given to other processes.
            self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0))
        except OSError as error:
            self._close()
            return error.strerror or str(error)
        return ""

    def remove(self) -> None:
        """From now on, processes that wait for the lock wait for the end of this one."""
        self._removed = True
        self._close()

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def is_marked_running(fd: int) -> bool:
    """Whether some process, perhaps this one, has marked this file. False where it cannot be known."""
    try:
        found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except OSError:
        return False
    return int(_FLOCK.unpack(found)[0]) != fcntl.F_UNLCK
