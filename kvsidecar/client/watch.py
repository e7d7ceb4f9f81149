"""Waits for what is news to a supervisor: its daemon's process or socket ends, or somebody wakes it."""

from __future__ import annotations

import os
import select
import threading

from kvsidecar.client.link import Link


class Waker:
    """An eventfd, to wake a thread that waits in poll(). Readable from `set` to `clear`.

    May be set by threads that outlive it: it does nothing once it is closed.
    """

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._closed = False

    def set(self) -> None:
        with self._lock:  # a descriptor closed in between could be somebody else's by now
            if not self._closed:
                os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.fd)


class Watch:
    """Wakes its thread at every `Waker.set`, and once each for the end of the daemon's process and of its socket.

    Args:
        link: to the daemon; None if there is none.
    """

    def __init__(self, waker: Waker, link: Link | None = None) -> None:
        self._waker = waker
        self._poll = select.poll()
        self._poll.register(waker.fd, select.POLLIN)
        if link is not None:
            self._poll.register(link.connection, select.POLLRDHUP)  # what comes before the end is not ours
            if link.process.fd is not None:
                self._poll.register(link.process.fd, select.POLLIN)

    def wait(self, seconds: float | None) -> None:
        """Return when there may be news, or after so many seconds; None for no limit."""
        for fd, _ in self._poll.poll(None if seconds is None else max(1.0, seconds * 1000)):
            if fd == self._waker.fd:
                self._waker.clear()
            else:
                self._poll.unregister(fd)  # it stays readable, and has been told
