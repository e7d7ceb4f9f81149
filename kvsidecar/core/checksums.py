"""Chooses the slots whose checksums are taken and compared, and keeps the values. Off by default; a copier reads the
bytes: see `kvsidecar.copier.slot_check`. A mismatch is a miss."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.grants import StoreGrant
from kvsidecar.copier.messages import CHECK, Checks
from kvsidecar.types import Verify

SAMPLE: Final = 16
"""With `Verify.SAMPLE` one block in this many is checked: always the same ones, chosen by their hash."""


BlocksInSlots = tuple[Sequence[bytes], Sequence[int], int]
"""Blocks of one group: their hashes, their slots, and the bytes of a shard."""


class Checksums:
    """Checksum by slot: its byte offset in the pool. Those of a cache that records its slots are in its records, where
    the next daemon finds them; those of another cache are here.
    """

    def __init__(self, verify: Verify, cache: BlockCache) -> None:
        self._verify = verify
        self._cache = cache
        self._by_slot: dict[int, int] = {}

    def chosen(self, block_hash: bytes) -> bool:
        """Whether this block is one of those that are checked."""
        return self._verify is Verify.ALWAYS or (self._verify is Verify.SAMPLE and block_hash[-1] % SAMPLE == 0)

    def to_take(self, parts: Iterable[BlocksInSlots]) -> Checks | None:
        """The checksums that a copier is to take when it has stored these blocks; None: no checksums."""
        return _checks(
            [
                (slot, nbytes, 0)
                for hashes, slots, nbytes in parts
                for block_hash, slot in zip(hashes, slots, strict=True)
                if self.chosen(block_hash)
            ]
        )

    def keep(self, grant: StoreGrant, checks: Checks, values: Sequence[int]) -> None:
        """Remember a copier's checksums: a value for each check. The store is sealed next."""
        if self._cache.recorded:
            grant.checksums = checks["slot"], np.fromiter(values, np.uint64, len(checks))
        else:
            self._by_slot.update(zip(checks["slot"].tolist(), values, strict=True))

    def to_compare(self, parts: Iterable[BlocksInSlots]) -> tuple[Checks | None, list[tuple[int, int]]]:
        """What a copier is to compare before it loads these (None: nothing), and (part, index) of each check. A slot
        without a checksum is not one of them."""
        rows, places = [], []
        for part, (hashes, slots, nbytes) in enumerate(parts):
            for index, (block_hash, slot, expected) in enumerate(zip(hashes, slots, self._of(slots), strict=True)):
                if expected is not None and self.chosen(block_hash):
                    rows.append((slot, nbytes, expected))
                    places.append((part, index))
        return _checks(rows), places

    def _of(self, slots: Sequence[int]) -> list[int | None]:
        if self._cache.recorded:
            return self._cache.checksums(np.array(slots, np.int64))
        return [self._by_slot.get(slot) for slot in slots]


def _checks(rows: list[tuple[int, int, int]]) -> Checks | None:
    return np.array(rows, CHECK) if rows else None
