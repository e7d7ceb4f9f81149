"""Time limits in proportion to the size of a lookup."""

from __future__ import annotations

BUDGETED_HASHES = 2048
"""Hashes of the largest lookup for which the options' times hold. With 5 ms a larger one has 2.4 us a hash, and takes a
fifth of that."""


def in_proportion(seconds: float, hashes: int) -> float:
    """The time limit of a lookup with this many hashes, if one with up to `BUDGETED_HASHES` gets ``seconds``."""
    return seconds * max(1.0, hashes / BUDGETED_HASHES)
