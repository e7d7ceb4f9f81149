"""Keeps CPU cores out of deep idle states around a job, so that threads wake up quickly.

A core that has been idle for 0.2 to 0.3 ms takes 100 to 400 us to wake up, mainly in virtual machines (measured:
docs/benchmarks.md): as long as a copy of ten blocks. One job wakes five threads, one after the other. A thread that
wakes up every 100 us keeps its core out of deep idle states, but uses a tenth of the core, so it does so only around
jobs. `SleepGuard` does this for the daemon's event loop, `client.waiting` for client threads that wait for the daemon.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import time
from typing import Final

from kvsidecar.support.kernel_calls import usable_cores

CORES_TO_SPARE: Final = usable_cores() >= 4
"""Whether there are enough cores. Fewer cores are busy around jobs and do not enter deep idle states."""
NAP_SECONDS: Final = 100e-6
"""Half of the idle time after which a core, or the hypervisor below it, enters a deep idle state."""

_CLOCK_MONOTONIC: Final = 1
_NONBLOCK_CLOEXEC: Final = os.O_NONBLOCK | os.O_CLOEXEC
_libc = ctypes.CDLL(None, use_errno=True)


class Timespec(ctypes.Structure):
    """``struct timespec`` of libc."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))

    @classmethod
    def of(cls, seconds: float) -> Timespec:
        fraction, whole = math.modf(max(0.0, seconds))
        return cls(int(whole), int(fraction * 1e9))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", Timespec), ("value", Timespec))


class SleepGuard:
    """Keeps the cores of one event loop and its worker threads out of deep idle states around a job.

    There is one per daemon. Code that starts, ends or expects work calls `keep_awake`. A timerfd wakes the loop,
    because the timers of event loops have a resolution of milliseconds.

    Args:
        seconds: duration of the effect of each `keep_awake`; 0 turns it off.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self.is_awake = False
        """Whether the timer ticks."""
        self._timer = -1
        self.problem = ""
        """Why it has no effect though it was wanted."""
        if seconds > 0:
            self._timer = _libc.timerfd_create(_CLOCK_MONOTONIC, _NONBLOCK_CLOEXEC)
            if self._timer < 0:
                self.problem = f"there is no timer: {os.strerror(ctypes.get_errno())}"

    def keep_awake(self) -> None:
        """Keep the loop's core awake for ``seconds``. Called in the loop."""
        if self._timer < 0:
            return
        self._until = time.monotonic() + self._seconds
        if not self.is_awake:
            if self._loop is None:
                self._loop = asyncio.get_running_loop()
                self._loop.add_reader(self._timer, self._tick)
            self.is_awake = True
            # Later: whoever asked for this is being answered, and a call of libc after a pause takes up to 40 us.
            self._loop.call_soon(self._set, NAP_SECONDS)

    def close(self) -> None:
        if self._timer >= 0:
            if self._loop is not None:
                self._loop.remove_reader(self._timer)
            os.close(self._timer)
            self._timer = -1

    def _tick(self) -> None:
        os.read(self._timer, 8)
        if time.monotonic() >= self._until:
            self.is_awake = False
            self._set(0)

    def _set(self, seconds: float) -> None:
        if self._timer < 0:
            return
        each = Timespec.of(seconds)
        _libc.timerfd_settime(self._timer, 0, ctypes.byref(_Itimerspec(each, each)), None)


NO_GUARD: Final = SleepGuard(0.0)
"""A guard without effect."""
