"""Blocks, the spaces they live in, and what a client holds of them: reservations, grants, leases."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvsidecar.types import Namespace

if TYPE_CHECKING:
    from kvsidecar.cache.eviction import EvictionPolicy

NO_SLOT = -1


class Block:
    """One block of one space. There may be ten million, so it is small: no dict, ints for slots, bits for shards."""

    __slots__ = ("hash", "last_used", "newer", "older", "pins", "sealed", "slots", "space")

    def __init__(self, space: Space, block_hash: bytes) -> None:
        self.space = space
        self.hash = block_hash
        """Empty once the block cannot be found any more (evicted or cleared)."""
        self.slots: int | list[int] = NO_SLOT if space.num_shards == 1 else [NO_SLOT] * space.num_shards
        """Slot of each shard, or `NO_SLOT`; without the list if there is one shard."""
        self.sealed = 0
        """Bit per shard."""
        self.pins = 0
        """Leases and running loads that need it."""
        self.last_used = 0
        """Tick of its last use."""
        self.older: Block | None = None
        self.newer: Block | None = None
        """Links of the eviction policy's list."""

    @property
    def readable(self) -> bool:
        """All shards are sealed (a block that nothing finds may be readable still)."""
        return self.sealed == self.space.all_sealed

    @property
    def filling(self) -> bool:
        """At least one of its shards has an open reservation."""
        slots = self.slots
        if isinstance(slots, int):
            return slots >= 0 and not self.sealed
        return len(slots) - slots.count(NO_SLOT) > self.sealed.bit_count()

    @property
    def detached(self) -> bool:
        """Nothing finds it any more; it lives until its last pin or reservation ends."""
        return not self.hash

    @property
    def evictable(self) -> bool:
        """Nobody needs it now, and it holds something. The eviction policy has exactly these blocks."""
        return not self.pins and self.sealed != 0 and self.hash != b"" and not self.filling

    def slot_of(self, shard: int) -> int:
        slots = self.slots
        return slots if isinstance(slots, int) else slots[shard]

    def set_slot(self, shard: int, slot: int) -> None:
        if isinstance(self.slots, int):
            self.slots = slot
        else:
            self.slots[shard] = slot

    def held_slots(self) -> Sequence[int]:
        """Slots of all shards that have one, sealed or being filled."""
        slots = self.slots
        if isinstance(slots, int):
            return (slots,) if slots >= 0 else ()
        return [slot for slot in slots if slot >= 0]


class BlockIndex:
    """Block hash -> block, as 256 dicts.

    A dict rebuilds itself as a whole when it is full, even if as many entries leave as come: with ten million entries
    that took 5 s in one insertion, and nothing else is served meanwhile. A 256th of it takes 10 ms.
    """

    __slots__ = ("_dicts", "_len")

    def __init__(self) -> None:
        self._dicts: list[dict[bytes, Block]] = [{} for _ in range(256)]
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[Block]:
        """All blocks. The index may change on the way: blocks that leave or come then may or may not be seen."""
        for blocks in self._dicts:
            yield from list(blocks.values())

    def get(self, block_hash: bytes) -> Block | None:
        return self._of(block_hash).get(block_hash)

    def add(self, block: Block) -> None:
        self._of(block.hash)[block.hash] = block
        self._len += 1

    def remove(self, block: Block) -> None:
        del self._of(block.hash)[block.hash]
        self._len -= 1

    def _of(self, block_hash: bytes) -> dict[bytes, Block]:
        # Python's hash, as the engine's bytes need not be spread evenly; not its low bits, which the dict itself uses.
        return self._dicts[hash(block_hash) >> 48 & 255]


@dataclass(slots=True, eq=False)
class Space:
    """The blocks of one namespace and KV cache group. No space ever sees another's blocks."""

    namespace: Namespace
    group: int
    num_shards: int
    policy: EvictionPolicy
    shard_bytes: list[int | None] = field(init=False)
    """Bytes per shard; None until a rank with that shard has attached."""
    slot_sizes: list[int] = field(init=False)
    """Size class per shard; 0 where ``shard_bytes`` is None."""
    all_sealed: int = field(init=False)
    """`Block.sealed` of a readable block."""
    blocks: BlockIndex = field(default_factory=BlockIndex, init=False)
    """Readable or not."""
    users: int = field(default=0, init=False)
    """Ranks that have it open."""
    dropped: bool = field(default=False, init=False)
    """The cache has forgotten it: it had neither users nor blocks."""
    readable: int = field(default=0, init=False)
    """Blocks that a lookup would find."""
    hits: int = field(default=0, init=False)
    misses: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.shard_bytes = [None] * self.num_shards
        self.slot_sizes = [0] * self.num_shards
        self.all_sealed = (1 << self.num_shards) - 1

    @property
    def block_bytes(self) -> int:
        """Bytes of the slots of one readable block."""
        return sum(self.slot_sizes)


@dataclass(slots=True, eq=False)
class Reservation:
    """A slot being filled; ends in exactly one of `BlockCache.seal`, ``abort`` and ``quarantine``."""

    block: Block
    shard: int
    part: int
    """Index of the part in the request."""
    index: int
    """Index of the hash in that part."""
    slot: int = NO_SLOT
    """Byte offset in the pool."""
    open: bool = True

    @property
    def slot_size(self) -> int:
        """Size class of the slot, in bytes."""
        return self.block.space.slot_sizes[self.shard]


@dataclass(slots=True, eq=False)
class StoreGrant:
    """Answer to a store: what to copy, and how many blocks need no copy."""

    reservations: list[Reservation] = field(default_factory=list)
    """In the order of the request."""
    present: int = 0
    """Blocks of which this shard was already sealed."""
    in_flight: int = 0
    """Blocks of which this shard is being filled already, by another store or earlier in this one."""
    chains: list[list[Block]] = field(default_factory=list)
    """Per part the blocks that are reserved here or present, in order: what is used when the store ends."""


@dataclass(slots=True, eq=False)
class LoadGrant:
    """Answer to a load: where the bytes are. Its blocks are pinned until `BlockCache.end_load`."""

    slots: list[list[int]]
    """Per part the byte offsets in the pool, in the order of its hashes."""
    chains: list[list[Block]]
    """Per part its blocks, in order."""
    open: bool = True


@dataclass(slots=True, eq=False)
class Lease:
    """A promise that blocks will not be evicted before ``expires_at`` (seconds on the caller's clock)."""

    id: int
    owner: Hashable
    chains: list[list[Block]]
    """Per part of the lookup the blocks that were readable, in order."""
    expires_at: float

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self.chains))
