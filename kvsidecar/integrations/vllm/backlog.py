"""Blocks to store later, by their hashes. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from kvsidecar.integrations.hashes import split_hashes
from kvsidecar.integrations.stored_filter import Mask, StoredFilter, Tags
from kvsidecar.integrations.vllm.retention import DEFAULT_RETENTION, Retention


@dataclass(frozen=True, slots=True)
class BlockHashes:
    """Blocks of one group, as their joined hashes."""

    group: int
    hashes: bytes
    tags: Tags
    retention: Retention = DEFAULT_RETENTION
    """The retention of the blocks, once they are stored."""

    def __len__(self) -> int:
        return len(self.tags)

    def split(self) -> list[bytes]:
        return split_hashes(self.hashes, len(self))

    def only(self, which: Mask | slice) -> BlockHashes:
        """A copy of these blocks alone, so that the memory of the others can be freed."""
        rows = np.frombuffer(self.hashes, np.uint8).reshape(len(self), -1)
        return BlockHashes(self.group, rows[which].tobytes(), self.tags[which].copy(), self.retention)


class Backlog:
    """A bounded queue of blocks without duplicates, first in, first out.

    Args:
        capacity: most blocks; more push out the oldest.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._parts: deque[BlockHashes] = deque()
        self.count = 0
        """Number of queued blocks."""
        # Every request that shares a prefix may add it again.
        self._queued = StoredFilter()

    def add(self, part: BlockHashes) -> list[BlockHashes]:
        """Add blocks that are not queued already. Returns the blocks that they push out."""
        new = ~self._queued.find(part.tags)
        if not new.all():
            part = part.only(new)
        if not part:
            return []
        self._queued.add(part.tags)
        self._parts.append(part)
        self.count += len(part)
        return self.take(self.count - self._capacity)

    def take(self, most: int) -> list[BlockHashes]:
        """Remove and return up to ``most`` blocks."""
        taken = []
        while most > 0 and self._parts:
            part = self._parts.popleft()
            if len(part) > most:
                self._parts.appendleft(part.only(slice(most, None)))
                part = part.only(slice(most))
            self.count -= len(part)
            most -= len(part)
            self._queued.discard(part.tags)
            taken.append(part)
        return taken
