"""Small caches, in pages of 4096 bytes, and short names for what most tests do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import numpy as np

from kvsidecar.cache.arrays import Ints
from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.block_index import BlockIndex
from kvsidecar.cache.block_table import BlockTable
from kvsidecar.cache.grants import StoreGrant
from kvsidecar.cache.shares import ShareLimits
from kvsidecar.cache.slots import SLOT_ALIGN, SlotAllocator, SlotState
from kvsidecar.cache.space_blocks import COLUMNS, NO_SLOT, Space, SpaceBlocks
from kvsidecar.errors import Refusal
from kvsidecar.types import Eviction, LookupMode, Namespace

PAGE = SLOT_ALIGN


def namespace(name: str = "model") -> Namespace:
    return Namespace(name, "bfloat16", "NHD", block_size=16, tp_size=1, pp_size=1, hash_algorithm="sha256")


def key(name: int | str) -> bytes:
    return str(name).encode().rjust(32, b"#")


def keys(*names: int | str) -> list[bytes]:
    return [key(name) for name in names]


def new_cache(
    pool: int, slab: int | None = None, numa: Sequence[int | None] | None = None, eviction: Eviction = Eviction.LRU
) -> BlockCache:
    """A cache with ``pool`` pages in slabs of ``slab`` pages (default: one slab)."""
    return BlockCache(SlotAllocator(pool * PAGE, (slab or pool) * PAGE, numa), eviction=eviction)


def open_space(cache: BlockCache, name: str = "model", *, group: int = 0, shards: Sequence[int] = (1,)) -> Space:
    """The space of one group, with every shard's size in pages."""
    space = None
    for shard, pages in enumerate(shards):
        space = cache.open_space(namespace(name), group, len(shards), shard, pages * PAGE)
    assert space is not None
    return space


def one_space(
    pool: int, slab: int | None = None, *, shards: Sequence[int] = (1,), eviction: Eviction = Eviction.LRU
) -> tuple[BlockCache, Space]:
    """A cache as of `new_cache`, and the one space in it."""
    cache = new_cache(pool, slab, eviction=eviction)
    return cache, open_space(cache, shards=shards)


def begin(cache: BlockCache, space: Space, hashes: Sequence[bytes], shard: int = 0) -> StoreGrant:
    grant = cache.begin_store([(space, shard, hashes)])
    assert isinstance(grant, StoreGrant), grant
    return grant


def store(cache: BlockCache, space: Space, *names: int | str, shard: int | None = None) -> None:
    """Store whole blocks, or one shard of them."""
    for one in range(space.num_shards) if shard is None else (shard,):
        cache.seal_all(begin(cache, space, keys(*names), one))


def reserved(grant: StoreGrant) -> list[tuple[int, int]]:
    """(part, index) of every block that must be copied."""
    return [(number, index) for number, part in enumerate(grant.parts) for index in part.index.tolist()]


def slots_of(grant: StoreGrant) -> list[int]:
    """Slots of all parts, in the order of `reserved`."""
    return [slot for part in grant.parts for slot in part.slots.tolist()]


def find(space: Space, block_hash: bytes) -> int | None:
    """Row of a block, readable or not; None if nothing finds it."""
    (row,) = space.blocks.index.find(space.blocks.index.keys([block_hash])).tolist()
    return row if row >= 0 else None


def slot_of(space: Space, block_hash: bytes, shard: int) -> int:
    """Slot of a sealed shard, or `NO_SLOT`."""
    row = find(space, block_hash)
    return NO_SLOT if row is None else max(NO_SLOT, int(space.blocks.slots[shard, row]))


def eviction_order(space: Space) -> list[bytes]:
    """Hashes of the evictable blocks, the next to go first."""
    return [name for rows in space.blocks.candidates() for name in hashes_of(space.blocks.index, rows)]


def refused(cache: BlockCache, space: Space, *names: int | str) -> bool:
    return cache.begin_store([(space, 0, keys(*names))]) in (Refusal.POOL_FULL, Refusal.POOL_FRAGMENTED)


def readable(cache: BlockCache, space: Space, *names: int | str) -> list[bool]:
    return cache.lookup(space, keys(*names), LookupMode.BITMAP)


def names_readable(cache: BlockCache, space: Space, *names: int | str) -> list[int | str]:
    """Those of the names that are readable."""
    return [name for name, hit in zip(names, readable(cache, space, *names), strict=True) if hit]


def lease(cache: BlockCache, space: Space, *names: int | str, now: float = 0, ttl: float = 10, owner: str = "o") -> int:
    granted, _ = cache.lookup_and_lease([(space, keys(*names))], LookupMode.PREFIX, now, ttl, owner)
    assert granted is not None
    return granted.id


Limits = tuple[int, int | None]
"""Pages that are guaranteed, and the most pages."""


def limits(**shares: Limits) -> list[ShareLimits]:
    """One share per model."""
    return [
        ShareLimits(
            name, lambda space, name=name: space.model == name, low * PAGE, None if most is None else most * PAGE
        )  # type: ignore[misc]
        for name, (low, most) in shares.items()
    ]


# -- readings of parts, taken from their private columns --------------------------------------------------------------


def table_of(cache: BlockCache) -> BlockTable:
    """What a cache is made of."""
    return cache._table


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
    in_buckets = index._rows[: filed.size][filed.ravel()].astype(np.int64)
    return np.concatenate((in_buckets, np.array(index.overflowed(), np.int64)))


def instructions_of(call: Callable[[], object]) -> int:
    """Instructions of Python's virtual machine that run until it returns: the rounds of its loops, on any machine."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any]:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def hashes_of(index: BlockIndex, rows: Ints) -> list[bytes]:
    """The block hashes of these rows."""
    return [words.tobytes()[: index._hash_bytes] for words in index._words[rows]]


def nbytes_of(blocks: SpaceBlocks) -> int:
    """Bytes of address space of a table. A page that was never written to costs no memory."""
    index, queues = blocks.index, blocks.queues
    segments = [segment for log in queues._queues.values() for segment in log.segments.values()]
    arrays = [index._words, index._tags, index._rows, index._overflows, queues._place, *segments]
    return sum(array.nbytes for array in (*arrays, *(getattr(blocks, name) for name in COLUMNS)))
