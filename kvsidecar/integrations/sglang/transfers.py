"""Reads SGLang's ``PoolTransfer``: pages and their hashes. Pure: no torch, whose tensors are seen as arrays."""

from __future__ import annotations

from binascii import unhexlify
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsidecar.integrations.sglang.groups import MAMBA

HASH_BYTES = 32
"""SGLang hashes pages with SHA-256."""

Ids = npt.NDArray[np.int64]


def name_of(transfer: Any) -> str:
    """The value of its ``PoolName``. (The enum is a string that does not hash like one.)"""
    return str(getattr(transfer.name, "value", transfer.name))


def hashes_of(keys: Sequence[str]) -> bytes:
    """The joined hashes of pages. Raises ValueError if one is not 32 bytes in hexadecimal digits."""
    joined = unhexlify("".join(keys))  # in half of the time of bytes.fromhex
    if len(joined) != len(keys) * HASH_BYTES:
        raise ValueError(f"{len(keys)} page hashes have {len(joined)} bytes together, not {HASH_BYTES} each")
    return joined


def pages_of(transfer: Any, page_size: int) -> Ids:
    """The pages of a transfer's ``device_indices``, one for each key. A state (Mamba) has one index for each key.

    Reads the first index of each page only: on a GPU this is a copy that waits for the current stream.

    Raises:
        ValueError: they are not whole, aligned pages, as many as there are keys.
    """
    size = 1 if name_of(transfer) == MAMBA else page_size
    indices = transfer.device_indices
    if len(indices) != size * len(transfer.keys):
        raise ValueError(f"{len(indices)} slots for {len(transfer.keys)} keys of pages of {size}")
    # The first and the last of each page in one copy.
    ends = indices.reshape(-1, size)[:, :: max(1, size - 1)]
    first_last = np.asarray(ends.detach().cpu() if hasattr(ends, "detach") else ends, np.int64)
    first = first_last[:, 0]
    if size > 1 and (np.any(first % size) or np.any(first_last[:, -1] - first != size - 1)):
        raise ValueError(f"the slots of {name_of(transfer)} are not aligned pages of {size}")
    return first // size
