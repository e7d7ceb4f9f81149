"""Joined block hashes, the form in jobs and changes."""

from __future__ import annotations

import numpy as np


def split_hashes(hashes: bytes, count: int) -> list[bytes]:
    """Split ``count`` joined hashes of equal width."""
    width = len(hashes) // max(1, count)
    return [hashes[i : i + width] for i in range(0, len(hashes), width)] if width else []


def first_bytes(hashes: bytes, width: int, count: int) -> bytes:
    """The first ``count`` bytes of each hash, joined like the hashes."""
    return np.frombuffer(hashes, np.uint8).reshape(-1, width)[:, :count].tobytes()
