"""The daemon's KV cache groups of one SGLang engine: a pool's layers, split into chunks. Pure.

A load is one job per chunk, in the order of the layers, so that the forward runs on the first layers while the others
are still being copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

KV, SWA, MAMBA = "kv", "swa", "mamba"
"""The values of SGLang's ``PoolName`` that its linker contract moves."""


@dataclass(frozen=True, slots=True)
class Group:
    """One pool's layers of one chunk."""

    index: int
    pool: str
    chunk: int
    layers: tuple[int, ...]
    """Counted from the first layer of the pipeline stage, as SGLang waits for them."""
    replicated: bool = False
    """The KV is the same on all tensor-parallel ranks: the first rank stores it."""


@dataclass(frozen=True, slots=True)
class Groups:
    """All groups of one rank."""

    all: tuple[Group, ...]
    num_layers: int
    num_chunks: int
    _by_pool: Mapping[str, tuple[Group, ...]] = field(default_factory=dict)

    def of(self, pool: str) -> tuple[Group, ...]:
        return self._by_pool.get(pool, ())

    @property
    def pools(self) -> tuple[str, ...]:
        return tuple(self._by_pool)

    def chunk_of(self, layer: int) -> int:
        return chunk_of(layer, self.num_layers, self.num_chunks)


def chunk_of(layer: int, num_layers: int, num_chunks: int) -> int:
    return min(layer, num_layers - 1) * num_chunks // num_layers


def groups_of(pools: Sequence[tuple[str, Iterable[int], bool]], num_layers: int, num_chunks: int) -> Groups:
    """
    Args:
        pools: name, layers, and whether tensor-parallel ranks hold the same KV.
        num_layers: of this pipeline stage.
    """
    num_chunks = max(1, min(num_chunks, num_layers))
    found: list[Group] = []
    for pool, layers, replicated in pools:
        for chunk in range(num_chunks):
            mine = tuple(sorted(each for each in set(layers) if chunk_of(each, num_layers, num_chunks) == chunk))
            if mine:
                found.append(Group(len(found), pool, chunk, mine, replicated))
    by_pool = {pool: tuple(each for each in found if each.pool == pool) for pool, _, _ in pools}
    return Groups(tuple(found), num_layers, num_chunks, by_pool)
