"""How each engine's KV cache events name blocks and memory: another engine needs an entry here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvsidecar.integrations.residency.note_format import NAME_BYTES

Event = dict[str, Any]
"""One event in its wire form: a map with its ``type``."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How an engine's KV cache events name blocks and memory."""

    pool: str
    disk: str | None
    """None: the engine fetches nothing from the node's disk."""
    number: Callable[[bytes], int]
    """The number under which routers know the block with this hash."""
    stored: Event = field(default_factory=dict)
    """Further fields of ``BlockStored``."""


def _last_bytes(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[-8:], "big")


def _first_bytes(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[:8], "big", signed=True)


VLLM = Dialect("CPU", "STORAGE", _last_bytes, {"kv_cache_spec_kind": "full_attention"})
"""Follows ``maybe_convert_block_hash`` and ``KVCacheSpecKind`` of vLLM."""
SGLANG = Dialect("CPU_PINNED", None, _first_bytes)
"""Follows ``hash_str_to_int64`` of SGLang."""


def dialect_of(hash_bytes: int) -> Dialect:
    """The dialect of the engine whose notes have hashes of this many bytes."""
    return SGLANG if hash_bytes == NAME_BYTES else VLLM
