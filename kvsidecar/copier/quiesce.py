"""After an error: whether anything that a stream was given may still move a byte."""

from __future__ import annotations

import time
from typing import Final

from kvsidecar.device.base import CopyStream
from kvsidecar.errors import CopyFailed
from kvsidecar.support import failpoints, log

QUIESCE_SECONDS: Final = 2.0
"""After an error the device has this long to end what it was given. Copies take milliseconds."""
QUIESCE_POLL_SECONDS: Final = 1e-3

_log = log.get("worker")


def quiesce(stream: CopyStream) -> None:
    """Return when nothing moves any more that the stream was ever given.

    Raises:
        CopyFailed: with ``outcome_known=False``: that is not so after `QUIESCE_SECONDS`, or the device does not say.
        DeviceLost: the context is gone.
    """
    failpoints.hit("copy.quiesce")
    deadline = time.monotonic() + QUIESCE_SECONDS
    while not stream.is_done():
        if time.monotonic() >= deadline:
            raise CopyFailed(f"copies still run {QUIESCE_SECONDS:g} s after an error", outcome_known=False)
        time.sleep(QUIESCE_POLL_SECONDS)


def can_quiesce(stream: CopyStream) -> bool:
    """Whether nothing moves any more, or soon does not."""
    try:
        quiesce(stream)
    except Exception as error:  # noqa: BLE001 - whatever it is: then nobody knows
        _log.error("copies were not seen to end", error=f"{type(error).__name__}: {error}")
        return False
    return True


def after_quiescing(stream: CopyStream, error: CopyFailed) -> CopyFailed:
    """A copy's error, after what the device was given is over if that is possible."""
    if error.outcome_known or not can_quiesce(stream):
        return error
    return CopyFailed(str(error), outcome_known=True)
