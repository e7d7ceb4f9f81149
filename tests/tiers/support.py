"""Memory like the pool's, spaces, hashes and bytes for tests of backends."""

from __future__ import annotations

import mmap
import random
from collections.abc import Sequence

from kvsidecar.tiers.backend import Backend, ReadEnd, ShardSpace, WriteEnd
from kvsidecar.types import Namespace

PAGE = 4096
EMPTY = 0xEE


def space(name: str = "one", *, shard: int = 0, group: int = 0, nbytes: int = PAGE, hash_bytes: int = 32) -> ShardSpace:
    namespace = Namespace(name, "bf16", "layers", 16, 2, 1, "sha256", hash_bytes)
    return ShardSpace(namespace, group, shard, 2, nbytes)


def key(number: int) -> bytes:
    return random.Random(number).randbytes(32)


def content(of: ShardSpace, number: int, version: int = 0) -> bytes:
    return random.Random(f"{of.digest.hex()} {number} {version}").randbytes(of.shard_bytes)


def memory(of: ShardSpace, count: int) -> list[memoryview]:
    """Slots of the pool: each begins at a page, and has bytes beyond its end that must stay."""
    extent = -(-of.shard_bytes // PAGE) * PAGE
    area = memoryview(mmap.mmap(-1, max(1, count) * extent))
    area[:] = bytes([EMPTY]) * len(area)
    return [area[at : at + of.shard_bytes] for at in range(0, count * extent, extent)]


def write(backend: Backend, of: ShardSpace, numbers: Sequence[int], version: int = 0) -> list[WriteEnd]:
    slots = memory(of, len(numbers))
    for slot, number in zip(slots, numbers, strict=True):
        slot[:] = content(of, number, version)
    return backend.write(of, [key(number) for number in numbers], slots, [None] * len(numbers))


def read(backend: Backend, of: ShardSpace, numbers: Sequence[int]) -> dict[int, ReadEnd]:
    """How each ended. What is done has the right bytes, whatever is read."""
    slots = memory(of, len(numbers))
    ends = backend.read(of, [key(number) for number in numbers], slots)
    for slot, number, end in zip(slots, numbers, ends, strict=True):
        if end is ReadEnd.DONE:
            assert slot == content(of, number), f"wrong bytes for {number}"
    return dict(zip(numbers, ends, strict=True))


def there(backend: Backend, of: ShardSpace, numbers: Sequence[int]) -> list[int]:
    found = backend.find(of, [key(number) for number in numbers])
    return [number for number, is_there in zip(numbers, found, strict=True) if is_there]
