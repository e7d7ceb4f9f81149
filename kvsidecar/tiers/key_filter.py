"""Tells at once that a tier does not have a block, so that a lookup that misses everything costs nothing more.

A Bloom filter with two bits for each block (Bloom, CACM 1970), in memory that the tier's process and the daemon share.
The process sets bits, the daemon reads them. Blocks that have gone leave their bits behind until the process sets all
bits again; believing them costs a question.

Clients choose the block hashes, so each of the two bits is found by a multiplier that is drawn for this filter. Two
keys that are chosen without knowing it share a bit in at most 2 of n draws, if there are n bits (multiply-shift:
Dietzfelbinger, Hagerup, Katajainen and Penttonen, Journal of Algorithms 25, 1997). Only the first eight bytes of a hash
count: a stored block makes the tier be asked for others of its namespace that begin alike.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
import threading
from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from kvsidecar.cache.arrays import Bools, Words

BITS_PER_BLOCK: Final = 16
BLOCK_BYTES: Final = 256 << 10
"""Assumed size of a block, for the size of the filter. Smaller blocks make it less sharp."""
MIN_BITS: Final = 1 << 20
MAX_BITS: Final = 1 << 30
_DRAWN: Final = struct.Struct("<2Q")
"""The multipliers, behind the bits: odd numbers. The high bits of the products are used."""
_MASK: Final = (1 << 64) - 1
_FIRST_WORD: Final = struct.Struct("<Q").unpack_from


def filter_bytes(capacity_bytes: int) -> int:
    """Size of the filter of a tier."""
    bits = capacity_bytes // BLOCK_BYTES * BITS_PER_BLOCK
    return 1 << (min(MAX_BITS, max(MIN_BITS, bits)) - 1).bit_length() >> 3


def create_filter(capacity_bytes: int) -> int:
    """Make a file in memory for the filter of a tier; `KeyFilter` maps it. Returns its descriptor."""
    fd = os.memfd_create("kvsidecar-tier-filter", os.MFD_CLOEXEC)
    os.pwrite(fd, _DRAWN.pack(*(secrets.randbits(64) | 1 for _ in range(2))), filter_bytes(capacity_bytes))
    return fd


class KeyFilter:
    """Args: fd: of a file that `create_filter` has made; it is mapped."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, os.fstat(fd).st_size)
        self._drawn: Final[tuple[int, ...]] = _DRAWN.unpack_from(self._memory, len(self._memory) - _DRAWN.size)
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(self._memory, np.uint8)[: -_DRAWN.size]
        self._shift = 64 - (len(self._bytes) * 8 - 1).bit_length()
        self._lock = threading.Lock()

    def may_have(self, digest: bytes, block_hash: bytes) -> bool:
        """Args: digest: of the shard space."""
        key = _FIRST_WORD(block_hash)[0] ^ _FIRST_WORD(digest)[0]
        for factor in self._drawn:
            bit = (key * factor & _MASK) >> self._shift
            if not self._memory[bit >> 3] >> (bit & 7) & 1:
                return False
        return True

    def may_have_each(self, digest: bytes, keys: Words) -> Bools:
        """`may_have` of many at once. Args: keys: as for `add`."""
        keys = keys ^ np.frombuffer(digest[:8], np.uint64)
        found = np.ones(len(keys), np.bool_)
        for factor in self._drawn:
            bits = keys * np.uint64(factor) >> np.uint64(self._shift)
            byte, bit = (bits >> np.uint64(3)).astype(np.int64), (bits & np.uint64(7)).astype(np.uint8)
            found &= self._bytes[byte] >> bit & 1 != 0
        return found

    def add(self, digest: bytes, keys: Words) -> None:
        """Args: keys: the first eight bytes of each block hash, little endian."""
        keys = keys ^ np.frombuffer(digest[:8], np.uint64)
        with self._lock:  # to set a bit is to read and to write its byte
            for factor in self._drawn:
                bits = keys * np.uint64(factor) >> np.uint64(self._shift)
                values = np.left_shift(1, bits & np.uint64(7), dtype=np.uint64).astype(np.uint8)
                np.bitwise_or.at(self._bytes, (bits >> np.uint64(3)).astype(np.int64), values)

    def replace(self, keys: Iterable[tuple[bytes, Words]] | None) -> None:
        """Start over with these blocks, by shard space. None: it is not known which there are, so any may be there. A
        block that is added meanwhile may be denied until it is added again."""
        self._bytes[:] = 0 if keys is not None else 0xFF
        for digest, each in keys or ():
            self.add(digest, each)


def first_words(hashes: bytes, width: int) -> Words:
    """The first eight bytes of each of these block hashes."""
    words: Words = np.frombuffer(hashes, np.uint8).reshape(-1, width)[:, :8].copy().view(np.uint64).ravel()
    return words
