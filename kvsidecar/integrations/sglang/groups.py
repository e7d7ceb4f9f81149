"""The daemon's KV cache groups of one SGLang engine: one for each pool, whose layers are cut into slices. Pure.

A page of a pool is one block. A load is one job per chunk of layers, in their order, so that the forward runs on the
first ones while the others are still being copied: each job copies the slices of all pools that are in its chunk.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

KV, SWA, MAMBA = "kv", "swa", "mamba"
"""The values of SGLang's ``PoolName`` whose pages its linker contract moves."""


@dataclass(frozen=True, slots=True)
class PoolGroup:
    """One pool's layers."""

    index: int
    pool: str
    slices: Mapping[int, tuple[int, ...]]
    """The pool's layers in each chunk, in the chunks' order, counted from the first layer of the pipeline stage, as
    SGLang waits for them. No slice is empty."""
    replicated: bool = False
    """Whether the KV is equal on all tensor-parallel ranks: then the first rank stores it."""
    ranks_per_head: int = 1
    """If it is not: how many consecutive ranks share a KV head, which the first of them stores."""

    def is_stored_by(self, rank: int) -> bool:
        return rank == 0 if self.replicated else rank % self.ranks_per_head == 0

    def shard(self, rank: int, ranks: int) -> tuple[int, int]:
        """The index of a rank's part of a page, and the number of parts."""
        return (0, 1) if self.replicated else (rank // self.ranks_per_head, ranks // self.ranks_per_head)

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(layer for layers in self.slices.values() for layer in layers)

    def slice_of(self, chunk: int) -> int | None:
        """The value of `kvsidecar.client.Blocks.slice` for a chunk; None: the pool has no layer there."""
        if chunk not in self.slices:
            return None
        return 0 if len(self.slices) == 1 else list(self.slices).index(chunk) + 1


@dataclass(frozen=True, slots=True)
class Groups:
    """All groups of one rank."""

    all: tuple[PoolGroup, ...]
    ends: tuple[int, ...]
    """The layer after the last one of each chunk."""

    @property
    def num_chunks(self) -> int:
        return len(self.ends)

    def of(self, pool: str) -> PoolGroup | None:
        return next((group for group in self.all if group.pool == pool), None)

    def chunk_of(self, layer: int) -> int:
        return _chunk_of(layer, self.ends)


def _chunk_of(layer: int, ends: Sequence[int]) -> int:
    return bisect_right(ends, min(layer, ends[-1] - 1))


def _ends(num_layers: int, num_chunks: int) -> tuple[int, ...]:
    """The ends of chunks of at least one layer. The first chunk is a quarter as large as those in the middle, the
    second and the last one are half as large: the forward begins when the first chunk is loaded, and ends when it has
    computed the last one. A layer is computed more slowly than it is loaded, so the forward does not wait for a chunk
    that is twice as large as the one before."""
    sizes = [*(min(1 << i, 4) for i in range(num_chunks - 1)), 2]
    ends: list[int] = []
    for chunk, before in enumerate(accumulate(sizes), 1):
        end = max((2 * num_layers * before + sum(sizes)) // (2 * sum(sizes)), ends[-1] + 1 if ends else 1)
        ends.append(min(end, num_layers - num_chunks + chunk))
    return tuple(ends)


def groups_of(
    pools: Sequence[tuple[str, Iterable[int], bool]],
    num_layers: int,
    num_chunks: int,
    ranks_per_head: Mapping[str, int] = {},
) -> Groups:
    """The groups of one rank.

    Args:
        pools: name, layers, and whether tensor-parallel ranks hold the same KV.
        num_layers: the number of layers in this pipeline stage.
        ranks_per_head: `PoolGroup.ranks_per_head` by pool, where it is not 1.
    """
    ends = _ends(num_layers, max(1, min(num_chunks, num_layers)))
    found: list[PoolGroup] = []
    for pool, layers, replicated in pools:
        slices: dict[int, tuple[int, ...]] = {}
        for layer in sorted(set(layers)):
            chunk = _chunk_of(layer, ends)
            slices[chunk] = (*slices.get(chunk, ()), layer)
        if slices:
            found.append(PoolGroup(len(found), pool, slices, replicated, ranks_per_head.get(pool, 1)))
    return Groups(tuple(found), ends)
