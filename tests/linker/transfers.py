"""What SGLang passes to a linker, without SGLang."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class PoolName(StrEnum):
    """In place of SGLang's, which is a string and an enum."""

    KV = "kv"
    SWA = "swa"
    MAMBA = "mamba"


@dataclass
class Transfer:
    """As SGLang's ``PoolTransfer``, with an array for its tensor."""

    name: PoolName
    keys: list[str]
    device_indices: Any = None


def keys(count: int, name: object = "") -> list[str]:
    """The hashes of so many pages; equal names begin alike."""
    return [hashlib.sha256(f"{name} {i}".encode()).hexdigest() for i in range(count)]
