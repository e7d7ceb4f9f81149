"""The blocks that are stored already, as far as the scheduler knows. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.bool_]
Tags = npt.NDArray[np.int64]

_TAG = np.dtype("<i8")  # signed, because tags become indices: numpy would convert unsigned ones element by element
_GROUP_FACTOR = 0x9E3779B97F4B
"""Makes the tags of one hash differ between groups. 48 bits, so that its product with a group's index fits."""


SMALLEST = 1 << 18
LARGEST = 1 << 23
"""Least and most tags of a `StoredFilter`. The most take 64 MiB."""
TAGS_PER_BLOCK = 4


class StoredFilter:
    """The blocks that the daemon had when the scheduler last heard of them, as a direct-mapped table of tags.

    A tag is the first 8 bytes of a block's hash; its low bits are its index in the table. A new tag replaces the one at
    its index. So the table may forget a block at any time: callers that must not name a block twice cannot rely on it.
    Otherwise both kinds of error are harmless: the daemon skips a replaced block when it is stored again, and a block
    with the tag of another (8 equal bytes of two hashes) is not stored.

    It is an array because the CPU's caches are cold between two steps: the memory accesses of 512 lookups overlap in an
    array (30 us, measured), but follow one another in a set (90 us).

    Args:
        capacity: number of tags, 8 bytes each; a power of 2.
    """

    def __init__(self, capacity: int = SMALLEST) -> None:
        if capacity & (capacity - 1):
            raise ValueError(f"a capacity of {capacity} is not a power of 2")
        self._tags = np.full(capacity, 0, _TAG)  # not zeros(): its first access to a page is a page fault
        self._last = _TAG.type(capacity - 1)
        self._last_tags: Tags | None = None
        """The tags whose indices are in ``_at``: most tags are added right after they are looked up."""
        self._at: npt.NDArray[np.int64]
        self.age = 0
        """How many times the filter was cleared."""

    def find(self, tags: Tags) -> Mask:
        """A mask of these tags: whether each is in the filter."""
        return np.asarray(self._tags[self._indices(tags)] == tags)

    def add(self, tags: Tags, *, begun: int | None = None) -> None:
        """Add these tags. Cheap after a `find` of the same ones, which loads their cache lines: reads overlap, writes
        do not.

        Args:
            begun: `age` when the job or lookup began that shows that the daemon has them. Nothing is added if the
                filter was cleared since: another run of the daemon had them, or they had other keys.
        """
        if begun is not None and begun != self.age:
            return
        self._tags[self._indices(tags)] = tags

    def discard(self, tags: Tags) -> Mask:
        """Remove these tags. Returns which were in the filter."""
        found = self.find(tags)
        self._tags[self._indices(tags)[found]] = 0
        return found

    def clear(self) -> None:
        self._tags.fill(0)
        self.age += 1

    def fit(self, blocks: int) -> None:
        """Grow, so that a tag outlives the addition of as many as ``blocks`` others with a probability of e^(-1/4), or
        to `LARGEST`. Never shrinks."""
        capacity = min(LARGEST, 1 << (TAGS_PER_BLOCK * blocks - 1).bit_length())
        if capacity <= len(self._tags):
            return
        known = self._tags[self._tags != 0]
        self._tags, self._last = np.full(capacity, 0, _TAG), _TAG.type(capacity - 1)
        self._last_tags = None
        self.add(known)

    def _indices(self, tags: Tags) -> npt.NDArray[np.int64]:
        if tags is not self._last_tags:
            self._last_tags, self._at = tags, tags & self._last
        return self._at


def tags_of(group: int, hashes: bytes, count: int) -> Tags:
    """The tags of blocks in a `StoredFilter`.

    Args:
        group: index of the blocks' group.
        hashes: ``count`` joined hashes of the same width.
    """
    first = np.ndarray((count,), _TAG, hashes, strides=(len(hashes) // max(1, count),))
    return first ^ _TAG.type(group * _GROUP_FACTOR) if group else first
