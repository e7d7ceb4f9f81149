"""The slabs that a pool is cut into, as columns, and which of them have room on each NUMA node."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import numpy as np

from kvsidecar.cache.arrays import Ints, Slots

LEVELS = 4
"""Groups of partly used slabs by how full they are. New blocks go into the fullest: a slab that is nearly empty can so
become whole, for another size class, and a few blocks that must stay do not spread over many slabs."""


class Slabs:
    """The slabs of a pool, as columns: a slab is an index. One that is cut has at least one used slot."""

    def __init__(self, pool_bytes: int, slab_bytes: int, nodes: Sequence[int | None]) -> None:
        self.slab_bytes = slab_bytes
        """Full length; the last one may be shorter."""
        self.start = np.arange(0, pool_bytes, slab_bytes)
        self.nbytes = np.minimum(slab_bytes, pool_bytes - self.start)
        self.node = list(nodes)
        self.size = np.zeros(len(self.start), np.int64)
        """Size class it is cut to; 0 for one that is whole."""
        self.capacity = np.zeros_like(self.size)
        """Slots it is cut into."""
        self.first = np.zeros_like(self.size)
        """Index of its first slot in the columns of slots."""
        self.used = np.zeros_like(self.size)
        """Slots that are not free."""
        self.evictable = np.zeros_like(self.size)
        self.touched = np.zeros_like(self.size)
        """Tick at which a slot of it was last used."""
        self.lowest_free = np.zeros_like(self.size)
        """No slot of it below this one is free."""

    def __len__(self) -> int:
        return len(self.start)

    def holding(self, slots: Slots) -> Ints:
        """The slab that each slot lies in."""
        return np.asarray(slots, np.int64) // self.slab_bytes


class NodeSlabs:
    """The slabs with free slots on one NUMA node."""

    def __init__(self) -> None:
        self.whole: deque[int] = deque()
        """Uncut slabs. A short one stays at the left end: it is taken last, and only by slots that fit it."""
        self.partial: dict[int, tuple[dict[int, None], ...]] = {}
        """Size class -> by level, the cut slabs with a free slot, in the order in which they came to it."""
        self.free_slots: Counter[int] = Counter()
        """Size class -> free slots in ``partial``."""

    def fullest(self, size: int) -> int | None:
        """A cut slab with a free slot, of those that are the fullest."""
        for level in reversed(self.partial.get(size, ())):
            if level:
                return next(reversed(level))
        return None
