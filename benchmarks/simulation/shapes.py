"""What the simulated engines hold: namespaces, two shard sizes, one or two ranks, the content of every block."""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvsidecar.types import GroupLayout, Namespace, Region

NUM_BLOCKS = 7
"""Block ids of a rank."""
NUM_KEYS = 6
"""Different block contents of a namespace and group: few, so that engines meet."""
PAGE = 4096

HASHES = tuple(hashlib.sha256(b"key %d" % index).digest() for index in range(NUM_KEYS))
"""The same in all namespaces."""


@dataclass(frozen=True)
class GroupShape:
    group: int
    sharded: bool
    """One shard a rank; otherwise one for all (MLA)."""
    regions: tuple[tuple[int, int], ...]
    """(bytes of a row, rows) of each region."""

    @property
    def shard_bytes(self) -> int:
        return sum(row_bytes * rows for row_bytes, rows in self.regions)


@dataclass(frozen=True)
class Shape:
    namespace: Namespace
    num_ranks: int
    groups: tuple[GroupShape, ...]


SHAPES = (
    # One rank, one group, one page a slot. And the same again: only the namespace tells their blocks apart.
    Shape(Namespace("small", "bf16", "LBNHC", 16, 1, 1, "sha256"), 1, (GroupShape(0, True, ((96, 2),)),)),
    Shape(Namespace("twin", "bf16", "LBNHC", 16, 1, 1, "sha256"), 1, (GroupShape(0, True, ((96, 2),)),)),
    # Two ranks and two groups: two pages and two shards a block; one page and one shard that both ranks may store.
    Shape(
        Namespace("large", "bf16", "LBNHC", 16, 2, 1, "sha256"),
        2,
        (GroupShape(0, True, ((1400, 2), (PAGE // 2, 1))), GroupShape(1, False, ((64, 1),))),
    ),
)


@functools.cache
def content(model: str, group: int, key: int, shard: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """What the shard of this block holds, whoever stores it."""
    name = repr((model, group, key, shard)).encode()
    data = np.frombuffer(hashlib.shake_128(name).digest(nbytes), np.uint8)
    data.flags.writeable = False
    return data


def make_layout(shape: GroupShape, rank: int, num_ranks: int, rng: random.Random, sizes: list[int]) -> GroupLayout:
    """Regions somewhere in the allocations, whose ``sizes`` grow by what they need: rows or blocks outermost."""
    regions = []
    for row_bytes, rows in shape.regions:
        allocation = rng.randrange(len(sizes))
        offset = sizes[allocation] + rng.choice((0, 32))
        if rng.random() < 0.5:
            row_stride, block_stride = NUM_BLOCKS * row_bytes + rng.choice((0, 16)), row_bytes
        else:
            row_stride, block_stride = row_bytes, rows * row_bytes
        region = Region(allocation, offset, row_stride, block_stride, row_bytes, rows)
        sizes[allocation] = region.end(NUM_BLOCKS)
        regions.append(region)
    shard, num_shards = (rank, num_ranks) if shape.sharded else (0, 1)
    return GroupLayout(shape.group, NUM_BLOCKS, shard, num_shards, tuple(regions))


def rows_of(layout: GroupLayout, block_id: int) -> Iterator[tuple[int, slice, slice]]:
    """Every row of a block: allocation, bytes in it, bytes in the shard."""
    place = 0
    for region in layout.regions:
        for row in range(region.num_rows):
            start = region.offset + row * region.row_stride + block_id * region.block_stride
            yield region.allocation, slice(start, start + region.row_bytes), slice(place, place + region.row_bytes)
            place += region.row_bytes
