"""What stands behind a shard where others may write too: of which shard it is, and what its checksum is."""

from __future__ import annotations

import struct
from typing import Final

from kvsidecar.tiers.backend import ShardSpace

_LAYOUT: Final = struct.Struct("<8s16s32sQ")
"""Magic, digest of the shard space, start of the block hash, checksum of the bytes."""
_MAGIC: Final = b"kvshard1"
TRAILER_BYTES: Final = _LAYOUT.size


def trailer_of(space: ShardSpace, block_hash: bytes, checksum: int) -> bytes:
    """Args: checksum: XXH3 (64 bits) of the shard's bytes."""
    return _LAYOUT.pack(_MAGIC, space.digest, block_hash, checksum)
