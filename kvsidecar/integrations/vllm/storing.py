"""Which blocks to store next. Pure.

A block of the GPU is found by its hash in the GPU's own prefix cache, not by its place in a request's block table:
vLLM enters a block there when it is going to be full of known tokens, never writes to it again from then on, and
takes it out before it gives the block to somebody else. A table that was followed from step to step would go stale
with every preemption, sliding window and copy on write. Entered does not mean written: the step that writes the block
may be in flight. Stores are ordered behind it on the device, or by the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from kvsidecar.integrations.vllm.groups import Group, Kind
from kvsidecar.integrations.vllm.metadata import GroupBlocks

GROUP_ID_BYTES = 4
"""vLLM's own key of a block is its hash and the index of its group, big endian."""


class Pool(Protocol):
    """What is used of vLLM's ``BlockPool``; its blocks are ``KVCacheBlock``, with ``block_id``, ``ref_cnt``,
    ``block_hash`` and ``is_null``."""

    num_gpu_blocks: int
    cached_block_hash_to_block: Any
    free_block_queue: Any
    null_block: Any

    def touch(self, blocks: Sequence[Any]) -> None: ...
    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None: ...


class Known:
    """Blocks that are stored, or were when we last knew. Bounded; the least recently added half is forgotten at once.

    Args:
        capacity: blocks that are remembered at least; each takes about 130 bytes.
    """

    def __init__(self, capacity: int = 1 << 18) -> None:
        self._capacity = capacity
        self._young: set[bytes] = set()
        self._old: set[bytes] = set()

    def __contains__(self, key: bytes) -> bool:
        return key in self._young or key in self._old

    def add(self, keys: Iterable[bytes]) -> None:
        self._young.update(keys)
        if len(self._young) > self._capacity:
            self._young, self._old = set(), self._young

    def discard(self, keys: Iterable[bytes]) -> list[bytes]:
        """Returns those that were known."""
        found = [key for key in keys if key in self]
        self._young.difference_update(found)
        self._old.difference_update(found)
        return found

    def clear(self) -> None:
        self._young.clear()
        self._old.clear()

    def unknown(self, keys: list[bytes]) -> list[bytes]:
        """Those that are not known, in their order."""
        young, old = self._young, self._old
        if young.isdisjoint(keys) and old.isdisjoint(keys):
            return keys
        return [key for key in keys if key not in young and key not in old]


@dataclass(slots=True)
class Selection:
    """Blocks to store."""

    keys: dict[int, list[bytes]] = field(default_factory=dict)
    """By group; vLLM's own."""
    blocks: dict[int, list[Any]] = field(default_factory=dict)
    """By group; the pool's blocks with these keys."""
    traceparent: str | None = None
    """Of the first request of these blocks whose trace is sampled."""

    def __bool__(self) -> bool:
        return bool(self.keys)

    def __len__(self) -> int:
        return sum(map(len, self.keys.values()))

    def add(self, group: int, keys: list[bytes], blocks: list[Any]) -> None:
        if keys:
            self.keys.setdefault(group, []).extend(keys)
            self.blocks.setdefault(group, []).extend(blocks)

    def all_blocks(self) -> list[Any]:
        """In the order in which they are to be evicted: vLLM evicts the end of a prefix before its beginning."""
        return [block for blocks in self.blocks.values() for block in reversed(blocks)]

    def all_keys(self) -> list[bytes]:
        return [key for keys in self.keys.values() for key in keys]

    def packed(self) -> tuple[GroupBlocks, ...]:
        return tuple(
            GroupBlocks(
                group, hashes_of(keys), np.array([each.block_id for each in self.blocks[group]], dtype=np.int64)
            )
            for group, keys in self.keys.items()
        )


def keys_of(group: Group, hashes: Iterable[bytes]) -> list[bytes]:
    """vLLM's own keys of blocks."""
    suffix = group.index.to_bytes(GROUP_ID_BYTES, "big")
    return [each + suffix for each in hashes]


def hashes_of(keys: Sequence[bytes]) -> bytes:
    """The hashes in vLLM's own keys, one after the other."""
    key = np.dtype([("hash", f"V{len(keys[0]) - GROUP_ID_BYTES}"), ("group", f"V{GROUP_ID_BYTES}")])
    return np.frombuffer(b"".join(keys), key)["hash"].tobytes()


def block_range(group: Group, done: int, aligned: int, end: int) -> range:
    """Indices of a request's blocks of this group that are to be considered, of tokens ``done`` to ``aligned``."""
    last = aligned // group.block_tokens
    if group.eagle and aligned + group.block_tokens <= end:
        last += 1  # a hit must be followed by one more block: see `Group.eagle`
    return range(done // group.block_tokens, last)


def select(pool: Pool, known: Known, group: Group, hashes: Iterable[bytes]) -> tuple[list[bytes], list[Any]]:
    """Those of a group's blocks that are not known to be stored and that the GPU has: vLLM's keys, and the blocks."""
    keys = known.unknown(keys_of(group, hashes))
    blocks = list(map(pool.cached_block_hash_to_block.get_one_block, keys))
    if not all(blocks):
        found = [(key, block) for key, block in zip(keys, blocks, strict=True) if block is not None]
        keys, blocks = [key for key, _ in found], [block for _, block in found]
    return keys, blocks


def walk(pool: Pool, known: Known, groups: Mapping[int, Group], watermark: int) -> list[tuple[bytes, Any]]:
    """Lazy mode: those of the ``watermark`` blocks that the GPU evicts next which are not known to be stored.

    Returns:
        vLLM's keys, and the blocks.
    """
    found: dict[bytes, Any] = {}
    for walked, block in enumerate(pool.free_block_queue.iter_blocks_after(None)):
        if walked >= watermark:
            break
        key = block.block_hash
        if key is None or key in known or block.is_null:
            continue
        group = groups.get(int.from_bytes(key[-GROUP_ID_BYTES:], "big"))
        # A block that is cached under the hash of a part of it is not what others take this hash for.
        tokens = getattr(block, "block_hash_num_tokens", None)
        if group is not None and (tokens is None or tokens % group.block_tokens == 0):
            found[bytes(key)] = block
    return list(found.items())


def default_watermark(groups: Sequence[Group], step_tokens: int) -> int:
    """Blocks: twice as many as a step of ``step_tokens`` tokens can need. The same rule as vLLM's own lazy mode."""
    blocks = 0
    for group in groups:
        if group.kind is Kind.STATE:
            blocks += 2
        elif group.kind is Kind.SLIDING_WINDOW:
            blocks += -(-group.window // group.block_tokens) + 1
        else:
            blocks += -(-step_tokens // group.block_tokens)
    return 2 * blocks
