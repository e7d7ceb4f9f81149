"""The notes that an engine attaches to the blocks it stores, for those who announce them: tokens and parents.

The daemon keeps notes, and passes them on with the blocks, but does not read them. A note is one byte that describes
the rest, the first bytes of the block's hash, its parent's hash, and its tokens. A reader needs to know neither the
engine nor its groups: the byte also gives the length of the hashes and what the group needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

CHECK_BYTES = 8
TOKEN_BYTES = 4
NAME_BYTES = 8
"""Bytes of a hash, for engines whose events name blocks by the first bytes alone."""

_NOTHING, _FIRST, _WITH_PARENT = range(3)
_KIND = 3
_NAMES = 0x10
"""The hashes have `NAME_BYTES`."""
_CHAINED = 0x20
"""A hit needs every block of the prefix."""


@dataclass(frozen=True, slots=True)
class NoteFormat:
    """The format of all notes on the blocks of one KV cache group."""

    hash_bytes: int
    block_tokens: int
    chained: bool

    @property
    def nbytes(self) -> int:
        return 1 + CHECK_BYTES + self.hash_bytes + TOKEN_BYTES * self.block_tokens

    @classmethod
    def of(cls, notes: bytes, count: int, hash_bytes: int) -> Self | None:
        """The format of some notes; None if all are empty, or from another version of this program.

        Args:
            notes: the joined notes on ``count`` blocks.
            hash_bytes: the size of the namespace's hashes.
        """
        nbytes = len(notes) // max(1, count)
        head = next((notes[i] for i in range(0, len(notes), nbytes or 1) if notes[i] & _KIND != _NOTHING), 0)
        if not head or head & ~(_KIND | _NAMES | _CHAINED) or nbytes * count != len(notes):
            return None
        width = NAME_BYTES if head & _NAMES else hash_bytes
        tokens, rest = divmod(nbytes - 1 - CHECK_BYTES - width, TOKEN_BYTES)
        return None if tokens < 1 or rest else cls(width, tokens, bool(head & _CHAINED))

    def pack(self, block_hash: bytes, parent: bytes | None, packed: bytes) -> bytes:
        """Make a note.

        Args:
            packed: the tokens, `TOKEN_BYTES` each.
        """
        head = (_FIRST if parent is None else _WITH_PARENT) | (_CHAINED if self.chained else 0)
        head |= _NAMES if self.hash_bytes == NAME_BYTES else 0
        note = bytes([head]) + block_hash[:CHECK_BYTES] + (parent or bytes(self.hash_bytes)) + packed
        return note if len(note) == self.nbytes else self.nothing

    @property
    def nothing(self) -> bytes:
        """An empty note."""
        return bytes(self.nbytes)

    def unpack(self, block_hash: bytes, note: bytes) -> tuple[bytes | None, bytes] | None:
        """The parent and the packed tokens; None if the note is empty, or on another block."""
        kind, start = note[0] & _KIND, 1 + CHECK_BYTES + self.hash_bytes
        if kind not in (_FIRST, _WITH_PARENT) or note[1 : 1 + CHECK_BYTES] != block_hash[:CHECK_BYTES]:
            return None
        return (note[1 + CHECK_BYTES : start] if kind == _WITH_PARENT else None), note[start:]
