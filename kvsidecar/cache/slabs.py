"""The slabs of a pool, as columns, and which slabs have free slots on each NUMA node."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import numpy as np

from kvsidecar.cache.arrays import Ints, Slots

LEVELS = 4
"""Number of groups of partly used slabs, by how full they are. New blocks go into the fullest slabs, so that a nearly
empty slab can become whole for another size class, and pinned blocks do not spread over many slabs."""


class Slabs:
    """The slabs of a pool, as columns: a slab is an index. A slab that is cut has at least one used slot."""

    def __init__(self, pool_bytes: int, slab_bytes: int, nodes: Sequence[int | None]) -> None:
        self.slab_bytes = slab_bytes
        """Length of every slab but the last, which may be shorter."""
        self.start = np.arange(0, pool_bytes, slab_bytes)
        self.nbytes = np.minimum(slab_bytes, pool_bytes - self.start)
        self.node = list(nodes)
        self.size = np.zeros(len(self.start), np.int64)
        """Size class of its slots; 0 for a whole slab, which is not cut."""
        self.capacity = np.zeros_like(self.size)
        """Number of its slots."""
        self.first = np.zeros_like(self.size)
        """Index of its first slot in the columns of slots."""
        self.used = np.zeros_like(self.size)
        """Number of slots that are not free."""
        self.evictable = np.zeros_like(self.size)
        self.touched = np.zeros_like(self.size)
        """Tick of the last use of one of its slots."""
        self.lowest_free = np.zeros_like(self.size)
        """No slot below this index is free."""

    def __len__(self) -> int:
        return len(self.start)

    def holding(self, slots: Slots) -> Ints:
        return np.asarray(slots, np.int64) // self.slab_bytes


class NodeSlabs:
    """The slabs with free slots on one NUMA node."""

    def __init__(self) -> None:
        self.whole: deque[int] = deque()
        """Slabs that are not cut. A short one stays at the left end: it is taken last, and only by slots that fit."""
        self.partial: dict[int, tuple[dict[int, None], ...]] = {}
        """Size class -> per level the cut slabs with a free slot, in order of arrival."""
        self.free_slots: Counter[int] = Counter()
        """Size class -> number of free slots in ``partial``."""

    def fullest(self, size: int) -> int | None:
        """One of the fullest cut slabs with a free slot."""
        for level in reversed(self.partial.get(size, ())):
            if level:
                return next(reversed(level))
        return None
