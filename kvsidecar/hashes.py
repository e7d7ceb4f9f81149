"""Block hashes as they come over the wire: all of a group in one string of bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import overload

import numpy as np

from kvsidecar.errors import InvalidRequest


class PackedHashes(Sequence[bytes]):
    """Fixed-width hashes in one string of bytes, cut out when they are looked at: a prefix of 4096 blocks whose first
    is a miss costs one.

    Raises:
        InvalidRequest: the length is no multiple of the width.
    """

    __slots__ = ("_width", "packed")

    def __init__(self, packed: bytes, width: int) -> None:
        if len(packed) % width:
            raise InvalidRequest(f"{len(packed)} bytes of hashes are no multiple of the namespace's width {width}")
        self.packed = packed
        self._width = width

    def __len__(self) -> int:
        return len(self.packed) // self._width

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        return self._cut(0, len(self.packed))[index]

    def __iter__(self) -> Iterator[bytes]:
        step = _CUT_AT_ONCE * self._width
        return chain.from_iterable(self._cut(start, start + step) for start in range(0, len(self.packed), step))

    def _cut(self, start: int, end: int) -> list[bytes]:
        if end - start == self._width:
            return [self.packed[start:end]]
        # numpy's `void` is bytes of one width: 35 ns a hash, where slicing in Python takes 135.
        return np.frombuffer(self.packed[start:end], f"V{self._width}").tolist()  # type: ignore[no-any-return]


_CUT_AT_ONCE = 128
"""Hashes."""


def as_keys(hashes: Sequence[bytes]) -> Sequence[bytes] | bytes:
    """The form that the cache takes fastest."""
    return hashes.packed if isinstance(hashes, PackedHashes) else hashes
