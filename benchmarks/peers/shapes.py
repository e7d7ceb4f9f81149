"""The KV layouts that every system is measured on, and how many blocks one request moves.

Names and sizes are those of ``kvsidecar bench``, so that rows of both can be put side by side. Pure: no torch, no CUDA.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30

Direction = Literal["store", "load"]
BOTH: Final[tuple[Direction, Direction]] = ("store", "load")
Order = Literal["random", "consecutive"]
"""Of block ids in the GPU, and of the slots that they go to on the host."""

SIZES: Final = (1, 8, 64, 512)
"""Blocks of 16 tokens per job."""
CHUNK_SIZES: Final = (16, 64, 512)
"""The same for LMCache: it stores and finds whole chunks of 256 tokens, that is 16 blocks."""
DEEP_SIZES: Final = (64, 512)
"""Blocks per job where several jobs are kept in flight."""
DEPTH: Final = 4
"""Jobs in flight there."""
BLOCKS: Final = 1024
"""Blocks of KV on the GPU. Twice the largest job, so that random ids leave holes."""
TOKENS_PER_BLOCK: Final = 16


@dataclass(frozen=True)
class Shape:
    """Where the bytes of one block lie in the engine's GPU memory.

    Row ``r`` of block ``b`` is ``row_bytes`` long and begins ``b * row_bytes`` behind the start of row ``r``.

    Args:
        name: as in every table and JSON row.
        rows: number of rows of one block (layers, or layers x K/V).
        row_bytes: size of one row of one block.
        separate: each layer is an allocation of its own. Otherwise all rows lie in one, at a constant stride.
        planes: consecutive rows that belong to one layer: 2 where K and V are apart, else 1.
    """

    name: str
    rows: int
    row_bytes: int
    separate: bool = False
    planes: int = 1

    @property
    def block_bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def layers(self) -> int:
        return self.rows // self.planes


CONTIGUOUS: Final = Shape("contiguous", rows=1, row_bytes=2 * MIB)
STACKED_64K: Final = Shape("stacked-64k", rows=32, row_bytes=64 * KIB)
SEPARATE_64K: Final = Shape("separate-64k", rows=32, row_bytes=64 * KIB, separate=True)
KV_APART_32K: Final = Shape("kv-apart-32k", rows=64, row_bytes=32 * KIB, separate=True, planes=2)
"""What vLLM registered until 0.32, and what both peers' own tools measure: 32 layers, K and V apart."""
TP8_8K: Final = Shape("tp8-8k", rows=80, row_bytes=8 * KIB)
TP8_4K: Final = Shape("tp8-4k", rows=160, row_bytes=4 * KIB, planes=2)

SHAPES: Final = (CONTIGUOUS, STACKED_64K, SEPARATE_64K, KV_APART_32K, TP8_8K, TP8_4K)


def shape_named(name: str) -> Shape:
    """The shape of a name. Raises ValueError: there is none; the text lists what there is."""
    for shape in SHAPES:
        if shape.name == name:
            return shape
    raise ValueError(f"no shape is named {name!r}; there are {', '.join(shape.name for shape in SHAPES)}")


def pool_gib(jobs: int, *, largest: int = max(SIZES), headroom: float = 1.5) -> int:
    """GiB of host memory that a peer needs to keep all jobs of one layout: nothing may be evicted while it is measured.

    Args:
        jobs: per size, warm-up included.
        largest: blocks of the largest job.
        headroom: for the peer's own allocator, and for a watermark at which it begins to evict.
    """
    per_job = (largest + sum(size for size in SIZES if size < largest)) * max(shape.block_bytes for shape in SHAPES)
    return -int(-jobs * per_job * headroom // GIB)


def bfloat16_elements(shape: Shape) -> int:
    """Elements of one token in one row, as torch and vLLM count them: heads x head size."""
    return shape.row_bytes // (2 * TOKENS_PER_BLOCK)
