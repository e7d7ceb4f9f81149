"""Waiting for descriptors in nanoseconds.

Python's poll() counts in milliseconds, its select() ends at descriptor 1023, and the kernel rounds a socket's timeouts
up to its ticks of 4 ms.
"""

from __future__ import annotations

import ctypes
import select
import time

from kvsidecar.support.cpu_sleep import Timespec


class _PollFd(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


_ppoll = ctypes.CDLL(None).ppoll
_ppoll.argtypes = (ctypes.POINTER(_PollFd), ctypes.c_ulong, ctypes.POINTER(Timespec), ctypes.c_void_p)


class Sleeper:
    """Waits for one descriptor. Used by one thread. A signal ends its sleep."""

    def __init__(self, fd: int, events: int = select.POLLIN) -> None:
        self._fd = _PollFd(fd, events)

    def sleep(self, seconds: float | None) -> bool:
        """Wait until it is ready, at most ``seconds``; None for as long as it takes. Returns whether it is."""
        return bool(_ppoll(self._fd, 1, None if seconds is None else Timespec.of(seconds), None) > 0)


def wait_readable(fd: int, seconds: float) -> bool:
    """Wait until there is something to read, to accept, or an end to see, at most ``seconds``. Returns whether there
    is."""
    return _wait(fd, select.POLLIN, seconds)


def wait_writable(fd: int, seconds: float) -> bool:
    return _wait(fd, select.POLLOUT, seconds)


def _wait(fd: int, events: int, seconds: float) -> bool:
    sleeper, deadline = Sleeper(fd, events), time.monotonic() + seconds
    while not sleeper.sleep(seconds):
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            return False
        # A signal ended the call, and its handler has run. If the wait ended too, a lookup would count as unanswered.
    return True
