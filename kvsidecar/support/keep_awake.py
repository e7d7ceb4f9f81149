"""Keeps the event loop from being woken late around a job.

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


class LightSleep:
    """Used from the event loop.

    A timerfd, because the timers of event loops count in milliseconds.

    Args:
        linger: seconds for which the loop sleeps lightly after each `stir`; 0 for never.
    """

    def __init__(self, linger: float) -> None:
        self._linger = linger
        self._until = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ticking = False
        self._timer = -1
        if linger > 0:
            self._timer = _libc.timerfd_create(_CLOCK_MONOTONIC, _NONBLOCK_CLOEXEC)
            if self._timer < 0:
                raise KVSidecarError(f"no timer: {os.strerror(ctypes.get_errno())}")

    def stir(self) -> None:
        """A job begins or ends, or is about to."""
        if self._timer < 0:
            return
        self._until = time.monotonic() + self._linger
        if not self._ticking:
            if self._loop is None:
                self._loop = asyncio.get_running_loop()
                self._loop.add_reader(self._timer, self._tick)
            self._ticking = True
            self._set(NAP_SECONDS)

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
