"""Wakes an idle engine, which would tell its router of the daemon's news only in its next step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def waker() -> Callable[[], object]:
    """What wakes the engine core that is being constructed by a caller of this function; nothing, in a version of vLLM
    without it, or where no process is the engine's own. May be called in any thread.

    vLLM gives a connector no way to its engine core. The core steps while a connector has something to do
    (``has_pending_push_work``), but does not ask while it sleeps.
    """
    try:
        from vllm.v1.engine import EngineCoreRequestType

        nothing_to_do = (EngineCoreRequestType.WAKEUP, None)
    except (ImportError, AttributeError):
        return _nobody
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        queue: Any = getattr(frame.f_locals.get("self"), "input_queue", None)
        if hasattr(queue, "put_nowait"):
            return lambda: queue.put_nowait(nothing_to_do)
        frame = frame.f_back
    return _nobody


def _nobody() -> None:
    """The engine sees it in its next step."""
