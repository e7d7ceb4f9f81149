"""Whether the copies of a stream may still move a byte, after an error."""

from __future__ import annotations

import time
from typing import Final

from kvsidecar.device.base import CopyStream
from kvsidecar.errors import CopyFailed
from kvsidecar.support import failpoints, log

QUIESCE_SECONDS: Final = 2.0
"""After an error the device has this long to end its copies, which take milliseconds."""
QUIESCE_POLL_SECONDS: Final = 1e-3

_log = log.get("worker")


def quiesce(stream: CopyStream) -> None:
    """Return when all copies that the stream was ever given are over.

    Raises:
        CopyFailed: with ``outcome_known=False``: they are not after `QUIESCE_SECONDS`, or the device does not say.
        DeviceLost: the context is gone.
    """
    failpoints.hit("copy.quiesce")
    deadline = time.monotonic() + QUIESCE_SECONDS
    while not stream.is_done():
        if time.monotonic() >= deadline:
            raise CopyFailed(f"copies still run {QUIESCE_SECONDS:g} s after an error", outcome_known=False)
        time.sleep(QUIESCE_POLL_SECONDS)


def can_quiesce(stream: CopyStream) -> bool:
    """Whether all copies of the stream are over, now or soon."""
    try:
        quiesce(stream)
    except Exception as error:  # noqa: BLE001 - whatever it is, the copies may still run
        _log.error("copies were not seen to end", error=f"{type(error).__name__}: {error}")
        return False
    return True


def after_quiescing(stream: CopyStream, error: CopyFailed) -> CopyFailed:
    """A copy's error, with ``outcome_known=True`` if the stream's copies are over soon."""
    if error.outcome_known or not can_quiesce(stream):
        return error
    return CopyFailed(str(error), outcome_known=True)
