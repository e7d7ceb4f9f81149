"""The contents of KV events besides hashes: tokens and parents of blocks, as far as this engine knows them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from kvsidecar.integrations.hashes import split_hashes
from kvsidecar.integrations.residency.note_format import NoteFormat

MAX_KNOWN_BYTES = 88 << 20
"""Memory for blocks whose tokens are remembered: 260,000 of 16 tokens. In bytes, not blocks, because the sender of
notes chooses the number of tokens in a block. Beyond it, the oldest are forgotten."""
INFO_BYTES = 290
"""Memory of a remembered block, besides its tokens."""


class AnnouncedGroup(Protocol):
    """The required part of an engine's KV cache group."""

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
    """Token ids, `notes.TOKEN_BYTES` each."""
    parent: bytes | None
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: Any = None
    own: bool = True
    """Whether a request of this engine had it, whose router knows the parent."""

    @property
    def tokens(self) -> list[int]:
        return array("i", self.packed).tolist()


UNKNOWN = BlockInfo(b"", None)


class KnownBlocks:
    """Blocks by group and hash, in the order in which they became known.

    Engines exchange them in notes, which the daemon passes on with the blocks that they store. Blocks that also depend
    on an adapter, an image or a salt are not noted.
    """

    def __init__(
        self,
        groups: Iterable[AnnouncedGroup],
        hash_bytes: int,
        forgotten: Callable[[int, bytes, BlockInfo], None] | None = None,
    ) -> None:
        self._formats = {group.index: NoteFormat(hash_bytes, group.block_tokens, group.chained) for group in groups}
        self.hash_bytes = hash_bytes
        self._infos: dict[tuple[int, bytes], BlockInfo] = {}
        self._forgotten = forgotten
        """Called with each block that is forgotten to make room."""
        self.nbytes = 0
        """Approximate memory of all remembered blocks."""

    def __len__(self) -> int:
        return len(self._infos)

    def get(self, index: int, block_hash: bytes) -> BlockInfo | None:
        return self._infos.get((index, block_hash))

    def pop(self, index: int, block_hash: bytes) -> BlockInfo | None:
        info = self._infos.pop((index, block_hash), None)
        self.nbytes -= 0 if info is None else _size(info)
        return info

    def add(self, index: int, block_hash: bytes, info: BlockInfo) -> None:
        before = self._infos.get((index, block_hash))
        self._infos[index, block_hash] = info
        self.nbytes += _size(info) - (0 if before is None else _size(before))
        if self.nbytes > MAX_KNOWN_BYTES:
            self.shrink(self.nbytes - MAX_KNOWN_BYTES + MAX_KNOWN_BYTES // 64)

    def clear(self) -> None:
        """Forget all blocks, without calling ``forgotten``."""
        self._infos.clear()
        self.nbytes = 0

    def shrink(self, nbytes: int) -> None:
        """Forget the oldest blocks, until this many bytes are free."""
        # Many at once: each deletion at the front of a dict makes finding its first entry slower.
        enough = self.nbytes - nbytes
        for index, block_hash in list(self._infos):
            if self.nbytes <= enough:
                return
            info = self.pop(index, block_hash)
            if info is not None and self._forgotten is not None:
                self._forgotten(index, block_hash, info)

    def notes(self, index: int, hashes: Iterable[bytes]) -> bytes:
        """The notes on these blocks, joined."""
        form, notes = self._formats[index], []
        for each in hashes:
            info = self.get(index, each)
            if info is None or info.lora_name is not None or info.lora_id is not None or info.extra_keys is not None:
                notes.append(form.nothing)
            else:
                notes.append(form.pack(each, info.parent, info.packed))
        return b"".join(notes)

    def take_notes(self, index: int, hashes: bytes, notes: bytes) -> Iterator[bytes]:
        """Remember the notes of other engines. Yields each hash that was not known.

        Args:
            hashes: the joined hashes for this engine's weights: notes on blocks of other weights do not match them, and
                are ignored.
        """
        form, count = self._formats[index], len(hashes) // self.hash_bytes
        if len(notes) != count * form.nbytes:
            return  # from another version of this program
        for i, each in enumerate(split_hashes(hashes, count)):
            if (index, each) in self._infos:
                continue
            if (said := form.unpack(each, notes[i * form.nbytes : (i + 1) * form.nbytes])) is not None:
                self.add(index, each, BlockInfo(said[1], said[0], own=False))
                yield each


def _size(info: BlockInfo) -> int:
    return len(info.packed) + INFO_BYTES
