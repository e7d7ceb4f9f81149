"""An eventfd: wakes a thread that waits in poll()."""

from __future__ import annotations

import os
import threading


class Waker:
    """Readable from `set` to `clear`. May be set by threads that outlive it: it does nothing once it is closed."""

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
