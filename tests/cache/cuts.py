"""Memory that a test looks at after every single word that is written, and what the next run would find in it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvsidecar.cache import adoption
from kvsidecar.cache.arrays import Bools, Words
from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.records import Records, num_words
from kvsidecar.cache.slots import SlotAllocator
from tests.cache.support import PAGE

NUM_SPACES = 4
"""For which there is room: so few that to copy all of it is quick."""


class CutMemory(np.ndarray[Any, np.dtype[np.uint64]]):
    """An array whose views call ``on_write`` after each word that they change.

    The words of one assignment change in any order: numpy promises none.
    """

    root: CutMemory | None = None
    rng: random.Random
    on_write: Callable[[], None]

    @classmethod
    def create(cls, words: int, on_write: Callable[[], None], seed: int = 0) -> CutMemory:
        memory = np.zeros(words, np.uint64).view(cls)
        memory.root, memory.on_write, memory.rng = memory, on_write, random.Random(seed)
        return memory

    def __array_finalize__(self, source: object) -> None:
        if isinstance(source, CutMemory) and source.root is not None:
            self.root, self.on_write, self.rng = source.root, source.on_write, source.rng

    def __setitem__(self, where: Any, value: Any) -> None:
        if self.root is None or not np.may_share_memory(self, self.root):
            super().__setitem__(where, value)
            return
        after = np.array(self, subok=False)
        after[where] = value
        changed = list(zip(*(each.tolist() for each in (after != np.asarray(self)).nonzero()), strict=True))
        self.rng.shuffle(changed)
        for place in changed:
            super().__setitem__(place, after[place])
            self.on_write()


class OrderAlone(Records):
    """Believes every record that is committed: what the order of the writes is worth without the digest."""

    def damaged(self, contents: Words) -> Bools:
        return np.zeros(len(contents), np.bool_)


def recorded_cache(
    memory: Words, pages: int, slab: int, records_are: type[Records] = Records, *, at_once: int = 3
) -> BlockCache:
    """A cache that takes over what this memory has. Sizes in pages.

    Args:
        at_once: so many records and rows.
    """
    pool_bytes, slab_bytes = pages * PAGE, slab * PAGE
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adoption, "SLICE", at_once)
        return BlockCache(
            SlotAllocator(pool_bytes, slab_bytes), records=records_are(memory, pool_bytes, slab_bytes, NUM_SPACES)
        )


def words_for(pages: int, slab: int) -> int:
    return num_words(pages * PAGE, slab * PAGE, NUM_SPACES)
