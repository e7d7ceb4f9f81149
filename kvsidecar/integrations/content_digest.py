"""A digest of what an engine has in memory, such as a LoRA adapter. Engine-independent."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch

from kvsidecar.integrations.weights import samples_of_tensor


def digest_of(value: Any, package: str) -> str:
    """The hexadecimal digest of plain values and tensors in dicts, lists and objects. Of each tensor, as many samples
    count as of a model's (`weights`).

    Args:
        package: prefix of the modules whose objects count by their attributes.

    Raises:
        TypeError: there is something of another type.
    """
    found = hashlib.blake2b(digest_size=32)
    for each in _pieces(value, package):
        found.update(len(each).to_bytes(8, "big"))
        found.update(each)
    return found.hexdigest()


def _pieces(value: Any, package: str) -> Iterator[Any]:
    """The bytes that distinguish values."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        yield repr(value).encode()
    elif isinstance(value, torch.Tensor):
        yield repr((value.dtype, tuple(value.shape))).encode()
        data = value.detach().contiguous().reshape(-1).view(torch.uint8)
        for offset, length in samples_of_tensor(data.numel()):
            yield data[offset : offset + length].cpu().numpy()
    elif isinstance(value, dict):
        yield f"{len(value)} entries".encode()
        for key in sorted(value, key=repr):
            yield repr(key).encode()
            yield from _pieces(value[key], package)
    elif isinstance(value, list | tuple):
        yield f"{len(value)} values".encode()
        for each in value:
            yield from _pieces(each, package)
    elif type(value).__module__.startswith(package) and hasattr(value, "__dict__"):
        yield from _pieces(vars(value), package)
    else:
        raise TypeError(f"there is a {type(value).__qualname__}")
