"""The memory that one rank registers. Engine-independent."""

from __future__ import annotations

from dataclasses import dataclass

from kvsidecar.client import GroupLayout, KVBuffers


@dataclass(frozen=True, slots=True)
class RankMemory:
    buffers: KVBuffers
    groups: tuple[GroupLayout, ...]
