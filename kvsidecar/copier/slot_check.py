"""Checksums of slots, in slices, so that the thread that takes them keeps the link busy meanwhile.

They find faults that nothing else here can: a bit that flipped in host memory, and a write to a slot after it was
sealed. XXH3 (xxhash.com) runs at memory speed and is no cryptographic hash: it is for accidents.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from kvsidecar.copier.messages import Checks
from kvsidecar.support import failpoints

SLICE_BYTES: Final = 1 << 20
"""Bytes of one step: 40 to 100 us, less than the driver takes to issue a call of a thousand pieces. xxhash releases
the GIL for most of it, unless slots are smaller than 128 KiB."""


class SlotCheck:
    """The checksums of one copy's slots. Nobody may write to the slots meanwhile: they are reserved or pinned."""

    def __init__(self, pool: npt.NDArray[np.uint8], checks: Checks) -> None:
        self._pool = pool
        self._left = checks[["slot", "nbytes"]].tolist()[::-1]
        self._expected: list[int] = checks["expected"].tolist()
        self._done = 0
        """Bytes of the next slot that are in its checksum already."""
        self._hash = xxhash.xxh3_64()
        self.values: list[int] = []
        """The checksums so far, in order."""

    def step(self, room: int = SLICE_BYTES) -> bool:
        """Read at most ``room`` bytes. Returns whether there is more to read."""
        failpoints.hit("copier.checksum")
        while self._left and room:
            slot, nbytes = self._left[-1]
            count = min(room, nbytes - self._done)
            self._hash.update(self._pool[slot + self._done : slot + self._done + count].data)
            room -= count
            self._done += count
            if self._done == nbytes:
                self.values.append(self._hash.intdigest())
                self._hash.reset()
                self._done = 0
                self._left.pop()
        return bool(self._left)

    @property
    def wrong(self) -> list[int]:
        """Indices of the checks whose checksum is not the expected one."""
        return [
            i for i, (value, expected) in enumerate(zip(self.values, self._expected, strict=True)) if value != expected
        ]
