"""Time limits in proportion to the size of a lookup."""

from __future__ import annotations

BUDGETED_HASHES = 2048
"""What the options' times are for. With 5 ms a larger lookup has 2.4 us a hash, and takes a fifth of that."""


def in_proportion(seconds: float, hashes: int) -> float:
    """The time for a lookup of so many hashes, where one of up to `BUDGETED_HASHES` has ``seconds``."""
    return seconds * max(1.0, hashes / BUDGETED_HASHES)
