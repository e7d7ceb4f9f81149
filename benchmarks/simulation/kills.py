"""The daemon could be killed at any instant: what would the next one find in the pool and its records?"""

from __future__ import annotations

import random

import numpy as np
import xxhash

from benchmarks.simulation.machine import Machine, Violation
from benchmarks.simulation.shapes import HASHES, PAGE, content
from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.records import Records
from kvsidecar.cache.space_blocks import Space
from tests.cache.cuts import NUM_SPACES, CutMemory, OrderAlone, recorded_cache, words_for

Found = set[tuple[str, int, int]]
"""Model, group and key of blocks."""


class Kills:
    """Looks at the pool and the records after every word of a record that is written, and after every step.

    Args:
        slab_bytes: size of a slab.
        rng: order of the words of one assignment.
    """

    def __init__(self, machine: Machine, slab_bytes: int, rng: random.Random) -> None:
        self._machine = machine
        self._pages = len(machine.pool) // PAGE
        self._slab = slab_bytes // PAGE
        self._before: Found = set()
        self._cuts: list[Found] = []
        self.num_cuts = 0
        self._memory = CutMemory.create(words_for(self._pages, self._slab), self._cut, rng.getrandbits(32))
        self.records = Records(self._memory, self._pages * PAGE, slab_bytes, NUM_SPACES)

    def check(self, cache: BlockCache) -> None:
        """After a step: the next daemon finds the readable blocks; a kill before would have lost no others."""
        self._cut()
        after = {
            (space.namespace.model, space.group, key)
            for space in cache.spaces
            for key, row in enumerate(_rows(space))
            if row >= 0 and not space.blocks.missing[row]
        }
        if self._cuts[-1] != after:
            raise Violation(f"the next daemon would find {self._cuts[-1]}; readable are {after}")
        for found in self._cuts:
            if lost := (self._before & after) - found:
                raise Violation(f"a kill would have lost {lost}")
        self._before = after
        self._cuts.clear()

    def _cut(self) -> None:
        cache = recorded_cache(np.array(self._memory, subok=False), self._pages, self._slab, OrderAlone)
        self.num_cuts += 1
        self._cuts.append(set())
        for space in cache.spaces:
            for key, row in enumerate(_rows(space)):
                if row >= 0:
                    self._compare(cache, space, key, row)
                    self._cuts[-1].add((space.namespace.model, space.group, key))

    def _compare(self, cache: BlockCache, space: Space, key: int, row: int) -> None:
        slots = space.blocks.slots[:, row]
        for shard, (slot, checksum) in enumerate(zip(slots.tolist(), cache.checksums(slots), strict=True)):
            nbytes = space.shard_bytes[shard]
            assert nbytes is not None
            expected = content(space.namespace.model, space.group, key, shard, nbytes)
            if not np.array_equal(self._machine.pool[slot : slot + nbytes], expected):
                raise Violation(f"the next daemon would find key {key} of group {space.group} with other bytes")
            if checksum not in (None, xxhash.xxh3_64_intdigest(expected.data)):
                raise Violation(f"the next daemon would find key {key} of group {space.group} corrupt")


def _rows(space: Space) -> list[int]:
    rows: list[int] = space.blocks.index.find(space.blocks.index.keys(list(HASHES))).tolist()
    return rows
