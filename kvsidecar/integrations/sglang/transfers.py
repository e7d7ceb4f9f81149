"""Reads SGLang's ``PoolTransfer``: pages and their hashes. Pure: no torch, whose tensors are seen as arrays."""

from __future__ import annotations

from binascii import unhexlify
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvsidecar.integrations.sglang.groups import MAMBA

HASH_BYTES = 32
"""SGLang hashes pages with SHA-256."""

Ids = npt.NDArray[np.int64]


def name_of(transfer: Any) -> str:
    """The value of a transfer's ``PoolName``. (The enum is a string that does not hash like one.)"""
    return str(getattr(transfer.name, "value", transfer.name))


def hashes_of(keys: Sequence[str]) -> bytes:
    """The joined hashes of pages. Raises ValueError if one is not 32 bytes in hexadecimal digits."""
    joined = unhexlify("".join(keys))  # in half of the time of bytes.fromhex
    if len(joined) != len(keys) * HASH_BYTES:
        raise ValueError(f"{len(keys)} page hashes have {len(joined)} bytes together, not {HASH_BYTES} each")
    return joined


class RecentHashes:
    """Like `hashes_of`, but the last keys are not converted again: SGLang names the pages of a lookup again when it
    loads them, and when it offers them together with what it has computed."""

    def __init__(self) -> None:
        self._keys: tuple[str, ...] = ()
        self._joined = b""

    def __call__(self, keys: Sequence[str]) -> bytes:
        same = min(len(keys), len(self._keys))
        # Keys are chained: with the same one at one place, all before it are the same.
        if not same or keys[same - 1] != self._keys[same - 1]:
            same = 0
        self._joined = self._joined[: same * HASH_BYTES] + hashes_of(keys[same:])
        self._keys = tuple(keys)  # SGLang may change its list
        return self._joined


class Slots(Protocol):
    """The first and the last slot of each page, int64 ``[pages, 2]`` (``[pages, 1]`` for pages of one slot), which may
    still be on their way to the host."""

    def arrived(self) -> bool: ...

    def take(self) -> npt.NDArray[np.int64]:
        """Wait until the slots have arrived."""


@dataclass(frozen=True, slots=True)
class OnHost:
    """`Slots` that are on the host already."""

    slots: npt.NDArray[np.int64]

    def arrived(self) -> bool:
        return True

    def take(self) -> npt.NDArray[np.int64]:
        return self.slots


def read_now(ends: Any) -> OnHost:
    return OnHost(np.array(ends.detach() if hasattr(ends, "detach") else ends, np.int64))


class PageIds:
    """The pages of a transfer's ``device_indices``, one for each key. A state (Mamba) has one index for each key.

    Args:
        read: starts to copy the first and the last index of each page to the host.
        first: the first of the pages that are read.

    Raises:
        ValueError: there are more or fewer indices than the keys' pages have.
    """

    def __init__(self, transfer: Any, page_size: int, read: Callable[[Any], Slots] = read_now, first: int = 0) -> None:
        self._name = name_of(transfer)
        size = self._size = 1 if self._name == MAMBA else page_size
        indices = transfer.device_indices
        count = len(transfer.keys)
        if len(indices) != size * count:
            raise ValueError(f"{len(indices)} slots for {count} keys of pages of {size}")
        self._count = count - first
        self._slots = read(indices.reshape(-1, size)[first:, :: max(1, size - 1)])

    def __len__(self) -> int:
        return self._count

    def arrived(self) -> bool:
        return self._slots.arrived()

    def take(self) -> Ids:
        """Wait until the slots have arrived. Raises ValueError if they are not whole, aligned pages."""
        first_last = self._slots.take()
        first = first_last[:, 0]
        if self._size > 1 and (np.any(first % self._size) or np.any(first_last[:, -1] - first != self._size - 1)):
            raise ValueError(f"the slots of {self._name} are not aligned pages of {self._size}")
        return first // self._size
