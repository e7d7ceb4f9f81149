"""KV events of SGLang."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kvsidecar.client import ResidencyChange


class wire:  # noqa: N801 - in place of a module
    class StorageMedium(StrEnum):
        GPU = "GPU"
        CPU = "CPU_PINNED"

    @dataclass
    class BlockStored:
        block_hashes: list[int]
        parent_block_hash: int | None
        token_ids: list[Any]
        block_size: int
        lora_id: int | None = None
        medium: str | None = None
        cache_salt: str | None = None
        session_id: str | None = None
        lora_name: str | None = None

    @dataclass
    class BlockRemoved:
        block_hashes: list[int]
        medium: str | None = None

    @dataclass
    class AllBlocksCleared:
        pass


@dataclass
class Watch:
    news: list[ResidencyChange] = field(default_factory=list)

    @property
    def has_residency(self) -> bool:
        return bool(self.news)

    def take_residency(self, most_bytes: int) -> list[ResidencyChange]:
        assert most_bytes > 0
        taken, self.news = self.news[:2], self.news[2:]
        return taken
