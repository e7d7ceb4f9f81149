"""Blocks, the spaces they live in, and what a client holds of them: grants and leases."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np

from kvsidecar.cache.arrays import FEW, NO_INTS, Ints, every, few, longer, some, where_zero
from kvsidecar.cache.block_index import BlockIndex, Keys
from kvsidecar.cache.eviction_policy import EvictionPolicy
from kvsidecar.types import Namespace

NO_SLOT = -1
"""This shard was not stored."""
FILLING = -2
"""A store has a slot reserved for this shard."""


class Blocks:
    """The blocks of one space, as columns: a block is a row, the same number in each of them.

    There may be ten million, so a block is no Python object: it costs about 100 bytes (docs/benchmarks.md), the
    garbage collector never walks over it, and one array operation changes all blocks of a request. Columns are as long
    as they can get from the start, since memory that was never written to costs none.

    Args:
        number: of this table among all of a cache; see `owners`.
        capacity: how many blocks there can be.
    """

    def __init__(self, space: Space, number: int, capacity: int, policy: EvictionPolicy, seed: int) -> None:
        self.space = space
        self.number = number
        self.policy = policy
        self.index = BlockIndex(space.namespace.hash_bytes, capacity, seed)
        """The blocks that can be found, readable or not."""
        self.slots = np.zeros((space.num_shards, capacity), np.int64)
        """Per shard the slot of its sealed bytes, or `NO_SLOT`, or `FILLING`."""
        self.missing = np.zeros(capacity, np.int32)
        """Shards that are not sealed. A block is readable when none is missing."""
        self.pins = np.zeros(capacity, np.int32)
        """Leases, running loads and open reservations that need it."""
        self.evictable = np.zeros(capacity, np.bool_)
        """Nothing needs it now, and it holds something. The eviction policy has exactly these blocks."""
        self.last_used = np.zeros(capacity, np.int64)
        """Tick of its last use; set when it becomes evictable."""
        self.marks = np.zeros(capacity, np.uint8)
        """Scratch of `kvsidecar.cache.eviction`; 0 outside of it."""
        self.detached = np.zeros(capacity, np.bool_)
        """Nothing finds it any more; it lives until its last pin ends."""
        self.cleared = False
        """All of them are detached. `BlockTable.sweep` frees what nobody needs."""
        self.swept = 0
        """Rows that the sweep has seen."""
        self.readable = 0
        """Blocks that a lookup would find."""
        self._freed_rows = np.zeros(capacity, np.int64)
        self._num_freed = 0
        self._rows_used = 0
        """No row from this one on was ever used."""

    def __len__(self) -> int:
        """Blocks there are, findable or not."""
        return self._rows_used - self._num_freed

    @property
    def rows_used(self) -> int:
        """Higher than any row."""
        return self._rows_used

    def create(self, keys: Keys) -> Ints:
        """Rows of new blocks, in the index, with nothing in them."""
        recycled = min(len(keys), self._num_freed)
        fresh = len(keys) - recycled
        if self._rows_used + fresh > len(self.pins):
            self.reserve(2 * (self._rows_used + fresh))
        self._num_freed -= recycled
        rows = np.arange(self._rows_used - recycled, self._rows_used + fresh)
        if recycled:
            rows[:recycled] = self._freed_rows[self._num_freed : self._num_freed + recycled]
            rows[:recycled].sort()
        self._rows_used += fresh
        self.slots[:, rows] = NO_SLOT
        self.missing[rows] = self.space.num_shards
        self.index.add(keys, rows)
        return rows

    def recycle(self, rows: Ints) -> None:
        """These blocks are gone: their rows may be used for others."""
        self.evictable[rows] = False
        self.detached[rows] = False
        self._freed_rows[self._num_freed : self._num_freed + len(rows)] = rows
        self._num_freed += len(rows)

    def reserve(self, capacity: int) -> None:
        """Make the columns longer, if they are shorter. Copies them."""
        if capacity <= len(self.pins):
            return
        for name in ("slots", "missing", "pins", "evictable", "last_used", "marks", "detached", "_freed_rows"):
            setattr(self, name, longer(getattr(self, name), capacity))
        self.index.reserve(capacity)
        self.policy.reserve(capacity)

    def unpin(self, rows: Ints) -> Ints:
        """One pin of each of these blocks ends. Those of which it was the last."""
        if len(rows) > FEW:
            self.pins[rows] -= 1
            last: Ints = rows[self.pins[rows] == 0]
            return last
        places, busy = rows.tolist(), False
        for row in places:
            left = self.pins.item(row) - 1
            self.pins[row] = left
            busy |= left > 0
        return rows[where_zero(self.pins, rows)] if busy else rows

    def can_stay(self, rows: Ints) -> bool:
        """Every one of these blocks is found, and holds something."""
        if len(rows) > FEW:
            return not some(self.detached[rows]) and not some(self.missing[rows] == self.space.num_shards)
        for row in few(rows):
            if self.detached.item(row) or self.missing.item(row) == self.space.num_shards:
                return False
        return True

    def held_slots(self, rows: Ints) -> Ints | list[int]:
        """Slots of the sealed shards of these blocks."""
        if len(rows) * self.space.num_shards <= FEW:
            shards = range(self.space.num_shards)
            return [slot for shard in shards for row in few(rows) if (slot := self.slots.item(shard, row)) >= 0]
        if self.space.num_shards == 1:
            slots: Ints = self.slots[0, rows]
        else:
            slots = self.slots[:, rows].ravel()
        filled = slots >= 0
        return slots if every(filled) else slots[filled]

    def owners(self, rows: Ints) -> Ints:
        """What the allocator calls these blocks."""
        number = self.number << 32
        if len(rows) <= FEW:
            return np.array([number | row for row in rows.tolist()], np.int64)
        return rows | number


@dataclass(slots=True, eq=False)
class Space:
    """The blocks of one namespace and KV cache group. No space ever sees another's blocks."""

    namespace: Namespace
    group: int
    num_shards: int
    blocks: Blocks = field(init=False)
    """Findable ones. A clear puts an empty table here."""
    shard_bytes: list[int | None] = field(init=False)
    """Bytes per shard; None until a rank with that shard has attached."""
    slot_sizes: list[int] = field(init=False)
    """Size class per shard; 0 where ``shard_bytes`` is None."""
    users: int = field(default=0, init=False)
    """Ranks that have it open."""
    dropped: bool = field(default=False, init=False)
    """The cache has forgotten it: it had neither users nor blocks."""
    hits: int = field(default=0, init=False)
    misses: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.shard_bytes = [None] * self.num_shards
        self.slot_sizes = [0] * self.num_shards

    @property
    def readable(self) -> int:
        """Blocks that a lookup would find."""
        return self.blocks.readable

    @property
    def block_bytes(self) -> int:
        """Bytes of the slots of one readable block."""
        return sum(self.slot_sizes)


@dataclass(slots=True, eq=False)
class Chain:
    """Blocks of one part of a request, each once, in the order of the prefix."""

    blocks: Blocks
    rows: Ints


@dataclass(slots=True, eq=False)
class StorePart:
    """What must be copied for one part of a store."""

    blocks: Blocks
    shard: int
    index: Ints
    """Which of the part's hashes: ``index[i]`` goes to ``slots[i]``. Ascending."""
    rows: Ints
    """Their blocks."""
    created: Ints
    """Those that did not exist before."""
    chain: Keys
    """Hashes of the blocks that are reserved here or present, in order: what is used when the store ends."""
    chain_rows: Ints
    """The same as rows; those of present blocks are theirs only until the next request."""
    slots: Ints = field(default_factory=lambda: NO_INTS)
    """Byte offsets in the pool, ascending; adjacent as far as free slots allow."""

    @property
    def slot_size(self) -> int:
        """Size class of the slots, in bytes."""
        return self.blocks.space.slot_sizes[self.shard]


@dataclass(slots=True, eq=False)
class StoreGrant:
    """Answer to a store: what to copy, and how many blocks need no copy.

    Ends in exactly one of `BlockCache.seal_all`, ``abort_all`` and ``quarantine_all``.
    """

    parts: list[StorePart] = field(default_factory=list)
    """One per part of the request."""
    present: int = 0
    """Blocks of which this shard was already sealed."""
    in_flight: int = 0
    """Blocks of which this shard is being filled already, by another store or earlier in this one."""
    open: bool = True

    @property
    def reserved(self) -> int:
        """Slots to be filled."""
        return sum(len(part.index) for part in self.parts)


@dataclass(slots=True, eq=False)
class LoadGrant:
    """Answer to a load: where the bytes are. Its blocks are pinned until `BlockCache.end_load`."""

    slots: list[Ints]
    """Per part the byte offsets in the pool, in the order of its hashes."""
    rows: list[Ints]
    """Per part the blocks of its hashes."""
    chains: list[Chain]
    """Per part what is pinned."""
    open: bool = True


@dataclass(slots=True, eq=False)
class Lease:
    """A promise that blocks will not be evicted before ``expires_at`` (seconds on the caller's clock)."""

    id: int
    owner: Hashable
    chains: list[Chain]
    """Per part of the lookup the blocks that were readable, each once."""
    expires_at: float

    @property
    def num_blocks(self) -> int:
        return sum(len(chain.rows) for chain in self.chains)
