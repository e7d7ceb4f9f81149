"""Keeps the event loop and its threads from being woken late around a job.

A core that has been idle for 0.2 to 0.3 ms takes 100 to 400 us to come back, in virtual machines above all (measured:
docs/benchmarks.md), and one job wakes five threads, one after the other. A loop that is woken every 100 us stays awake
for some tenth of its core; so only around the jobs.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from typing import Final

from kvsidecar.errors import KVSidecarError

CORES_TO_SPARE: Final = 4
"""With fewer, they are busy around the jobs, and do not sleep."""
NAP_SECONDS: Final = 100e-6
"""Half of what a core, or the hypervisor below it, needs to be idle before it sleeps deeply."""

_CLOCK_MONOTONIC: Final = 1
_NONBLOCK_CLOEXEC: Final = os.O_NONBLOCK | os.O_CLOEXEC
_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


def _every(seconds: float) -> _Itimerspec:
    each = _Timespec(0, int(seconds * 1e9))
    return _Itimerspec(each, each)


class SleepGuard:
    """Keeps one event loop, and the threads that it hands work to, from sleeping deeply while there is work about.

    One for a daemon; whoever knows of work that begins, ends or is about to calls `keep_awake`. A timerfd wakes the
    loop, because the timers of event loops count in milliseconds.

    Args:
        seconds: for which they sleep lightly after each `keep_awake`; 0 for never.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ticking = False
        self._timer = -1
        if seconds > 0:
            self._timer = _libc.timerfd_create(_CLOCK_MONOTONIC, _NONBLOCK_CLOEXEC)
            if self._timer < 0:
                raise KVSidecarError(f"no timer: {os.strerror(ctypes.get_errno())}")

    def keep_awake(self) -> None:
        """Keep the loop awake for a while; called in it."""
        if self._timer < 0:
            return
        self._until = time.monotonic() + self._seconds
        if not self._ticking:
            if self._loop is None:
                self._loop = asyncio.get_running_loop()
                self._loop.add_reader(self._timer, self._tick)
            self._ticking = True
            self._set(NAP_SECONDS)

    def keep_awake_from_thread(self) -> None:
        """`keep_awake`, from another thread. A loop that was never kept awake has no work that could end."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.keep_awake)

    def longest_wait(self, last_work: float) -> float | None:
        """Seconds that a thread may wait for work before it looks again; None for ever.

        Args:
            last_work: when its last work ended, monotonic seconds.
        """
        return NAP_SECONDS if time.monotonic() - last_work < self._seconds else None

    @property
    def ticking(self) -> bool:
        return self._ticking

    def close(self) -> None:
        if self._timer >= 0:
            if self._loop is not None:
                self._loop.remove_reader(self._timer)
            os.close(self._timer)
            self._timer = -1

    def _tick(self) -> None:
        os.read(self._timer, 8)
        if time.monotonic() >= self._until:
            self._ticking = False
            self._set(0)

    def _set(self, seconds: float) -> None:
        _libc.timerfd_settime(self._timer, 0, ctypes.byref(_every(seconds)), None)


NO_GUARD: Final = SleepGuard(0.0)
"""For whom a late wake-up costs nothing."""
