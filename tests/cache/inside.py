"""Readings of the cache's parts that only tests need, taken from their private columns."""

from __future__ import annotations

import numpy as np

from kvsidecar.cache.arrays import Ints
from kvsidecar.cache.block_index import BlockIndex
from kvsidecar.cache.slots import SlotAllocator, SlotState
from kvsidecar.cache.space_blocks import COLUMNS, SpaceBlocks


def state_of(allocator: SlotAllocator, offset: int) -> SlotState:
    """State of the slot that this byte of the pool belongs to; FREE if it belongs to none."""
    slabs = allocator.slabs
    slab = int(slabs.at[offset // allocator.grid.unit])
    if not slabs.size[slab]:
        return SlotState.FREE
    inside = (offset - slabs.start[slab]) // slabs.size[slab]
    if inside >= slabs.capacity[slab]:
        return SlotState.FREE
    return SlotState(allocator._states[slabs.first[slab] + inside])


def rows_in(index: BlockIndex) -> Ints:
    """All rows in the index, in no order."""
    filed = index._tags[: index._num_buckets] != 0
    overflowed = [row for rows in index._overflow.values() for row in rows]
    in_buckets = index._rows[: filed.size][filed.ravel()].astype(np.int64)
    return np.concatenate((in_buckets, np.array(overflowed, np.int64)))


def hashes_of(index: BlockIndex, rows: Ints) -> list[bytes]:
    """The block hashes of these rows."""
    return [words.tobytes()[: index._hash_bytes] for words in index._words[rows]]


def nbytes_of(blocks: SpaceBlocks) -> int:
    """Bytes of address space of a table. A page that was never written to costs no memory."""
    index, queues = blocks.index, blocks.queues
    segments = [segment for log in queues._queues.values() for segment in log.segments.values()]
    arrays = [index._words, index._tags, index._rows, index._overflows, queues._place, *segments]
    return sum(array.nbytes for array in (*arrays, *(getattr(blocks, name) for name in COLUMNS)))
