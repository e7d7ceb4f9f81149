"""Checksums of slots: taken when a shard is sealed, compared before it is loaded. Off by default.

They find faults that nothing else here can: a bit that flipped in host memory, and a write to a slot after it was
sealed. A mismatch is a miss. XXH3 (xxhash.com) runs at memory speed and is no cryptographic hash: it is for accidents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt
import xxhash

from kvsidecar.types import Verify

SAMPLE = 16
"""With `Verify.SAMPLE` one block in this many is checked: always the same ones, chosen by their hash."""


class Checksums:
    """Checksum by slot. `take` and `wrong` read whole slots and release the GIL: call them in a thread.

    One thread at a time may use a slot: it is reserved while its checksum is taken, and pinned while it is compared.

    Args:
        verify: which blocks are checked.
        pool: gives all bytes of the pool; called once it is pinned.
    """

    def __init__(self, verify: Verify, pool: Callable[[], npt.NDArray[np.uint8]]) -> None:
        self._verify = verify
        self._pool = pool
        self._by_slot: dict[int, int] = {}

    def chosen(self, block_hash: bytes) -> bool:
        """Whether this block is one of those that are checked."""
        return self._verify is Verify.ALWAYS or (self._verify is Verify.SAMPLE and block_hash[-1] % SAMPLE == 0)

    def take(self, slots: Iterable[int], nbytes: int) -> None:
        """Remember what these slots hold now.

        Args:
            slots: byte offsets in the pool.
            nbytes: of one shard.
        """
        pool = self._pool()
        for slot in slots:
            self._by_slot[slot] = xxhash.xxh3_64_intdigest(pool[slot : slot + nbytes].data)

    def wrong(self, slots: Iterable[int], nbytes: int) -> list[int]:
        """The slots whose bytes have changed since `take`. A slot without a checksum is not one of them."""
        pool = self._pool()
        found = []
        for slot in slots:
            expected = self._by_slot.get(slot)
            if expected is not None and expected != xxhash.xxh3_64_intdigest(pool[slot : slot + nbytes].data):
                found.append(slot)
        return found
