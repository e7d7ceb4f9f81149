"""How the client's threads wait: one lock with its condition, short naps for answers that come soon, and poll().

`kvsidecar.support.cpu_sleep` explains why a thread that expects an answer wakes up every `NAP_SECONDS`.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from kvsidecar.client.connection import Connection
from kvsidecar.errors import ClientError
from kvsidecar.support import cpu_sleep
from kvsidecar.support.kernel_calls import needed
from kvsidecar.support.polling import wait_readable

if TYPE_CHECKING:
    from kvsidecar.client.session import AttachSession

NAP_SECONDS: Final = cpu_sleep.NAP_SECONDS if cpu_sleep.CORES_TO_SPARE else 5e-3
LIGHT_SECONDS = 0.05
"""How long a wait for a job naps: a slower job is not worth a tenth of a core."""
LIGHT_ANSWER_SECONDS: Final = 0.005
"""How long a wait for the answer to a call naps: it arrives sooner than the end of a job."""


class Monitor:
    """A client's only lock, and the condition to notify after a change of anything it guards."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Entering it takes a quarter of the time that entering the condition takes."""
        self.changed = threading.Condition(self.lock)

    def wait_until(
        self, is_done: Callable[[], bool], deadline: float, session: Callable[[], AttachSession | None]
    ) -> None:
        """Wait for a change that an answer of the daemon, or the end of a connection, causes.

        The waiting thread reads the answers itself, and naps at first: each saves a wake-up that takes longer than a
        small copy.

        Args:
            is_done: called with the lock held, after every change.
            deadline: monotonic seconds.
            session: returns the session whose answers to read, or None; called with the lock held.
        """
        light_until = time.monotonic() + LIGHT_SECONDS
        while True:
            with self.changed:
                now = time.monotonic()
                if is_done() or now >= deadline:
                    return
                answers = session() if now < light_until else None
                if answers is None:
                    self.changed.wait(min(deadline - now, threading.TIMEOUT_MAX))
                    continue
            if answers.wait_readable(min(NAP_SECONDS, deadline - now)):
                answers.read_now()
            else:
                light_until = now


class Waker:
    """An eventfd that wakes a thread in poll(). Readable from `set` to `clear`.

    Threads may call `set` after `close`: it has no effect then.
    """

    def __init__(self) -> None:
        with needed("eventfd2", ClientError):
            self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._closed = False

    def set(self) -> None:
        with self._lock:  # without it the number could already be another file's
            if not self._closed:
                os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.fd)


class DaemonPoller:
    """Waits for `Waker.set`, and once each for the end of the daemon's process, of each copier's, and of its socket.

    Args:
        connection: to the daemon; None if there is none.
    """

    def __init__(self, waker: Waker, connection: Connection | None = None) -> None:
        self._waker = waker
        self._poll = select.poll()
        self._poll.register(waker.fd, select.POLLIN)
        if connection is not None:
            self._poll.register(connection.sock, select.POLLRDHUP)  # not POLLIN: the stream's thread reads the data
            for fd in connection.process.fds:
                self._poll.register(fd, select.POLLIN)

    def wait(self, seconds: float | None) -> None:
        """Return after an event, or after ``seconds``; None for no limit."""
        for fd, _ in self._poll.poll(None if seconds is None else max(1.0, seconds * 1000)):
            if fd == self._waker.fd:
                self._waker.clear()
            else:
                self._poll.unregister(fd)  # it stays readable, and was reported


def wait_for_answer(fd: int, seconds: float) -> bool:
    """Like `wait_readable`, with naps at first."""
    began = time.monotonic()
    while not wait_readable(fd, min(NAP_SECONDS, seconds)):
        waited = time.monotonic() - began
        if waited >= min(LIGHT_ANSWER_SECONDS, seconds):
            return wait_readable(fd, seconds - waited)
    return True
