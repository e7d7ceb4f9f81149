"""What a step of the engine does not wait for: calls in a thread of their own, one after the other."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

_log = logging.getLogger("kvsidecar.vllm")

Call = Callable[[], None]


class Background:
    """A thread, from the first call until `close`.

    A call begins at the end of the next step's planning, not of this one's: a thread that wants the GIL holds up the
    one that plans and submits at each of its system calls, 20 to 45 us of a step with a load (measured).
    """

    def __init__(self) -> None:
        self._new: list[Call] = []
        self._due: list[Call] = []
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        # Each is changed by one thread only.
        self._given = 0
        self._done = 0

    @property
    def busy(self) -> bool:
        """Whether a call has not ended. `step` is needed until it has."""
        return self._given != self._done

    def __call__(self, call: Call) -> None:
        """Have it called behind those before it. From one thread only; never waits."""
        self._given += 1
        self._new.append(call)

    def step(self) -> None:
        """A step is planned: begin what was given before the last one was. From the same thread; never waits."""
        due, self._due, self._new = self._due, self._new, []
        if due and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvsidecar-leases", daemon=True)
            self._thread.start()
        for call in due:
            self._calls.put(call)

    def close(self) -> None:
        """No more calls begin. Does not wait for those that have."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception:  # noqa: BLE001 - it is logged, and the next calls are other requests'
                _log.exception("kvsidecar: a call in the background failed")
            self._done += 1
