"""Block hashes as they come over the wire: all of a group in one string of bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

from kvsidecar.errors import InvalidRequest


class PackedHashes(Sequence[bytes]):
    """Fixed-width hashes in one string of bytes, cut out when they are looked at: the cache takes the string whole.

    Raises:
        InvalidRequest: the length is no multiple of the width.
    """

    __slots__ = ("_width", "packed")

    def __init__(self, packed: bytes, width: int) -> None:
        if len(packed) % width:
            raise InvalidRequest(f"{len(packed)} bytes of hashes are not a multiple of the namespace's width {width}")
        self.packed = packed
        self._width = width

    def __len__(self) -> int:
        return len(self.packed) // self._width

    def part(self, first: int, end: int) -> PackedHashes:
        """The hashes from ``first`` to before ``end``."""
        return PackedHashes(self.cut(first, end), self._width)

    def cut(self, first: int, end: int) -> bytes:
        """The hashes from ``first`` to before ``end``, joined."""
        return self.packed[first * self._width : end * self._width]

    def pieces(self, count: int) -> Iterator[bytes]:
        """All hashes, joined in pieces of ``count``."""
        for start in range(0, len(self.packed), count * self._width):
            yield self.packed[start : start + count * self._width]

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            return [self[each] for each in range(len(self))[index]]
        start = index * self._width
        if not 0 <= start < len(self.packed):
            start = range(0, len(self.packed), self._width)[index]
        return self.packed[start : start + self._width]


def as_keys(hashes: Sequence[bytes]) -> Sequence[bytes] | bytes:
    """The form that the cache takes fastest."""
    return hashes.packed if isinstance(hashes, PackedHashes) else hashes
