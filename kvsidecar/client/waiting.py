"""Waiting lightly: in naps that are too short for the core to fall into a deep sleep.

A core that has been idle for 0.2 to 0.3 ms takes 100 to 400 us to come back, in virtual machines above all (measured:
docs/benchmarks.md); that is as long as a copy of ten blocks. A thread that wakes up every 100 us keeps its core from
that, for some tenth of its time.
"""

from __future__ import annotations

import ctypes
import math
import os
import select
import time
from typing import Final

NAP_SECONDS: Final = 100e-6 if len(os.sched_getaffinity(0)) >= 4 else 5e-3
"""Few cores are busy, and do not sleep deeply."""


class _PollFd(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_ppoll = ctypes.CDLL(None).ppoll
_ppoll.argtypes = (ctypes.POINTER(_PollFd), ctypes.c_ulong, ctypes.POINTER(_Timespec), ctypes.c_void_p)


def wait_readable(fd: int, seconds: float) -> bool:
    """Wait until a descriptor is readable, at most ``seconds``. The poll() of Python counts in milliseconds, its
    select() ends at descriptor 1023, and the kernel's timeouts of a socket are rounded up to its ticks, of 4 ms."""
    return _wait(fd, select.POLLIN, seconds)


def wait_writable(fd: int, seconds: float) -> bool:
    """The same until it is writable."""
    return _wait(fd, select.POLLOUT, seconds)


def wait_lightly(fd: int, seconds: float) -> bool:
    """As `wait_readable`, in naps."""
    until = time.monotonic() + seconds
    while not wait_readable(fd, min(NAP_SECONDS, seconds)):
        if (seconds := until - time.monotonic()) <= 0:
            return False
    return True


def _wait(fd: int, events: int, seconds: float) -> bool:
    fraction, whole = math.modf(max(0.0, seconds))
    return bool(_ppoll(_PollFd(fd, events, 0), 1, _Timespec(int(whole), int(fraction * 1e9)), None) > 0)
