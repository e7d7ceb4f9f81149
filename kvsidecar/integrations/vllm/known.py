"""What is stored already, as far as the scheduler's side knows. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.bool_]
Tags = npt.NDArray[np.int64]

_TAG = np.dtype("<i8")  # signed, for they are made places: numpy would convert unsigned ones, a place at a time
_GROUP_FACTOR = 0x9E3779B97F4B
"""Without a pattern: the same hash in two groups has two tags. 48 bits: its product with the index of a group fits."""


class Known:
    """Blocks that are stored, or were when we last knew: the first 8 bytes of their hashes, each at the place that they
    name. A new one takes the place of the one before, which is forgotten.

    To ask for a block that was forgotten costs one question to the daemon. To hit one that was never added takes two
    hashes that are equal in 8 bytes, and costs one block that is not stored.

    It is an array, not a set: an engine's caches are cold between two steps, and 512 places of a set are waited for one
    after the other (90 us, measured), those of an array all at once (30).

    Args:
        capacity: places, 8 bytes each; a power of 2.
    """

    def __init__(self, capacity: int = 1 << 18) -> None:
        if capacity & (capacity - 1):
            raise ValueError(f"a capacity of {capacity} is no power of 2")
        self._tags = np.full(capacity, 0, _TAG)  # written: the first look at a page of zeros() would be a page fault
        self._last = _TAG.type(capacity - 1)
        self._asked: Tags | None = None
        """Whose places are in ``_at``: most are asked for, then added."""
        self._at: npt.NDArray[np.int64]

    def find(self, tags: Tags) -> Mask:
        """Which are known."""
        return np.asarray(self._tags[self._places(tags)] == tags)

    def add(self, tags: Tags) -> None:
        """Cheap behind a `find` of the same: a core waits for what it reads side by side, for what it writes one after
        the other."""
        self._tags[self._places(tags)] = tags

    def discard(self, tags: Tags) -> Mask:
        """Returns which were known."""
        found = self.find(tags)
        self._tags[self._places(tags)[found]] = 0
        return found

    def clear(self) -> None:
        self._tags.fill(0)

    def _places(self, tags: Tags) -> npt.NDArray[np.int64]:
        if tags is not self._asked:
            self._asked, self._at = tags, tags & self._last
        return self._at


def tags_of(group: int, hashes: bytes, count: int) -> Tags:
    """What `Known` knows blocks by.

    Args:
        group: index of their group.
        hashes: ``count`` hashes of the same width, one after the other.
    """
    first = np.ndarray((count,), _TAG, hashes, strides=(len(hashes) // max(1, count),))
    return first ^ _TAG.type(group * _GROUP_FACTOR) if group else first
