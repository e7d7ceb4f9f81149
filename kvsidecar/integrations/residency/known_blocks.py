"""What KV events say about blocks besides their hashes: tokens and parents, as far as this engine knows them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from kvsidecar.integrations.hashes import split_hashes

MAX_KNOWN = 1 << 18
"""Most blocks whose tokens are remembered, at 350 bytes each for blocks of 16 tokens. Beyond it the oldest go."""
CHECK_BYTES = 8
TOKEN_BYTES = 4
_NOTHING, _FIRST, _WITH_PARENT = range(3)
"""The first byte of a note."""


class Group(Protocol):
    """What is needed of an engine's KV cache group."""

    @property
    def index(self) -> int: ...

    @property
    def block_tokens(self) -> int:
        """Tokens in a block."""

    @property
    def chained(self) -> bool:
        """Whether a hit needs every block of the prefix: a router must know a block's parent."""


@dataclass(frozen=True, slots=True)
class BlockInfo:
    packed: bytes
    """Token ids, `TOKEN_BYTES` each."""
    parent: bytes | None
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: Any = None
    own: bool = True
    """From a request of this engine, whose router knows the parent."""

    @property
    def tokens(self) -> list[int]:
        return array("i", self.packed).tolist()


UNKNOWN = BlockInfo(b"", None)


class KnownBlocks:
    """By group and hash, in the order in which they became known.

    Engines tell each other by notes, which the daemon passes on with the blocks that they store: a byte that says what
    follows, the first bytes of the hash, the parent's hash, the tokens. Blocks that also depend on an adapter, an image
    or a salt are not noted.
    """

    def __init__(self, groups: Iterable[Group], hash_bytes: int) -> None:
        self._groups = {group.index: group for group in groups}
        self._hash_bytes = hash_bytes
        self._infos: dict[tuple[int, bytes], BlockInfo] = {}

    def __len__(self) -> int:
        return len(self._infos)

    def get(self, index: int, block_hash: bytes) -> BlockInfo | None:
        return self._infos.get((index, block_hash))

    def pop(self, index: int, block_hash: bytes) -> BlockInfo | None:
        return self._infos.pop((index, block_hash), None)

    def add(self, index: int, block_hash: bytes, info: BlockInfo) -> None:
        self._infos[index, block_hash] = info
        if len(self._infos) > MAX_KNOWN:
            # Many at once: each deletion at the front of a dict makes finding its first entry slower.
            for each in list(self._infos)[: MAX_KNOWN // 64 + 1]:
                del self._infos[each]

    def note_bytes(self, index: int) -> int:
        return 1 + CHECK_BYTES + self._hash_bytes + TOKEN_BYTES * self._groups[index].block_tokens

    def notes(self, index: int, hashes: Iterable[bytes]) -> bytes:
        """The notes on these blocks, joined."""
        nothing, notes = bytes(self.note_bytes(index)), []
        for each in hashes:
            info = self.get(index, each)
            if info is None or info.lora_name is not None or info.lora_id is not None or info.extra_keys is not None:
                notes.append(nothing)
                continue
            kind = _FIRST if info.parent is None else _WITH_PARENT
            parent = info.parent or bytes(self._hash_bytes)
            note = bytes([kind]) + each[:CHECK_BYTES] + parent + info.packed
            notes.append(note if len(note) == len(nothing) else nothing)
        return b"".join(notes)

    def take_notes(self, index: int, hashes: bytes, notes: bytes, learned: Callable[[bytes], None]) -> None:
        """Remember what other engines have noted.

        Args:
            hashes: joined, of this engine's weights: notes on blocks of others do not match them, and are ignored.
            learned: called with each hash that was not known.
        """
        count, length = len(hashes) // self._hash_bytes, self.note_bytes(index)
        if len(notes) != count * length:
            return  # of another version of this program
        for i, each in enumerate(split_hashes(hashes, count)):
            note = notes[i * length : (i + 1) * length]
            known = note[0] == _NOTHING or (index, each) in self._infos
            if known or note[1 : 1 + CHECK_BYTES] != each[:CHECK_BYTES]:
                continue
            start = 1 + CHECK_BYTES + self._hash_bytes
            parent = note[1 + CHECK_BYTES : start] if note[0] == _WITH_PARENT else None
            self.add(index, each, BlockInfo(note[start:], parent, own=False))
            learned(each)
