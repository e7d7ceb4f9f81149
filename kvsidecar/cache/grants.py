"""What a store, a load, a write to a slower tier and a lease hold in the cache, until they end."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from kvsidecar.cache.arrays import NO_INTS, Ints, Words
from kvsidecar.cache.block_index import Keys
from kvsidecar.cache.space_blocks import SpaceBlocks

LEAST_ROOM = 32
"""A chain in a lease counts as at least this many blocks: this many rows take as much memory as the rest of the chain,
and dropping their references as much time."""


@dataclass(slots=True, eq=False)
class Chain:
    """Blocks of one part of a request, without duplicates, in prefix order."""

    blocks: SpaceBlocks
    rows: Ints
    in_turn: bool = False
    """For blocks to evict: they are in eviction order."""


@dataclass(slots=True, eq=False)
class StorePart:
    """The blocks to copy for one part of a store."""

    blocks: SpaceBlocks
    shard: int
    index: Ints
    """Positions in the part's hashes: hash ``index[i]`` goes to ``slots[i]``. Ascending."""
    rows: Ints
    """Rows of these blocks."""
    created: Ints
    """Rows of the blocks that this store created."""
    chain: Keys
    """Hashes of the blocks that are reserved here or present, in order: those that the store uses at its end."""
    chain_rows: Ints
    """Rows of `chain`. Rows of present blocks are valid only until the next request."""
    slots: Ints = field(default_factory=lambda: NO_INTS)
    """Byte offsets in the pool, ascending; adjacent as far as free slots allow."""

    @property
    def slot_size(self) -> int:
        """Size class in bytes."""
        return self.blocks.space.slot_sizes[self.shard]


@dataclass(slots=True, eq=False)
class StoreGrant:
    """The blocks that a store has to copy. Ends with one call of `BlockCache.seal_all` or `BlockCache.abort_all`."""

    parts: list[StorePart] = field(default_factory=list)
    """One per part of the request."""
    present: int = 0
    """Number of blocks whose shard was already sealed."""
    in_flight: int = 0
    """Number of blocks whose shard is already being filled, by another store or earlier in this one."""
    ttl: float = 0.0
    """Seconds after which its blocks expire, if their share's time is not shorter; 0: never."""
    idle_ttl: float = 0.0
    """Seconds after its last use until a block expires, if their share's time is not shorter; 0: never."""
    wanted: bool = False
    """Its blocks are about to be loaded."""
    checksums: tuple[Ints, Words] | None = None
    """Slots to fill, and the checksums of their bytes: recorded when the store is sealed, if anything is."""
    open: bool = True

    @property
    def reserved(self) -> int:
        """Number of slots to fill."""
        return sum(len(part.index) for part in self.parts)


@dataclass(slots=True, eq=False)
class LoadGrant:
    """The slots of the blocks of a load. They stay until `BlockCache.end_load`."""

    slots: list[Ints]
    """Byte offsets in the pool, per part and in the order of its hashes."""
    rows: list[Ints]
    """Rows of each part's hashes."""
    chains: list[Chain]
    """Referenced blocks of each part."""
    open: bool = True


@dataclass(slots=True, eq=False)
class WriteGrant:
    """Blocks of one space that are written to a slower tier. They stay until `TierCopies.end_write`."""

    chain: Chain
    hashes: bytes
    """Their block hashes, joined."""
    slots: Ints
    """Byte offsets in the pool, [num_shards, blocks]."""
    tier: int
    """The tier's bit in `SpaceBlocks.tiers`."""
    last_used: Ints
    """Tick of each block's last use, when the write began."""
    open: bool = True


@dataclass(slots=True, eq=False)
class Lease:
    """Prevents the eviction of blocks until ``expires_at`` (seconds on the caller's clock)."""

    id: int
    owner: Hashable
    chains: list[Chain]
    """The readable blocks of each part of the lookup that has any, without duplicates."""
    expires_at: float
    num_blocks: int = field(default=0, init=False)
    room: int = field(default=0, init=False)
    """Its part of its user's limit."""

    def __post_init__(self) -> None:
        self._count(self.chains)

    def add(self, chains: list[Chain]) -> None:
        self.chains += chains
        self._count(chains)

    def _count(self, chains: Iterable[Chain]) -> None:
        for chain in chains:
            self.num_blocks += len(chain.rows)
            self.room += max(len(chain.rows), LEAST_ROOM)
