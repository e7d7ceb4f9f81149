"""Errors that end a measurement or the whole run."""

from __future__ import annotations

from kvsidecar.errors import KVSidecarError


class BenchError(KVSidecarError):
    """The run cannot start, or one measurement cannot be finished. The text says why."""


class BadOption(BenchError):
    """An option of ``kvsidecar bench`` is invalid. The text is one sentence that names it."""


class Skipped(BenchError):
    """A measurement does not apply here: something it needs is missing. The text says what."""


class CudaFailed(BenchError):
    """A call of the CUDA driver failed."""
