"""Block hashes as jobs and changes carry them: joined."""

from __future__ import annotations

import numpy as np


def split_hashes(hashes: bytes, count: int) -> list[bytes]:
    """Split ``count`` joined hashes of equal width."""
    width = len(hashes) // max(1, count)
    return [hashes[i : i + width] for i in range(0, len(hashes), width)] if width else []


def first_bytes(hashes: bytes, width: int, count: int) -> bytes:
    """The first ``count`` bytes of each of joined hashes, joined."""
    return np.frombuffer(hashes, np.uint8).reshape(-1, width)[:, :count].tobytes()
