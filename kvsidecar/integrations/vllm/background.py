"""What a step of the engine does not wait for: calls in a thread of their own, one after the other."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress

_log = logging.getLogger("kvsidecar.vllm")

Call = Callable[[], None]
PAUSE_SECONDS = 0.001
"""Between the first call that is given and its begin. At once, it would take the GIL from the step that gave it, which
waits for it then at each of its system calls: 45 us of a step with a load, measured."""


class Background:
    """A thread, from the first call until `close`."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        # Each is changed by one thread only.
        self._given = 0
        self._done = 0

    @property
    def busy(self) -> bool:
        """Whether a call has not ended."""
        return self._given != self._done

    def __call__(self, call: Call) -> None:
        """Have it called behind those before it. From one thread only; never waits."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvsidecar-leases", daemon=True)
            self._thread.start()
        self._given += 1
        self._calls.put(call)

    def close(self) -> None:
        """No more calls come. Does not wait for those that were given."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._next()) is not None:
            try:
                call()
            except Exception:  # noqa: BLE001 - it is logged, and the next calls are other requests'
                _log.exception("kvsidecar: a call in the background failed")
            self._done += 1

    def _next(self) -> Call | None:
        with suppress(queue.Empty):
            return self._calls.get_nowait()
        call = self._calls.get()
        time.sleep(PAUSE_SECONDS)
        return call
