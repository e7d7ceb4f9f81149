"""Statistics of samples."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np


def latency(seconds: Sequence[float]) -> dict[str, float]:
    """Microseconds of a list of durations: ``n``, ``p50_us``, ``p99_us``, ``min_us`` and ``max_us``."""
    p50, p99 = percentiles(seconds)
    return {
        "n": len(seconds),
        "p50_us": round(p50 * 1e6, 2),
        "p99_us": round(p99 * 1e6, 2),
        "min_us": round(min(seconds) * 1e6, 2),
        "max_us": round(max(seconds) * 1e6, 2),
    }


def percentiles(samples: Sequence[float]) -> tuple[float, float]:
    """p50 and p99; with fewer than a hundred samples the latter is close to the largest."""
    p50, p99 = np.percentile(np.asarray(samples, np.float64), (50, 99))
    return float(p50), float(p99)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Turn collections off: each takes milliseconds once gRPC and numpy are imported, and engines freeze their heap."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
