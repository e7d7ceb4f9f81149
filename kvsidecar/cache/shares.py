"""Shares: who pays for a slot, and how much of the pool each of them may have.

Each namespace belongs to one share, which pays for all slots of its blocks. A share may borrow whatever others leave,
up to its maximum. Three rules keep a guarantee, whatever is requested in whatever order:

1. A store evicts a block of another share only while that share has more than its guarantee.
2. Bytes that cannot be evicted at once (leased, loaded, being filled) could not be taken back from a borrower. So the
   sum over all shares of the larger of these and the guarantee never exceeds the pool: a pin that would is refused.
3. Hence a store within its guarantee finds room: it evicts what others have borrowed, then blocks of its own.

The rules count bytes. With blocks of several sizes, pinned blocks may occupy slabs that another size needs
(`Refusal.POOL_FRAGMENTED`), as without shares.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
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
    """Of the turns of each of its engines on the link."""


class PayingSpace(Protocol):
    """What a share knows of a space."""

    namespace: Namespace
    share: Share


class Table(Protocol):
    """What a share knows of a table of blocks."""

    number: int
    used_bytes: int
    evictable_bytes: int

    @property
    def space(self) -> PayingSpace: ...
    @property
    def priorities(self) -> Sequence[Priority]: ...
    def oldest_use(self, priority: Priority = ...) -> int | None: ...


class TableOrder:
    """The tables of a share that have evictable blocks of one priority, by the last use of the oldest of these.

    A heap whose ticks are put right when they are looked at: the oldest block of a table only ever gets younger. So a
    use of a block costs nothing here, and an eviction looks at as many tables as it takes blocks from, and one more.
    """

    def __init__(self, priority: Priority = Priority.NORMAL) -> None:
        self.priority = priority
        self._heap: list[tuple[int, int, Priority, Any]] = []
        """Tick that is not later than the last use of the table's oldest block, its number, the priority, table."""
        self._listed: set[int] = set()

    def add(self, blocks: Table) -> None:
        if blocks.number not in self._listed:
            self._listed.add(blocks.number)
            heappush(self._heap, (0, blocks.number, self.priority, blocks))

    def __bool__(self) -> bool:
        """Whether there may be any."""
        return bool(self._heap)

    def oldest_first(self) -> Generator[tuple[int, int, Priority, Any]]:
        """Tick of the oldest block, number, priority, table. Nothing may change until the iterator is closed."""
        heap = self._heap
        seen: list[tuple[int, int, Priority, Any]] = []
        try:
            while heap:
                tick, number, priority, blocks = heap[0]
                oldest = blocks.oldest_use(priority)
                if oldest is None:
                    heappop(heap)
                    self._listed.discard(number)
                elif oldest > tick:
                    heapreplace(heap, (oldest, number, priority, blocks))
                else:
                    seen.append(heappop(heap))
                    yield seen[-1]
        finally:
            for entry in seen:
                heappush(heap, entry)


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
    idle_tick: int = 0
    """Blocks that were last used at this tick or before have expired."""
    orders: dict[Priority, TableOrder] = field(
        default_factory=lambda: {priority: TableOrder(priority) for priority in EVICTION_ORDER}
    )
    """In the order in which blocks go."""

    @property
    def busy(self) -> int:
        return self.used - self.evictable

    @property
    def ranked(self) -> bool:
        """Whether it has blocks whose priority is not normal."""
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
        self.idling = [share for _, share in self._covers if share.idle_ttl]
        """Those whose blocks expire when nobody uses them."""
        self.committed = sum([each.guaranteed for each in limits])
        """Sum over all shares of the larger of its guarantee and its bytes that cannot be evicted now."""
        self.limited = bool(limits)
        """Whether there are limits. Without any, nothing is refused or spared for the sake of a share, and what a
        share has is not counted."""

    def __iter__(self) -> Iterator[Share]:
        yield from (share for _, share in self._covers)
        yield self._others

    def of(self, namespace: Namespace) -> Share:
        """The share that pays for this namespace."""
        return next((share for covers, share in self._covers if covers(namespace)), self._others)

    def change(self, blocks: Table, used: int, evictable: int) -> None:
        """Account for slots of this table, by the change of the bytes that it uses, and that could be evicted."""
        if evictable > 0 and not blocks.evictable_bytes:
            blocks.space.share.orders[Priority.NORMAL].add(blocks)
        blocks.used_bytes += used
        blocks.evictable_bytes += evictable
        if self.limited:
            self._change(blocks.space.share, used, evictable)

    def move(self, tables: Iterable[Table]) -> None:
        """Have the shares pay that cover the spaces of these tables. They have not paid for anything yet."""
        for blocks in tables:
            blocks.space.share = share = self.of(blocks.space.namespace)
            if self.limited:
                self._change(share, blocks.used_bytes, blocks.evictable_bytes)
            if blocks.evictable_bytes:
                for priority in blocks.priorities:
                    share.orders[priority].add(blocks)

    def pin_room(self, share: Share, capacity: int) -> int:
        """Bytes that this share may still pin or fill without taking what is guaranteed to others.

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
        allowed = share.used if self._own and incoming else share.used + incoming - share.guaranteed
        return max(0, allowed - self._taken.get(share, 0))

    def without(self, taken: Iterable[tuple[Share, int]]) -> Budget:
        """What is left when these bytes are evicted as well."""
        rest = Budget(self._incoming, own=self._own)
        rest._taken = dict(self._taken)
        for share, nbytes in taken:
            rest.take(share, nbytes)
        return rest

    def take(self, share: Share, nbytes: int) -> None:
        """Evict these bytes, or with a negative number do not."""
        self._taken[share] = self._taken.get(share, 0) + nbytes
