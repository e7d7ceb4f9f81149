"""What the blocks that a request is going to store inherit: the gap (`kvsidecar.cache.rhythm`) of the deepest block
that it has hit. A store does not say what its blocks follow, but the lookup before it named them all."""

from __future__ import annotations

import numpy as np

from kvsidecar.cache.arrays import Bools, Bytes, Ints, zeros
from kvsidecar.cache.block import SpaceBlocks, StorePart
from kvsidecar.cache.block_index import Keys, Tags
from kvsidecar.cache.rhythm import FIRST_GAP

HEIRS = 1 << 18
"""Entries, of five bytes: the blocks of some dozens of long prompts."""
_FACTOR = 0x9E3779B1
"""Makes the entries of one hash differ between tables."""
_MASK = (1 << 32) - 1


class Heirs:
    """A direct-mapped table: a new entry replaces the one at its place. An entry that is lost, or that belongs to
    another block with the same 32 bits of its hash, makes a block begin with another gap, and nothing else."""

    def __init__(self) -> None:
        self._tags: Tags = zeros((HEIRS,), np.uint32)
        self._gaps: Bytes = zeros((HEIRS,), np.uint8)

    def leave(self, blocks: SpaceBlocks, keys: Keys, rows: Ints, hits: Bools) -> None:
        """A lookup has hit these blocks: the misses behind a hit inherit its gap.

        Args:
            keys: of all that was looked up, in prefix order.
            rows: of the same; only those of hits count.
        """
        before = np.maximum.accumulate(np.where(hits, np.arange(len(hits)), -1))
        misses = (~hits & (before >= 0)).nonzero()[0]
        if len(misses):
            tags = self._tags_of(blocks, keys.tags[misses])
            at = tags & np.uint32(HEIRS - 1)
            self._tags[at] = tags
            self._gaps[at] = blocks.gaps[rows[before[misses]]]

    def take(self, part: StorePart) -> None:
        """Set the gaps of the blocks that a store has created: what was left for each, else that of the block before it
        in the same store, else the first one."""
        blocks, rows = part.blocks, part.chain_rows
        if not len(part.created):
            return
        tags = self._tags_of(blocks, part.chain.tags)
        at = tags & np.uint32(HEIRS - 1)
        gaps = np.where(self._tags[at] == tags, self._gaps[at].astype(np.int16), -1)
        old = np.isin(rows, part.created, invert=True)
        gaps[old] = blocks.gaps[rows[old]]
        before = np.maximum.accumulate(np.where(gaps >= 0, np.arange(len(gaps)), -1))
        blocks.gaps[rows[~old]] = np.where(before >= 0, gaps[before], FIRST_GAP)[~old]

    @staticmethod
    def _tags_of(blocks: SpaceBlocks, tags: Tags) -> Tags:
        mixed: Tags = tags ^ np.uint32(blocks.number * _FACTOR & _MASK)
        return mixed
