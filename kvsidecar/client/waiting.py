"""How the client's threads wait: one lock with its condition, and a light sleep for answers that come soon.

A thread that waits lightly wakes up every `NAP_SECONDS`, which `kvsidecar.support.cpu_sleep` explains.
"""

from __future__ import annotations

import ctypes
import select
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

from kvsidecar.support import cpu_sleep

NAP_SECONDS: Final = cpu_sleep.NAP_SECONDS if cpu_sleep.CORES_TO_SPARE else 5e-3
LIGHT_SECONDS = 0.05
"""A job that takes longer is slow, and not worth a tenth of a core."""
LIGHT_ANSWER_SECONDS: Final = 0.005
"""A daemon that answers a call does so sooner."""


class Reader(Protocol):
    """Reads the daemon's answers in the thread that waits for them."""

    def wait_readable(self, seconds: float) -> bool:
        """Wait until there may be something for `read_now`, or somebody else has read it. False, at once: it cannot."""

    def read_now(self) -> None:
        """Take what has arrived. Never waits."""


class Monitor:
    """The one lock of a client, and the condition that is notified when anything it guards has changed."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """To enter it takes a quarter of the time that the condition takes."""
        self.changed = threading.Condition(self.lock)

    def wait_until(self, is_done: Callable[[], bool], deadline: float, reader: Callable[[], Reader | None]) -> None:
        """Wait for something that the daemon's answers, or the end of a connection, bring about.

        The thread that waits reads the answers itself, and sleeps lightly at first: each saves a wake-up that takes
        longer than a small copy.

        Args:
            is_done: asked with the lock held, after every change.
            deadline: monotonic seconds.
            reader: of the answers that are waited for, with the lock held; None if there is none.
        """
        light_until = time.monotonic() + LIGHT_SECONDS
        while True:
            with self.changed:
                now = time.monotonic()
                if is_done() or now >= deadline:
                    return
                answers = reader() if now < light_until else None
                if answers is None:
                    self.changed.wait(min(deadline - now, threading.TIMEOUT_MAX))
                    continue
            if answers.wait_readable(min(NAP_SECONDS, deadline - now)):
                answers.read_now()
            else:
                light_until = now


class _PollFd(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


_ppoll = ctypes.CDLL(None).ppoll
_ppoll.argtypes = (ctypes.POINTER(_PollFd), ctypes.c_ulong, ctypes.POINTER(cpu_sleep.Timespec), ctypes.c_void_p)


def wait_readable(fd: int, seconds: float) -> bool:
    """Wait until a descriptor is readable, at most ``seconds``. The poll() of Python counts in milliseconds, its
    select() ends at descriptor 1023, and the kernel's timeouts of a socket are rounded up to its ticks, of 4 ms."""
    return _wait(fd, select.POLLIN, seconds)


def wait_writable(fd: int, seconds: float) -> bool:
    """The same until it is writable."""
    return _wait(fd, select.POLLOUT, seconds)


def wait_for_answer(fd: int, seconds: float) -> bool:
    """As `wait_readable`, lightly at first."""
    began = time.monotonic()
    while not wait_readable(fd, min(NAP_SECONDS, seconds)):
        waited = time.monotonic() - began
        if waited >= min(LIGHT_ANSWER_SECONDS, seconds):
            return wait_readable(fd, seconds - waited)
    return True


def _wait(fd: int, events: int, seconds: float) -> bool:
    return bool(_ppoll(_PollFd(fd, events, 0), 1, cpu_sleep.Timespec.of(seconds), None) > 0)
