"""Operators' holds in memory that outlives the daemon: what each keeps, for whom, and how long.

Why every instant is a legal one. SIGKILL ends the daemon between two of its stores to memory. A hold counts only while
the commit word of its head is not 0, which is written last; the pages of its text are taken by no other hold until that
word is 0 again. A hold that takes the place of another of the same name is committed before the other one is closed: of
two with the same name, the one with the higher commit word counts.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any, Final

import numpy as np

from kvsidecar.cache.arrays import Words
from kvsidecar.cache.records import LAST_COMMIT, entry_crc
from kvsidecar.types import Namespace

MAX_HOLDS: Final = 1024
_HEADS: Final = MAX_HOLDS + 1
"""One more than the holds: a hold and its replacement exist at the same time."""
_HEAD_WORDS: Final = 4
"""Words of a head: commit word, CRC, first page, bytes of its text."""
_PAGE_WORDS: Final = 512
"""Words of a page: number of the next one, and its piece of the text."""
_PIECE: Final = 8 * (_PAGE_WORDS - 1)
_SHARE_OF_POOL: Final = 4096
_LEAST_BYTES: Final = 8 << 20
"""More than `MAX_HOLDS` pages."""


@dataclass(frozen=True, slots=True)
class KeptHold:
    name: str
    owner: str
    namespace: Namespace
    groups: tuple[tuple[int, bytes], ...]
    """KV cache group, and the hashes of its blocks, joined."""
    expires_at: float
    """Seconds since the boot: no hold outlives a boot."""

    @property
    def num_blocks(self) -> int:
        return sum([len(hashes) for _, hashes in self.groups]) // self.namespace.hash_bytes


class KeptHolds:
    """Reads and writes the holds. Only one process at a time may.

    Args:
        memory: words of which `file_bytes` are used, zeros at first.
    """

    def __init__(self, memory: Words) -> None:
        first_page = -(-_HEADS * _HEAD_WORDS // _PAGE_WORDS) * _PAGE_WORDS
        self._heads: Words = memory[: _HEADS * _HEAD_WORDS].reshape(_HEADS, _HEAD_WORDS)
        self._pages: Words = memory[first_page : len(memory) // _PAGE_WORDS * _PAGE_WORDS].reshape(-1, _PAGE_WORDS)
        self._last_commit = 1
        self._places: dict[str, tuple[int, list[int]]] = {}
        """Name -> head and pages."""
        self._free_heads = list(reversed(range(_HEADS)))
        self._free_pages = list(reversed(range(len(self._pages))))

    @staticmethod
    def file_bytes(pool_bytes: int) -> int:
        """A part in 4096 of the pool: the hashes, of 32 bytes, of blocks of 13 KiB in a tenth of it. Only pages that
        were ever written have memory."""
        return max(_LEAST_BYTES, -(-pool_bytes // _SHARE_OF_POOL // 4096) * 4096)

    def find(self) -> list[KeptHold]:
        """The holds that an earlier run has left. Closes every one that is not whole. Call it once, before any other
        method."""
        found: list[KeptHold] = []
        commits = self._heads[:, 0].tolist()
        taken: set[int] = set()
        for at in sorted((at for at in range(_HEADS) if commits[at]), key=lambda at: -commits[at]):
            pages, text = self._read(at, taken)
            hold = None if text is None else _parsed(text)
            if hold is None or hold.name in self._places:
                self._heads[at, 0] = 0
                continue
            self._last_commit = max(self._last_commit, commits[at])
            self._places[hold.name] = (at, pages)
            taken.update(pages)
            found.append(hold)
        heads = {at for at, _ in self._places.values()}
        self._free_heads = [at for at in reversed(range(_HEADS)) if at not in heads]
        self._free_pages = [page for page in reversed(range(len(self._pages))) if page not in taken]
        return found

    def put(self, hold: KeptHold) -> bool:
        """Keep this hold, in the place of any other of its name. False, with nothing changed: there is no room."""
        text = _text_of(hold)
        count = -(-len(text) // _PIECE)
        if count > len(self._free_pages) or not self._free_heads:
            return False
        at, pages = self._free_heads.pop(), [self._free_pages.pop() for _ in range(count)]
        self._last_commit += 2
        self._pages[pages, 1:] = np.frombuffer(text.ljust(count * _PIECE, b"\0"), np.uint64).reshape(count, -1)
        self._pages[pages[:-1], 0] = pages[1:]
        self._heads[at, 1:] = (entry_crc(self._last_commit, pages[0], text), pages[0], len(text))
        self._heads[at, 0] = self._last_commit
        self.drop(hold.name)
        self._places[hold.name] = (at, pages)
        return True

    def drop(self, name: str) -> None:
        """Keep this hold no longer, if it is kept."""
        if name in self._places:
            at, pages = self._places.pop(name)
            self._heads[at, 0] = 0
            self._free_heads.append(at)
            self._free_pages += pages

    def _read(self, at: int, taken: set[int]) -> tuple[list[int], bytes | None]:
        """The pages of a hold and its text; None if anything about them is wrong."""
        commit, crc, page, length = self._heads[at].tolist()
        pages: list[int] = []
        if commit & 1 == 0 or commit > LAST_COMMIT or not 0 < length <= self._pages.nbytes:
            return pages, None
        for _ in range(-(-length // _PIECE)):
            if page >= len(self._pages) or page in taken:
                return pages, None
            pages.append(page)
            page = self._pages.item(page, 0)
        text = self._pages[pages, 1:].tobytes()[:length]
        return pages, text if len(set(pages)) == len(pages) and crc == entry_crc(commit, pages[0], text) else None


def _text_of(hold: KeptHold) -> bytes:
    """Facts as JSON, a line feed, the hashes."""
    groups = [(group, len(hashes)) for group, hashes in hold.groups]
    facts = json.dumps([hold.name, hold.owner, asdict(hold.namespace), groups, hold.expires_at]).encode()
    return b"\n".join((facts, b"".join([hashes for _, hashes in hold.groups])))


def _parsed(text: bytes) -> KeptHold | None:
    """None: a CRC that fits by accident, or another version of `Namespace`."""
    facts, _, hashes = text.partition(b"\n")
    try:
        name, owner, fields, lengths, expires_at = json.loads(facts)
        hold = KeptHold(name, owner, Namespace(**fields), tuple(_split(hashes, lengths)), float(expires_at))
        width = hold.namespace.hash_bytes
        whole = hold.namespace.problem() is None and sum([length for _, length in lengths]) == len(hashes)
        whole &= isinstance(name, str) and isinstance(owner, str) and isfinite(hold.expires_at)
        whole &= all(type(group) is int and len(each) % width == 0 for group, each in hold.groups)
    except (ValueError, TypeError, AttributeError, ZeroDivisionError):
        return None
    return hold if whole else None


def _split(hashes: bytes, lengths: Any) -> list[tuple[int, bytes]]:
    pieces, start = [], 0
    for group, length in lengths:
        pieces.append((group, hashes[start : start + length]))
        start += length
    return pieces
