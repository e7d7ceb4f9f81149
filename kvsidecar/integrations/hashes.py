"""Block hashes as jobs and changes carry them: joined."""

from __future__ import annotations


def split_hashes(hashes: bytes, count: int) -> list[bytes]:
    """Split ``count`` joined hashes of equal width."""
    width = len(hashes) // max(1, count)
    return [hashes[i : i + width] for i in range(0, len(hashes), width)] if width else []
