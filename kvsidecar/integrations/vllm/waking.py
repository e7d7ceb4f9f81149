"""Wakes an idle engine: only in a step does it report the daemon's changes to its router, and store what waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from kvsidecar.integrations.callers import attribute_of_caller


def waker() -> Callable[[], object]:
    """A function that wakes the engine core that is being constructed by a caller of this one. It does nothing if this
    version of vLLM cannot be woken, or the engine has no process of its own. May be called in any thread.

    vLLM does not hand its engine core to a connector. The core steps while a connector has something to do
    (``has_pending_push_work``), but does not ask while it is idle.
    """
    try:
        from vllm.v1.engine import EngineCoreRequestType

        nothing_to_do = (EngineCoreRequestType.WAKEUP, None)
    except (ImportError, AttributeError):
        return _nobody
    queue = attribute_of_caller("input_queue", lambda each: hasattr(each, "put_nowait"))
    return _nobody if queue is None else lambda: queue.put_nowait(nothing_to_do)


MARGIN_SECONDS: Final = 0.01
"""Time added to each delay: an engine that was woken too early would sleep again."""


class Alarm:
    """Wakes the engine when something is due. Used by one thread; a thread of its own sleeps while it is set.

    Args:
        wake: may be called in any thread.
    """

    def __init__(self, wake: Callable[[], object]) -> None:
        self._wake = wake
        self._timer: threading.Timer | None = None

    def set(self, seconds: float) -> None:
        """Wake the engine once, ``seconds`` from now, unless that is planned already, sooner or later."""
        if self._timer is None or self._timer.finished.is_set():
            self._timer = threading.Timer(seconds + MARGIN_SECONDS, self._wake)
            self._timer.name, self._timer.daemon = "kvsidecar-alarm", True
            self._timer.start()


def _nobody() -> None:
    """Wake nothing: the engine notices in its next step."""
