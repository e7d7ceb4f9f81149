"""A reset of the cache: nothing that is stored now may be hit later, by jobs that still run neither."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from enum import Enum

_log = logging.getLogger("kvsidecar.vllm")

RETRY_SECONDS = 1.0


class State(Enum):
    OPEN = "open"
    """No reset is under way."""
    DRAINING = "draining"
    """Jobs that were begun before the reset still run: what they store would outlive a clear."""
    CLEARING = "clearing"
    """The daemon is asked to clear."""
    FAILED = "failed"
    """The daemon did not clear. It is asked again; nothing is hit or stored before it has."""


class Reset:
    """Keeps the cache shut from a reset until the daemon has forgotten this namespace.

    Args:
        clear: asks the daemon; waits for its answer, and raises without one.
    """

    def __init__(self, clear: Callable[[], object], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clear, self._clock = clear, clock
        self._state = State.OPEN
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._retry = 0.0

    @property
    def state(self) -> State:
        return self._state

    def begin(self, drained: bool, timeout: float) -> bool:
        """Shut the cache, and clear it if no job runs. Waits at most ``timeout`` seconds.

        Returns:
            False: jobs still run. True: nothing that was stored before is hit from now on. That holds without a
            daemon too: the cache stays shut until one has cleared.
        """
        if not drained:
            self._state = State.DRAINING
            return False
        if self._state is not State.CLEARING:
            self._start()
        assert self._thread is not None
        self._thread.join(timeout)
        self._settle()
        return True

    def step(self, drained: bool, attached: bool) -> None:
        """Go on with a reset that is under way. Never waits."""
        if self._state is State.DRAINING and drained:
            self._start()
        elif self._state is State.CLEARING:
            self._settle()
        elif self._state is State.FAILED and attached and self._clock() >= self._retry:
            self._start()

    def _start(self) -> None:
        self._state, self._error = State.CLEARING, None
        self._thread = threading.Thread(target=self._run, name="kvsidecar-clear", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._clear()
        except Exception as error:  # noqa: BLE001 - a thread must end heard; the cache stays shut
            self._error = error

    def _settle(self) -> None:
        assert self._thread is not None
        if self._thread.is_alive():
            return
        if self._error is None:
            self._state, self._retry = State.OPEN, 0.0
            return
        if not self._retry:  # once for all attempts
            _log.warning("the cache could not be cleared: nothing is offloaded until it is: %s", self._error)
        self._state, self._retry = State.FAILED, self._clock() + RETRY_SECONDS
