"""The bytes of a shard: their checksum, the trailer behind them, and the rest of them to move."""

from __future__ import annotations

import struct
from typing import Final

import xxhash

from kvsidecar.tiers.backend import ShardSpace

_LAYOUT: Final = struct.Struct("<8s16s32sQ")
"""Magic, digest of the shard space, start of the block hash, checksum of the bytes."""
_MAGIC: Final = b"kvshard1"
TRAILER_BYTES: Final = _LAYOUT.size


def trailer_of(space: ShardSpace, block_hash: bytes, checksum: int) -> bytes:
    """The bytes behind a shard where others may write too: they name the shard and its checksum."""
    return _LAYOUT.pack(_MAGIC, space.digest, block_hash, checksum)


def checksum_of(memory: memoryview, known: int | None = None) -> int:
    """XXH3 (64 bits) of a shard's bytes, unless it is known."""
    return xxhash.xxh3_64_intdigest(memory) if known is None else known


def without_first(parts: list[memoryview], count: int) -> list[memoryview]:
    """The rest of these after this many bytes are read or written."""
    while parts and count >= parts[0].nbytes:
        count -= parts[0].nbytes
        parts = parts[1:]
    return [parts[0][count:], *parts[1:]] if parts else []
