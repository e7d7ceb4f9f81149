"""The blocks of one space: their columns, and the order in which they may be evicted; and the space itself."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvsidecar.cache import kernels
from kvsidecar.cache.arrays import NO_INTS, Bools, Bytes, Ints, extended, only_value
from kvsidecar.cache.block_index import BlockIndex, Keys
from kvsidecar.cache.eviction_lru import LRUQueues
from kvsidecar.cache.eviction_rhythm import CLASS_OF, FIRST_GAP, NEVER, Rhythm, class_of, in_order
from kvsidecar.cache.shares import Age, Share
from kvsidecar.cache.slots import size_class
from kvsidecar.errors import NamespaceMismatch
from kvsidecar.types import EVICTION_ORDER, Namespace, Priority

NO_SLOT = -1
"""This shard is not stored."""
FILLING = -2
"""A store has a slot reserved for this shard."""
FIRST_ROWS = 4
"""Rows of a table with its first block."""
COPIED_ROWS = 65536
"""A table that grows beyond this gets all rows it may ever need: copying this many takes a few milliseconds."""
SLOTS_BYTES = 1 << 32
"""Most address space that a table reserves for the slots of all its rows, unless its blocks need more."""
PRIORITY_BITS = 2
"""Low bits of a queue's number that hold the priority; the others are the class of its blocks' gaps."""
PRIORITY_MASK = (1 << PRIORITY_BITS) - 1
SPARSE = 8
"""A table with more than this many rows per block is rebuilt, if it has at most `REBUILT` blocks."""
REBUILT = 4096
"""To rebuild a table with so many takes two or three milliseconds."""

COLUMNS = (
    "slots",
    "missing",
    "refs",
    "evictable",
    "last_used",
    "expires",
    "idle",
    "priority",
    "gaps",
    "marks",
    "detached",
    "superseded",
    "tiers",
    "_freed_rows",
)
MISMATCH_HINT = (
    "Instances whose KV differs in layout or type must differ in kv_layout or dtype of the namespace; if the blocks of "
    "the other kind are not wanted any more, clear the namespace"
)


class SpaceBlocks:
    """The blocks of one space, stored as columns: a block is the same row in each of them.

    There may be ten million blocks, so a block is not a Python object. It takes about 100 bytes (docs/benchmarks.md),
    the garbage collector never visits it, and one array operation changes all blocks of a request. The table grows
    with its blocks and frees all of its memory with the last one.

    Args:
        number: identifies this table in its cache; see `owners`.
        capacity: expected number of blocks; more are possible.
        rhythm: the eviction policy; None: least recently used first.
    """

    __slots__ = (  # a client may make very many tables with a block each
        *COLUMNS,
        *("_num_freed", "_oldest", "_ranked", "_seed", "capacity", "cleared", "dropped", "evictable_bytes", "idling"),
        *("index", "next_expiry", "num_superseded", "number", "queues", "readable", "rebuilds", "rhythm", "rows_used"),
        *("salt", "space", "swept", "used_bytes"),
    )

    def __init__(self, space: Space, number: int, capacity: int, seed: int, rhythm: Rhythm | None = None) -> None:
        self.space, self.number, self.capacity, self._seed, self.rhythm = space, number, capacity, seed, rhythm
        self.salt = number * 0x9E3779B1 & 0xFFFFFFFF
        """Makes what `kvsidecar.cache.prompts` knows of one hash differ between tables."""
        self.cleared = False
        """Whether all blocks are detached. `BlockTable.sweep` frees those without a reference."""
        self.swept = 0
        """Number of rows that the sweep has visited."""
        self.readable = 0
        """Number of blocks that a lookup would find."""
        self.used_bytes = self.evictable_bytes = 0
        """Part of `Share.used` and ``evictable`` of its space's share."""
        self.dropped: list[object] = []
        """Columns that are used no more. To free those of a million rows at once takes milliseconds."""
        self.rebuilds = 0
        """How often its rows were renumbered."""
        self.next_expiry = 0
        """Not later than the first of its blocks expires; 0 if none does."""
        self._start_empty()

    def _start_empty(self) -> None:
        # One row though there is no block: a lookup of many hashes also reads the columns at row -1.
        self.queues = LRUQueues(1)
        """The evictable blocks, by priority and, with a rhythm, class of their gaps."""
        self._oldest: dict[int, int] = {}
        """With a rhythm, of each queue that may have blocks, a tick that is not later than the last use of any."""
        self._ranked = False
        """Whether a block had another priority than normal: until then priorities cost nothing."""
        self.index = BlockIndex(self.space.namespace.hash_bytes, 1, self._seed)
        """The blocks that can be found, readable or not."""
        self.slots = np.zeros((self.space.num_shards, 1), np.int64)
        """Per shard the slot of its sealed bytes, `NO_SLOT` or `FILLING`."""
        self.missing = np.zeros(1, np.int32)
        """Number of shards that are not sealed. A block is readable when none is missing."""
        self.refs = np.zeros(1, np.int32)
        """Number of leases, running loads and open reservations."""
        self.evictable = np.zeros(1, np.bool_)
        """Whether the block has a sealed shard and no reference. The eviction policy has exactly these blocks."""
        self.last_used = np.zeros(1, np.int64)
        """Tick of the last use that has ended. The eviction policy has its blocks in this order."""
        self.expires = np.zeros(1, np.uint32)
        """Second from which on it is a miss; 0: never."""
        self.idle = np.zeros(1, np.uint32)
        """Seconds without a use after which it is a miss; 0: no such time but its share's."""
        self.idling = False
        """Whether any block has such a time: until then they cost nothing."""
        self.priority = np.zeros(1, np.uint8)
        """`Priority`, from the store that created the block."""
        self.gaps = np.zeros(1, np.uint8)
        """Usual time between its uses, as `kvsidecar.cache.eviction_rhythm` has it; 0 without a rhythm."""
        self.marks = np.zeros(1, np.uint8)
        """Scratch space of `kvsidecar.cache.victims`; 0 outside of it."""
        self.detached = np.zeros(1, np.bool_)
        """Whether the block has left the index. It exists until its last reference ends."""
        self.superseded = np.zeros(1, np.bool_)
        """Whether the block was detached because it was stored again when it had expired; leased loads find it."""
        self.num_superseded = 0
        self.tiers = np.zeros(1, np.uint8)
        """One bit per slower tier: whether it has the block, or is being given it."""
        self._freed_rows = np.zeros(1, np.int64)
        self._num_freed = 0
        self.rows_used = 0
        """First row that has never been used."""

    def __len__(self) -> int:
        """Number of blocks, in the index or detached."""
        return self.rows_used - self._num_freed

    def create(self, keys: Keys) -> Ints:
        """Add blocks without slots to the index. Returns their rows."""
        recycled = min(len(keys), self._num_freed)
        fresh = len(keys) - recycled
        if self.rows_used + fresh > len(self.refs):
            self._lengthen(self.rows_used + fresh)
        self._num_freed -= recycled
        rows = np.arange(self.rows_used - recycled, self.rows_used + fresh)
        if recycled:
            rows[:recycled] = self._freed_rows[self._num_freed : self._num_freed + recycled]
            rows[:recycled].sort()
        self.rows_used += fresh
        self.slots[:, rows] = NO_SLOT
        self.missing[rows] = self.space.num_shards
        self.tiers[rows] = 0
        self.expires[rows] = 0
        if self.idling:
            self.idle[rows] = 0
        if self._ranked:
            self.priority[rows] = Priority.NORMAL
        if self.rhythm is not None:
            self.gaps[rows] = FIRST_GAP
        self.index.add(keys, rows)
        return rows

    def set_priority(self, rows: Ints, priority: Priority | Bytes) -> None:
        """Set the priorities of blocks that are not evictable yet."""
        self._ranked = self._ranked or bool(np.any(priority))
        self.priority[rows] = priority

    @property
    def priorities(self) -> Sequence[Priority]:
        """The priorities that its blocks may have."""
        return EVICTION_ORDER if self._ranked else (Priority.NORMAL,)

    def priorities_of(self, rows: Ints) -> Bytes | None:
        """The priorities of these blocks; None: all are normal."""
        return self.priority[rows] if self._ranked else None

    def insert(self, rows: Ints) -> None:
        """Add blocks to the eviction order, as `LRUQueues.insert`."""
        if not self._ranked:
            self._insert(rows, Priority.NORMAL)
            return
        priorities = self.priority[rows]
        for priority in EVICTION_ORDER:
            mine = rows[priorities == priority]
            if len(mine):
                self._insert(mine, priority)
                self.space.share.add(self, priority)

    def _insert(self, rows: Ints, priority: Priority) -> None:
        if self.rhythm is None:
            self.queues.insert(rows, priority)
            return
        if not len(rows):
            return
        gap = only_value(self.gaps[rows])
        if gap is not None:  # as nearly always
            self._insert_class(rows, CLASS_OF[gap] << PRIORITY_BITS | priority)
            return
        classes = class_of(self.gaps[rows])
        for number in np.unique(classes).tolist():
            self._insert_class(rows[classes == number], number << PRIORITY_BITS | priority)

    def _insert_class(self, rows: Ints, queue: int) -> None:
        self.queues.insert(rows, queue)
        if queue not in self._oldest:  # else none of these goes before the oldest one there
            row = rows.item(0)
            used = self._oldest[queue] = self.last_used.item(row)
            self.space.share.orders[Priority(queue & PRIORITY_MASK)].add(self, (self.rank(row), used))

    def remove(self, rows: Ints) -> None:
        """Remove blocks from the eviction order."""
        self.queues.remove(rows)

    def candidates(self, priority: Priority = Priority.NORMAL, *, by_use: bool = False) -> Iterator[Ints]:
        """The evictable blocks of one priority in the order in which they go, in pieces.

        Args:
            by_use: least recently used first, whatever the policy.
        """
        if self.rhythm is None:
            return self.queues.candidates(priority)
        horizons = self.rhythm.horizons.tolist()
        streams = [
            (
                self._class(queue),
                NEVER if by_use else horizons[queue >> PRIORITY_BITS],
                queue >> PRIORITY_BITS,
                oldest,
            )
            for queue, oldest in self._oldest.items()
            if queue & PRIORITY_MASK == priority
        ]
        return in_order(streams, self.last_used) if len(streams) > 1 else (streams[0][0] if streams else iter(()))

    def _class(self, queue: int) -> Iterator[Ints]:
        """The blocks of one queue, least recently used first, in pieces."""
        none_yet = True
        for rows in self.queues.candidates(queue):
            if none_yet:
                none_yet, self._oldest[queue] = False, self.last_used.item(rows.item(0))
            yield rows
        if none_yet:
            self._oldest.pop(queue, None)

    def ranks(self, rows: Ints) -> Ints:
        """The ticks by which these blocks go, the lowest first: those of their last uses, if not the policy's."""
        used: Ints = self.last_used[rows]
        return used if self.rhythm is None else self.rhythm.ranks(self.gaps[rows], used)

    def no_younger(self, rows: Ints, age: Age) -> Bools:
        """For each of these blocks, whether it is as old as this age or older."""
        rank, last_used = age
        used = self.last_used[rows]
        if self.rhythm is None:
            older: Bools = used <= min(rank, last_used)
        else:
            ranks = self.rhythm.ranks(self.gaps[rows], used)
            older = (ranks < rank) | ((ranks == rank) & (used <= last_used))
        return older

    def recycle(self, rows: Ints) -> None:
        """Make the rows of deleted blocks available again."""
        self.evictable[rows] = False
        self.detached[rows] = False
        self.forget_old(rows)
        self._freed_rows[self._num_freed : self._num_freed + len(rows)] = rows
        self._num_freed += len(rows)

    def supersede(self, rows: Ints) -> None:
        """These detached blocks had expired when they were stored again."""
        self.superseded[rows] = True
        self.num_superseded += len(rows)

    def forget_old(self, rows: Ints) -> None:
        """No lease finds these detached blocks any more."""
        if self.num_superseded:
            self.num_superseded -= int(np.count_nonzero(self.superseded[rows]))
            self.superseded[rows] = False

    def free_memory(self) -> None:
        """Free the memory of a table without blocks; of a large one it is `dropped`."""
        if self.rows_used:
            self.rows_used = self._num_freed = 0
            if len(self.refs) > COPIED_ROWS:
                self.dropped += [*(getattr(self, name) for name in COLUMNS), self.queues, self.index]
            self._start_empty()

    @property
    def busy(self) -> bool:
        """Whether a lease, a load, a store or a copy to a tier has any of its blocks."""
        return self.used_bytes > self.evictable_bytes

    @property
    def expiring(self) -> bool:
        """Whether any of its blocks may have expired."""
        return bool(self.next_expiry or self.space.share.idle_tick)

    @property
    def sparse(self) -> bool:
        """Whether the table has many more rows than blocks, and few enough blocks that `rebuild` is quick."""
        return REBUILT >= len(self) <= self.rows_used // SPARSE - FIRST_ROWS

    def rebuild(self) -> tuple[Ints, Ints] | None:
        """Shrink the table to the rows that its blocks need. It renumbers rows: call it between requests only.

        Returns:
            The slots of the blocks and their new owners; None, with nothing changed, if a block has a reference.
        """
        rows = np.concatenate((NO_INTS, *(piece for each in self.priorities for piece in self.candidates(each))))
        if len(rows) < len(self):
            return None
        names = ("slots", "missing", "last_used", "tiers", "expires", "gaps")
        kept = {name: getattr(self, name)[..., rows] for name in names}
        priority, idle, idling = self.priority[rows], self.idle[rows], self.idling
        keys = self.index.keys_of(rows)
        self.rebuilds += 1
        self.free_memory()
        new = self.create(keys)
        for name, values in kept.items():
            getattr(self, name)[..., new] = values
        self.idling = idling
        self.idle[new] = idle
        self.set_priority(new, priority)
        self.evictable[new] = True
        self.insert(new)
        held = kept["slots"] >= 0
        return kept["slots"][held], np.broadcast_to(self.owners(new), held.shape)[held]

    def _lengthen(self, rows: int) -> None:
        """Make room for ``rows`` rows. Copies the columns."""
        length = max(rows, FIRST_ROWS, 4 * len(self.refs))
        if length > COPIED_ROWS:
            length = max(2 * rows, min(self.capacity, SLOTS_BYTES // self.slots.itemsize // self.space.num_shards))
        for name in COLUMNS:
            column = getattr(self, name)
            # With many shards, a huge page for each would be mostly empty.
            setattr(self, name, extended(column, length, huge=column.ndim == 1 or len(column) == 1))
        self.index.reserve(length)
        self.queues.reserve(length)

    def add_refs(self, rows: Ints) -> Ints:
        """Add one reference to each of these blocks. Returns those that were evictable, which they are no more."""
        idle = np.empty(len(rows), np.int64)
        return idle[: kernels.add_refs(self.refs, self.evictable, rows, idle)]

    def drop_refs(self, rows: Ints) -> tuple[Ints, bool]:
        """Drop one reference to each of these blocks. Returns the blocks that have none left, the last first, and
        whether each of them is in the index and has a sealed shard."""
        idle = np.empty(len(rows), np.int64)
        count, going = kernels.drop_refs(self.refs, self.detached, self.missing, self.space.num_shards, rows, idle)
        return idle[:count], not going

    def sealed_slots(self, rows: Ints) -> Ints:
        """The slots of the sealed shards of these blocks."""
        shards = self.space.num_shards
        sealed = np.empty(len(rows) * shards, np.int64)
        return sealed[: kernels.sealed_slots(self.slots, shards, rows, sealed)]

    def oldest_use(self, priority: Priority = Priority.NORMAL, *, by_use: bool = False) -> Age | None:
        """Age of the block of this priority that would be evicted first; None if none can be.

        Args:
            by_use: last use of the block that was used least recently.
        """
        if not self.evictable_bytes:
            return None
        oldest = next(self.candidates(priority, by_use=by_use), NO_INTS)[:1]
        if not len(oldest):
            return None
        row = oldest.item(0)
        used = self.last_used.item(row)
        return (used if by_use else self.rank(row), used)

    def rank(self, row: int) -> int:
        """`ranks` of one block."""
        used = self.last_used.item(row)
        return used if self.rhythm is None else self.rhythm.rank(self.gaps.item(row), used)

    @property
    def reorders(self) -> bool:
        """Whether a block that is used may go before others that were used earlier."""
        return self.rhythm is not None

    def bytes_of_each(self, rows: Ints) -> Ints:
        """Bytes of the sealed slots of each of these blocks."""
        sizes = self.space.slot_sizes
        if len(sizes) == 1:
            return np.full(len(rows), sizes[0])
        nbytes: Ints = (self.slots[:, rows] >= 0).T @ np.array(sizes)
        return nbytes

    def bytes_of(self, rows: Ints) -> int:
        """Bytes of the sealed slots of these blocks."""
        sizes = self.space.slot_sizes
        return len(rows) * sizes[0] if len(sizes) == 1 else int(self.bytes_of_each(rows).sum())

    def readable_hashes(self, first: int, end: int) -> bytes:
        """The hashes of the readable blocks in rows ``first`` to ``end``, joined."""
        rows = slice(first, min(end, self.rows_used))
        # Rows of deleted blocks are not evictable and have no references; their other columns are what they were.
        there = self.evictable[rows] | (self.refs[rows] > 0)
        there &= (self.missing[rows] == 0) & ~self.detached[rows]
        return self.index.hashes_of(there.nonzero()[0] + first)

    def owners(self, rows: Ints) -> Ints:
        """The numbers that identify these blocks in the allocator."""
        return rows | self.number << 32


@dataclass(slots=True, eq=False)
class Space:
    """One namespace and KV cache group. A space never sees the blocks of another."""

    namespace: Namespace
    group: int
    num_shards: int
    blocks: SpaceBlocks = field(init=False)
    """The current table. A clear replaces it by an empty one."""
    shard_bytes: list[int | None] = field(init=False)
    """Bytes per shard; None until a rank with that shard has attached."""
    slot_sizes: list[int] = field(init=False)
    """Size class per shard; 0 where ``shard_bytes`` is None."""
    users: int = field(default=0, init=False)
    """Number of ranks that have it open."""
    user: Hashable = field(default=None, init=False)
    """Whose rank opened it last; None: it is not known, or nobody's."""
    left_by: tuple[Hashable, str] | None = field(default=None, init=False)
    """Where `kvsidecar.cache.left_spaces` counts it."""
    dropped: bool = field(default=False, init=False)
    """Whether the cache has removed it, because it had neither users nor blocks."""
    hits: int = field(default=0, init=False)
    misses: int = field(default=0, init=False)
    needed_tokens: int = field(default=0, init=False)
    """Tokens that engines did not have themselves, as they report (`kvsidecar.core.lookups.LookupService.report`). A
    namespace counts them in one of its spaces."""
    loaded_tokens: int = field(default=0, init=False)
    tables: list[SpaceBlocks] = field(default_factory=list, init=False)
    """The current table, and cleared ones of which something is in use or is to be swept."""
    share: Share = field(default_factory=Share, init=False)
    """Pays for its slots."""
    one_size: int = field(default=0, init=False)
    """The size class of all shards; 0 if they differ."""

    def __post_init__(self) -> None:
        self.shard_bytes = [None] * self.num_shards
        self.slot_sizes = [0] * self.num_shards

    def register_shard(self, num_shards: int, shard: int, nbytes: int) -> bool:
        """A rank says this of the shards: all must say the same, or it is refused with NamespaceMismatch. Returns
        whether this shard was not known before."""
        if self.num_shards != num_shards:
            raise NamespaceMismatch(
                f"group {self.group}: this rank says a block has {num_shards} shards, but in this namespace "
                f"{self.num_shards} are registered. {MISMATCH_HINT}"
            )
        known = self.shard_bytes[shard]
        if known not in (None, nbytes):
            raise NamespaceMismatch(
                f"group {self.group}: this rank says shard {shard} has {nbytes} bytes per block, but in this "
                f"namespace {known} are registered. {MISMATCH_HINT}"
            )
        self.set_shard(shard, nbytes)
        return known is None

    def set_shard(self, shard: int, nbytes: int) -> None:
        self.shard_bytes[shard] = nbytes
        self.slot_sizes[shard] = size_class(nbytes)
        sizes = set(self.slot_sizes) - {0}
        self.one_size = sizes.pop() if len(sizes) == 1 else 0

    @property
    def block_bytes(self) -> int:
        """Bytes of all slots of a readable block."""
        return sum(self.slot_sizes)
