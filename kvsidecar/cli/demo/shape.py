"""The KV cache of the demo's engines: Llama-shaped, as large as the machine allows."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, replace

import numpy as np
import numpy.typing as npt

from kvsidecar.bench.layouts import Form, Layout
from kvsidecar.types import GroupLayout, Namespace

TP_SIZE = 2
BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class DemoShape:
    """One rank's KV cache, layer-stacked: ``[layers, num_blocks, row_bytes]`` in one allocation."""

    layers: int
    row_bytes: int
    """K and V of one layer, one block, this rank's heads."""
    num_blocks: int
    """Blocks the engine stores."""

    @property
    def shard_bytes(self) -> int:
        return self.layers * self.row_bytes

    @property
    def rank_bytes(self) -> int:
        return self.shard_bytes * self.num_blocks

    @property
    def all_bytes(self) -> int:
        return self.rank_bytes * TP_SIZE

    def namespace(self) -> Namespace:
        return Namespace(
            model="demo-llama",
            dtype="bfloat16",
            kv_layout="LBNHC",
            block_size=BLOCK_TOKENS,
            tp_size=TP_SIZE,
            pp_size=1,
            hash_algorithm="sha256",
            extra=str(asdict(self)),
        )

    def memory(self) -> Layout:
        """The layout of the bytes."""
        return Layout("demo", Form.STACKED, self.layers, self.row_bytes, "layer-stacked", num_blocks=self.num_blocks)

    def layout(self, rank: int) -> GroupLayout:
        return replace(self.memory().group(), shard=rank, num_shards=TP_SIZE)

    def hashes(self) -> list[bytes]:
        """Chained block hashes of one long prompt."""
        hashes = [hashlib.sha256(b"demo").digest()]
        for _ in range(self.num_blocks - 1):
            hashes.append(hashlib.sha256(hashes[-1]).digest())
        return hashes

    def content(self, rank: int, block_hash: bytes) -> npt.NDArray[np.uint8]:
        """The rows of this rank's shard of a block, one after another."""
        seed = int.from_bytes(block_hash[:8], "little") + rank
        return np.frombuffer(np.random.default_rng(seed).bytes(self.shard_bytes), np.uint8)


def choose(*, blocks: int, cuda: bool, lockable_bytes: int | None) -> DemoShape:
    """The largest shape that fits.

    Args:
        cuda: whether to use the shape for a GPU: Llama-3.1-8B's, with 1 MiB per block and rank.
        lockable_bytes: bytes that this process may mlock; None: no limit.
    """
    if cuda:
        return DemoShape(layers=32, row_bytes=32 * 1024, num_blocks=blocks)
    shape = DemoShape(layers=16, row_bytes=8 * 1024, num_blocks=blocks)
    # An ordinary user may lock 8 MiB on most systems: keep the number of blocks and shrink the heads instead.
    while lockable_bytes is not None and pool_bytes(shape) > lockable_bytes and shape.shard_bytes > 4096:
        if shape.row_bytes > 512:
            shape = DemoShape(shape.layers, shape.row_bytes // 2, blocks)
        else:
            shape = DemoShape(shape.layers // 2, shape.row_bytes, blocks)
    return shape


def pool_bytes(shape: DemoShape) -> int:
    """Size of a pool that holds all blocks of all ranks, with some spare space."""
    return (shape.all_bytes * 9 // 8 + 65535) // 65536 * 65536
