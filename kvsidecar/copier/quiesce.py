"""Waits, after an error, until no copy of a stream can move a byte any more."""

from __future__ import annotations

import time
from typing import Final

from kvsidecar.device.base import CopyStream
from kvsidecar.errors import CopyFailed
from kvsidecar.support import log

QUIESCE_SECONDS: Final = 2.0
"""After an error the device has this long to end its copies, which take milliseconds."""
QUIESCE_POLL_SECONDS: Final = 1e-3

_log = log.get("copier")


def quiesce(stream: CopyStream) -> None:
    """Return when all copies that the stream was ever given are over.

    Raises:
        CopyFailed: with ``outcome_known=False``: they are not after `QUIESCE_SECONDS`, or the device does not say.
        DeviceLost: the context is gone.
    """
    deadline = time.monotonic() + QUIESCE_SECONDS
    while not stream.is_done():
        if time.monotonic() >= deadline:
            raise CopyFailed(f"copies still run {QUIESCE_SECONDS:g} s after an error", outcome_known=False)
        time.sleep(QUIESCE_POLL_SECONDS)


def after_quiescing(stream: CopyStream, error: CopyFailed) -> CopyFailed:
    """A copy's error, once the stream's copies are over.

    Raises:
        CopyFailed, DeviceLost: they may still run. Only the end of the process ends them.
    """
    if error.outcome_known:
        return error
    try:
        quiesce(stream)
    except Exception as unsure:
        _log.error("copies were not seen to end", error=f"{type(unsure).__name__}: {unsure}")
        raise CopyFailed(f"{error}; {unsure}", outcome_known=False) from unsure
    return CopyFailed(str(error))
