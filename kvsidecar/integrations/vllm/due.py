"""Blocks to store later, by their hashes. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvsidecar.integrations.vllm.stored_filter import Mask, StoredFilter, Tags


@dataclass(frozen=True, slots=True)
class Part:
    """Blocks of one group, as their joined hashes."""

    group: int
    hashes: bytes
    tags: Tags

    def __len__(self) -> int:
        return len(self.tags)

    def split(self) -> list[bytes]:
        """The hashes of the blocks, one by one."""
        width = len(self.hashes) // max(1, len(self))
        return [self.hashes[i : i + width] for i in range(0, len(self.hashes), width)] if width else []

    def only(self, which: Mask | slice) -> Part:
        """A part with only these blocks. It is a copy, so that the memory of the others is given back."""
        rows = np.frombuffer(self.hashes, np.uint8).reshape(len(self), -1)
        return Part(self.group, rows[which].tobytes(), self.tags[which].copy())


class Due:
    """A bounded queue of due blocks, first in, first out, without duplicates.

    Args:
        most: capacity in blocks; beyond it, the oldest are pushed out.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._parts: deque[Part] = deque()
        self.count = 0
        """Blocks."""
        # A prefix may become due again with every request that shares it.
        self._queued = StoredFilter()

    def add(self, part: Part) -> list[Part]:
        """Add blocks that are not due already. Returns the blocks that they push out."""
        new = ~self._queued.find(part.tags)
        if not new.all():
            part = part.only(new)
        if not part:
            return []
        self._queued.add(part.tags)
        self._parts.append(part)
        self.count += len(part)
        return self.take(self.count - self._most)

    def take(self, most: int) -> list[Part]:
        """Remove up to ``most`` blocks, and return them."""
        return list(self._taken(most))

    def _taken(self, most: int) -> Iterator[Part]:
        while most > 0 and self._parts:
            part = self._parts.popleft()
            if len(part) > most:
                self._parts.appendleft(part.only(slice(most, None)))
                part = part.only(slice(most))
            self.count -= len(part)
            most -= len(part)
            self._queued.discard(part.tags)
            yield part
