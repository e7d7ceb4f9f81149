"""Eviction that only chooses (as in Ray's plasma store): a policy orders blocks, `choose_victims` plans, and the
cache does it. Nothing here frees a slot."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from heapq import heapify, heappop, heapreplace
from typing import Generic, Protocol, TypeVar

from kvsidecar.cache.block import Block, Space
from kvsidecar.cache.slots import Slab, SlotAllocator

Item = TypeVar("Item")


class EvictionPolicy(Protocol):
    """The order in which one space gives up its blocks. It has exactly the blocks that are evictable right now."""

    def insert(self, block: Block) -> None:
        """The block has become evictable, just used at ``block.last_used``. These ticks never go back.

        Blocks of one request come with the same tick and the deepest first: a prefix is useless without its head, so
        of one request the block that came first should go first.
        """

    def remove(self, block: Block) -> None:
        """The block is needed, or is about to be evicted, or was just used and comes back at once."""

    def candidates(self) -> Iterator[Block]:
        """All blocks, the next to be evicted first. They are not changed while the iterator is in use.

        To be merged with other spaces they should come sorted by ``last_used``.
        """


class LruPolicy:
    """Least recently used first: a list linked through the blocks, so that a block costs no node and no entry."""

    __slots__ = ("_newest", "_oldest")

    def __init__(self) -> None:
        self._oldest: Block | None = None
        self._newest: Block | None = None

    def insert(self, block: Block) -> None:
        block.older = self._newest
        if self._newest is None:
            self._oldest = block
        else:
            self._newest.newer = block
        self._newest = block

    def remove(self, block: Block) -> None:
        older, newer = block.older, block.newer
        if older is None:
            self._oldest = newer
        else:
            older.newer = newer
        if newer is None:
            self._newest = older
        else:
            newer.older = older
        block.older = block.newer = None

    def candidates(self) -> Iterator[Block]:
        block = self._oldest
        while block is not None:
            yield block
            block = block.newer


def oldest_first(policies: Iterable[EvictionPolicy]) -> Iterator[Block]:
    """Candidates of several policies by ``last_used``, lazily.

    Those of one tick, the groups of one request, come in turns: a prefix that one group has lost is of no use in the
    others.
    """
    heap: list[tuple[int, int, int, Block, Iterator[Block]]] = []
    for rank, policy in enumerate(policies):
        rest = policy.candidates()
        for block in rest:
            heap.append((block.last_used, 0, rank, block, rest))
            break
    heapify(heap)
    while heap:
        tick, turn, rank, block, rest = heap[0]
        yield block
        following = next(rest, None)
        if following is None:
            heappop(heap)
        else:
            turn = turn + 1 if following.last_used == tick else 0
            heapreplace(heap, (following.last_used, turn, rank, following, rest))


def choose_victims(
    needs: Mapping[int, int],
    allocator: SlotAllocator[Block],
    spaces: Collection[Space],
    protected: Container[Block],
) -> list[Block] | None:
    """Blocks to evict so that all needs can be allocated, or None if no choice would do. Changes nothing.

    The oldest evictable block with a slot of the needed class goes first. A whole slab of another class goes instead
    if no block of it was used since, or if there is no such block: without that the second model on a node would
    starve with its first slab. A block is evicted as a whole, with its slots in other slabs and classes.

    Args:
        needs: slots needed per size class.
        spaces: all spaces of the pool.
        protected: blocks that the same request is about; never chosen.
    """
    if sum(size * need for size, need in needs.items()) > allocator.total_bytes - allocator.busy_bytes:
        return None  # without this a request that is too large would look at every block first
    plan = _Plan(needs, allocator, spaces, protected)
    while (size := plan.unmet()) is not None:
        block, slab = plan.oldest_block(size), plan.oldest_slab(size)
        if slab is not None and (block is None or slab.touched < block.last_used):
            plan.evict_slab(slab)
        elif block is not None:
            plan.evict(block)
        else:
            return None
    return plan.victims()


class _Queue(Generic[Item]):
    """The first item that is (still) usable of an iterator."""

    def __init__(self, items: Iterator[Item], usable: Callable[[Item], bool]) -> None:
        self._items = items
        self._usable = usable
        self._head = next(items, None)

    def head(self) -> Item | None:
        while self._head is not None and not self._usable(self._head):
            self._head = next(self._items, None)
        return self._head


class _Plan:
    """The state of one `choose_victims`."""

    def __init__(
        self,
        needs: Mapping[int, int],
        allocator: SlotAllocator[Block],
        spaces: Collection[Space],
        protected: Container[Block],
    ) -> None:
        self._allocator = allocator
        self._supply = allocator.supply(needs)
        self._spaces = spaces
        self._protected = protected
        self._victims: dict[Block, None] = {}
        self._one_by_one = True
        """Each victim gave one slot, and so none too many."""
        self._blocks: dict[int, _Queue[Block]] = {}
        self._slabs: dict[int, _Queue[Slab[Block]]] = {}

    def unmet(self) -> int | None:
        """The size class for which more must be evicted."""
        return self._supply.unmet()

    def oldest_block(self, size: int) -> Block | None:
        """The oldest evictable block with a slot of this class."""
        if size not in self._blocks:
            policies = [space.policy for space in self._spaces if size in space.slot_sizes]
            self._blocks[size] = _Queue(oldest_first(policies), lambda block: self._gives(block, size))
        return self._blocks[size].head()

    def oldest_slab(self, size: int) -> Slab[Block] | None:
        """The longest unused slab of another class that can be had as a whole."""
        if size not in self._slabs:
            slabs = self._allocator.reclaimable(other_than=size)
            self._slabs[size] = _Queue(slabs, lambda slab: self._gives_whole(slab, size))
        return self._slabs[size].head()

    def evict(self, block: Block) -> None:
        self._victims[block] = None
        slots = block.held_slots()
        self._one_by_one &= len(slots) == 1
        for slot in slots:
            self._supply.free(slot)

    def evict_slab(self, slab: Slab[Block]) -> None:
        self._one_by_one = False
        for block in slab.blocks():
            if block not in self._victims:
                self.evict(block)

    def victims(self) -> list[Block]:
        if not self._one_by_one:
            self._spare()
        return list(self._victims)

    def _spare(self) -> None:
        """What gave several slots may have made earlier victims needless: keep what can be kept, the newest first."""
        oldest_first = sorted(self._victims, key=lambda block: block.last_used)
        for block in oldest_first[::-1]:
            for slot in block.held_slots():
                self._supply.keep(slot)
            if self._supply.unmet() is None:
                del self._victims[block]
            else:
                self.evict(block)

    def _gives(self, block: Block, size: int) -> bool:
        if block in self._victims or block in self._protected:
            return False
        sizes = block.space.slot_sizes
        return any(block.slot_of(shard) >= 0 and sizes[shard] == size for shard in range(len(sizes)))

    def _gives_whole(self, slab: Slab[Block], size: int) -> bool:
        if slab.nbytes < size or self._supply.is_whole(slab):
            return False
        return not any(block in self._protected for block in slab.blocks())
