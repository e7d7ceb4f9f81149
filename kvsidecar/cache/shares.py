"""Shares: which of them pays for a slot, and how much of the pool each may have.

Each namespace belongs to one share, which pays for all slots of its blocks. A share may borrow whatever others leave,
up to its maximum. Three rules keep a guarantee, whatever is requested in whatever order:

1. A store evicts a block of another share only while that share has more than its guarantee.
2. Bytes that cannot be evicted at once (leased, loaded, being filled) could not be taken back from a borrower. So the
   sum over all shares of the larger of these and the guarantee never exceeds the pool: what would exceed it is refused.
3. Hence a store within its guarantee finds room: it evicts what others have borrowed, then blocks of its own.

The rules count bytes. With blocks of several sizes, blocks in use may occupy slabs that another size needs
(`Refusal.POOL_FRAGMENTED`), as without shares.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, Protocol

from kvsidecar.types import EVICTION_ORDER, UNASSIGNED, Namespace, Priority


@dataclass(frozen=True, slots=True)
class ShareLimits:
    """What one share may have, in bytes of the pool."""

    name: str
    covers: Callable[[Namespace], bool]
    guaranteed: int = 0
    most: int | None = None
    """None: the whole pool."""
    ttl: float | None = None
    """Seconds after which a block that is stored from now on expires; None: never."""
    idle_ttl: float | None = None
    """Seconds after its last use, after which a block expires; None: never."""
    weight: int = 1
    """How many turns each of its engines gets on the link."""


Age = tuple[int, int]
"""Two ticks of a block: its rank (`kvsidecar.cache.eviction_rhythm`), and its last use. With LRU both are the same. Of
two blocks the one with the lower age goes first."""
NO_AGE: Age = (-1, -1)
"""Not later than that of any block."""
MATCHES = 256
"""Comparisons of a namespace with a share in one step: a millisecond."""


class PayingSpace(Protocol):
    """What a share knows about a space."""

    namespace: Namespace
    share: Share

    @property
    def tables(self) -> Sequence[Table]: ...


class Table(Protocol):
    """What a share knows about a table of blocks."""

    number: int
    used_bytes: int
    evictable_bytes: int

    @property
    def space(self) -> PayingSpace: ...
    @property
    def priorities(self) -> Sequence[Priority]: ...
    @property
    def reorders(self) -> bool: ...
    def oldest_use(self, priority: Priority = ..., *, by_use: bool = ...) -> Age | None: ...


class TableOrder:
    """The tables of a share that have evictable blocks of one priority, by the oldest of these.

    A heap whose ages are put right when they are looked at: without a use, the oldest block of a table only ever gets
    younger. So a use of a block costs nothing here, and an eviction looks at as many tables as it takes blocks from,
    and one more.

    Args:
        by_use: the oldest block is the one that was used least recently. Otherwise it is the one to go first.
    """

    def __init__(self, priority: Priority = Priority.NORMAL, *, by_use: bool = False) -> None:
        self.priority = priority
        self._by_use = by_use
        self._heap: list[tuple[Age, int, Priority, Any]] = []
        """Entries of an age not later than that of the table's oldest block, its number, the priority, the table. An
        entry counts only if its age is in `_listed`."""
        self._listed: dict[int, Age] = {}
        """Number of a table -> the age."""

    def add(self, blocks: Table, age: Age | None = None) -> None:
        """Add a table with evictable blocks.

        Args:
            age: not later than that of the oldest new block; None: no new block is older than the others.
        """
        listed = self._listed.get(blocks.number)
        if listed is None:
            self._push((NO_AGE, blocks.number, self.priority, blocks))
        elif age is not None and age < listed:
            self._push((age, blocks.number, self.priority, blocks))

    def look_again(self) -> None:
        """Note that the oldest blocks of a table may be older than before."""
        self._heap = [(NO_AGE, *entry[1:]) for entry in self._heap if self._listed.get(entry[1]) == entry[0]]
        heapify(self._heap)
        self._listed = dict.fromkeys(self._listed, NO_AGE)

    def remove(self, blocks: Table) -> None:
        """A table is of another share from now on."""
        self._listed.pop(blocks.number, None)

    def _push(self, entry: tuple[Age, int, Priority, Any]) -> None:
        self._listed[entry[1]] = entry[0]
        heappush(self._heap, entry)

    def __bool__(self) -> bool:
        """Whether there may be any."""
        return bool(self._heap)

    def oldest_first(self) -> Generator[tuple[Age, int, Priority, Any]]:
        """Age of the oldest block, number, priority, table. Nothing may change until the iterator is closed."""
        heap = self._heap
        seen: dict[int, tuple[Age, int, Priority, Any]] = {}
        try:
            while heap:
                age, number, priority, blocks = heap[0]
                if number in seen or self._listed.get(number) != age:
                    heappop(heap)
                    continue
                oldest = blocks.oldest_use(priority, by_use=self._by_use)
                if oldest is None:
                    heappop(heap)
                    del self._listed[number]
                    continue
                if oldest > age:
                    entry = (oldest, number, priority, blocks)
                    heapreplace(heap, entry)
                    self._listed[number] = oldest
                    if heap[0] is not entry:
                        continue
                seen[number] = heappop(heap)
                yield seen[number]
        finally:
            for entry in seen.values():
                heappush(heap, entry)


def _orders(*, by_use: bool) -> dict[Priority, TableOrder]:
    return {priority: TableOrder(priority, by_use=by_use) for priority in EVICTION_ORDER}


@dataclass(slots=True, eq=False)
class Share:
    """The bytes of the slots of one share."""

    name: str = UNASSIGNED
    guaranteed: int = 0
    most: int | None = None
    used: int = 0
    """Bytes of its slots, except those that a clear has left to be swept."""
    evictable: int = 0
    """Part of ``used`` that could be evicted now."""
    evicted: int = 0
    """Bytes of its blocks that were evicted."""
    ttl: float | None = None
    idle_ttl: float | None = None
    weight: int = 1
    spared: int = 0
    """The part of ``used`` that the stores of others leave it: its guarantee."""
    retired: bool = False
    """Another share takes its place: see `Shares.move`."""
    idle_tick: int = 0
    """Blocks that were last used at this tick or before have expired."""
    orders: dict[Priority, TableOrder] = field(default_factory=lambda: _orders(by_use=False))
    """Tables of each priority in the order in which their blocks go."""
    by_use: dict[Priority, TableOrder] = field(default_factory=lambda: _orders(by_use=True))
    """Tables of each priority by the last use of their blocks, where `orders` has another order."""

    def __post_init__(self) -> None:
        self.spared = self.guaranteed

    def retire(self) -> None:
        """Let others take its place. Until they pay for its tables it has no limits, and gives away as little as
        before."""
        self.guaranteed, self.most, self.retired = 0, None, True

    def add(self, blocks: Table, priority: Priority, age: Age | None = None) -> None:
        """Add a table of this share with evictable blocks, see `TableOrder.add`."""
        self.orders[priority].add(blocks, age)
        if blocks.reorders:
            self.by_use[priority].add(blocks)

    def leave(self, blocks: Table) -> None:
        """A table is of another share from now on."""
        for order in (*self.orders.values(), *self.by_use.values()):
            order.remove(blocks)

    @property
    def used_orders(self) -> Iterator[TableOrder]:
        """The tables of each priority by the last use of their blocks."""
        return (each if each else self.orders[priority] for priority, each in self.by_use.items())

    @property
    def busy(self) -> int:
        return self.used - self.evictable

    @property
    def ranked(self) -> bool:
        """True if it has blocks whose priority is not normal."""
        return bool(self.orders[Priority.LOW] or self.orders[Priority.HIGH])

    @property
    def over(self) -> int:
        """Bytes beyond its maximum, after a reload has lowered it."""
        return 0 if self.most is None else max(0, self.used - self.most)


class Shares:
    """All shares of a pool.

    Args:
        limits: the first that covers a namespace is its share. Their guarantees must fit the pool together.
    """

    def __init__(self, limits: Sequence[ShareLimits] = ()) -> None:
        self._covers = [
            (
                each.covers,
                Share(each.name, each.guaranteed, each.most, ttl=each.ttl, idle_ttl=each.idle_ttl, weight=each.weight),
            )
            for each in limits
        ]
        self._others = Share()
        self._retired: list[Share] = []
        """Shares of before, while they still pay for any table."""
        self._to_move: Iterator[Table] = iter(())
        """Tables, some of which retired shares still pay for."""
        self.idling = [share for _, share in self._covers if share.idle_ttl]
        """Shares whose blocks expire when nobody uses them."""
        self.committed = sum([each.guaranteed for each in limits])
        """Sum over all shares of the larger of its guarantee and its bytes that cannot be evicted now."""
        self.limited = bool(limits)
        """True if there are limits. Without any, nothing is refused or spared for the sake of a share."""

    def __iter__(self) -> Iterator[Share]:
        """All shares that pay for anything."""
        yield from self.current
        yield from self._retired

    @property
    def current(self) -> list[Share]:
        """The shares of the limits, in their order, and the one of all other namespaces."""
        return [*(share for _, share in self._covers), self._others]

    def of(self, namespace: Namespace) -> Share:
        """The share that pays for this namespace."""
        return next((share for covers, share in self._covers if covers(namespace)), self._others)

    def change(self, blocks: Table, used: int, evictable: int) -> None:
        """Account for slots of this table, by the change of the bytes that it uses, and that could be evicted."""
        if evictable > 0 and not blocks.evictable_bytes:
            blocks.space.share.add(blocks, Priority.NORMAL)
        blocks.used_bytes += used
        blocks.evictable_bytes += evictable
        share = blocks.space.share
        if self.limited:
            self._change(share, used, evictable)
        else:
            share.used += used
            share.evictable += evictable

    def follow(self, others: Shares, tables: Sequence[Table]) -> None:
        """Take the place of these shares, which pay for these tables until `move` has come to them."""
        self._retired = [*others._retired, *others.current]
        for share in self._retired:
            share.retire()
        self.committed += sum([share.busy for share in self._retired])
        self._to_move = iter(tables)
        named = {share.name: share for share in self._retired}
        for share in self.current:
            if (before := named.get(share.name)) is not None:
                share.evicted = before.evicted
                if share.idle_ttl:
                    share.idle_tick = before.idle_tick

    def adopt(self, tables: Iterable[Table]) -> None:
        """Make the shares pay for these tables, for which none has paid yet."""
        for blocks in tables:
            blocks.space.share = share = self.of(blocks.space.namespace)
            share.used += blocks.used_bytes
            share.evictable += blocks.evictable_bytes
            for priority in blocks.priorities:
                share.add(blocks, priority)

    def move(self, _: int = 0) -> bool:
        """Make the current shares pay for some spaces that retired ones still pay for. False if there are none."""
        if not self._retired:
            return False
        matches = MATCHES
        for blocks in self._to_move:
            if blocks.space.share.retired:
                self._move_space(blocks.space)
                matches -= len(self._covers) + 1
                if matches <= 0:
                    return True
        self._retired = []
        return True

    def _move_space(self, space: PayingSpace) -> None:
        """Make the current share pay for all tables of this space."""
        before, share = space.share, self.of(space.namespace)
        if before is share:
            return
        for blocks in space.tables:
            before.leave(blocks)
            if self.limited:
                self._change(before, -blocks.used_bytes, -blocks.evictable_bytes)
                self._change(share, blocks.used_bytes, blocks.evictable_bytes)
            else:
                for each, sign in ((before, -1), (share, 1)):
                    each.used += sign * blocks.used_bytes
                    each.evictable += sign * blocks.evictable_bytes
        space.share = share
        for blocks in space.tables:
            if blocks.evictable_bytes:
                for priority in blocks.priorities:
                    share.add(blocks, priority)

    def busy_room(self, share: Share, capacity: int) -> int:
        """Bytes that this share may still reference or fill without taking what is guaranteed to others.

        Args:
            capacity: bytes of the pool that slots can use.
        """
        return max(0, share.guaranteed - share.busy) + max(0, capacity - self.committed)

    def _change(self, share: Share, used: int, evictable: int) -> None:
        beyond = share.used - share.evictable - share.guaranteed
        share.used += used
        share.evictable += evictable
        after = beyond + used - evictable
        if beyond > 0:
            self.committed -= beyond
        if after > 0:
            self.committed += after


class Budget:
    """How many bytes of each share one request may evict.

    Args:
        incoming: bytes that the request adds to its shares.
        own: evict as much of these shares as is needed. Otherwise, as of others, only what is beyond the guarantee: a
            share that has borrowed nothing grows at the cost of those that have.
    """

    def __init__(self, incoming: Mapping[Share, int], *, own: bool = False) -> None:
        self._incoming = incoming
        self._own = own
        self._taken: dict[Share, int] = {}

    def left(self, share: Share) -> int:
        incoming = self._incoming.get(share, 0)
        allowed = share.used if self._own and incoming else share.used + incoming - share.spared
        return max(0, allowed - self._taken.get(share, 0))

    def without(self, taken: Iterable[tuple[Share, int]]) -> Budget:
        """The budget that is left when these bytes are evicted as well."""
        rest = Budget(self._incoming, own=self._own)
        rest._taken = dict(self._taken)
        for share, nbytes in taken:
            rest.take(share, nbytes)
        return rest

    def take(self, share: Share, nbytes: int) -> None:
        """Count these bytes as evicted; a negative number takes that back."""
        self._taken[share] = self._taken.get(share, 0) + nbytes
