"""Host slots by size class: the pool is cut into slabs, a slab into slots of one size (memcached's slab allocator).

Unlike memcached's, a slab goes back to the others as soon as all of its slots are free, so that the next model with
another block size can cut it anew. A slot is named by its byte offset in the pool.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from heapq import merge
from typing import Generic, TypeVar

from kvsidecar.cache.supply import Supply

SLOT_ALIGN = 4096
"""Slots are multiples of this many bytes and start at one: a page (and so a cache line) holds bytes of one slot only,
which keeps two DMAs from sharing a line, and sizes that differ by a few bytes share a class."""

Owner = TypeVar("Owner")


class SlotState(IntEnum):
    """Each slot of a cut slab is in exactly one of these."""

    FREE = 0
    RESERVED = 1
    """Being filled by a store."""
    HELD = 2
    """Sealed, and its block must stay: it is pinned, or another shard of it is being filled."""
    EVICTABLE = 3
    """Sealed, and nobody would notice but the next lookup."""
    QUARANTINED = 4
    """A copy into it may still be running; never used again."""


_FREE, _RESERVED, _HELD, _EVICTABLE, _QUARANTINED = map(int, SlotState)  # members of an enum are slow to look up


def size_class(nbytes: int) -> int:
    """Bytes of the slot that holds a shard of ``nbytes`` bytes."""
    return -(-nbytes // SLOT_ALIGN) * SLOT_ALIGN


class Slab(Generic[Owner]):
    """A piece of the pool; cut into ``capacity`` slots of ``size`` bytes while at least one of them is used."""

    __slots__ = (
        "capacity",
        "evictable",
        "fresh",
        "index",
        "nbytes",
        "node",
        "owners",
        "returned",
        "size",
        "start",
        "states",
        "touched",
        "used",
    )

    def __init__(self, index: int, start: int, nbytes: int, node: int | None) -> None:
        self.index = index
        self.start = start
        self.nbytes = nbytes
        self.node = node
        self.touched = 0
        """Tick at which a slot of it was last used."""
        self.cut(0)

    def cut(self, size: int) -> None:
        """Make slots of ``size`` bytes; 0 makes it whole again."""
        self.size = size
        self.capacity = self.nbytes // size if size else 0
        self.owners: list[Owner | None] = [None] * self.capacity
        self.states = bytearray(self.capacity)
        self.returned: list[int] = []
        self.fresh = 0
        """Slots from this one on were never used: a fresh cut of many slots need not list them."""
        self.used = 0
        self.evictable = 0

    @property
    def reclaimable(self) -> bool:
        """Every used slot is evictable, so that evicting them gives the whole slab back."""
        return self.used == self.evictable > 0

    def index_of(self, slot: int) -> int:
        return (slot - self.start) // self.size

    def blocks(self) -> Iterator[Owner]:
        """Owners of its slots; one that owns several comes several times."""
        return (owner for owner in self.owners if owner is not None)


class _Node(Generic[Owner]):
    """The slabs of one NUMA node."""

    def __init__(self) -> None:
        self.whole: deque[Slab[Owner]] = deque()
        """Uncut slabs. A short one stays at the left end: it is taken last, and only by slots that fit it."""
        self.partial: dict[int, OrderedDict[int, Slab[Owner]]] = {}
        """Size class -> cut slabs with a free slot, by slab index."""
        self.free_slots: Counter[int] = Counter()
        """Size class -> free slots in ``partial``."""

    def take_partial(self, size: int) -> Slab[Owner] | None:
        slabs = self.partial.get(size)
        return next(reversed(slabs.values())) if slabs else None

    def take_whole(self, size: int) -> Slab[Owner] | None:
        if not self.whole or self.whole[-1].nbytes < size:
            return None
        slab = self.whole.pop()
        slab.cut(size)
        self.partial.setdefault(size, OrderedDict())[slab.index] = slab
        self.free_slots[size] += slab.capacity
        return slab


class SlotAllocator(Generic[Owner]):
    """Gives out slots of the pool, and counts the bytes in each state. Every call but ``reclaimable`` is O(1).

    Args:
        pool_bytes: size of the pool; a multiple of `SLOT_ALIGN`.
        slab_bytes: size of a slab; a multiple of `SLOT_ALIGN`. Chunks that are pinned in one call must be multiples
            of it, so that no slot straddles two registrations. The last slab is shorter if the pool is no multiple.
        numa_of_slab: NUMA node of each slab, None for one whose node is unknown. Default: all unknown.

    Raises:
        ValueError: for sizes that are not as said above.
    """

    def __init__(self, pool_bytes: int, slab_bytes: int, numa_of_slab: Sequence[int | None] | None = None) -> None:
        for name, nbytes in (("pool_bytes", pool_bytes), ("slab_bytes", slab_bytes)):
            if nbytes <= 0 or nbytes % SLOT_ALIGN:
                raise ValueError(f"{name} is {nbytes}; it must be a positive multiple of {SLOT_ALIGN}")
        num_slabs = -(-pool_bytes // slab_bytes)
        nodes = [None] * num_slabs if numa_of_slab is None else list(numa_of_slab)
        if len(nodes) != num_slabs:
            raise ValueError(f"numa_of_slab has {len(nodes)} entries for {num_slabs} slabs")
        self.total_bytes = pool_bytes
        self.slab_bytes = slab_bytes
        self.wasted_bytes = 0
        """Tails of cut slabs that are too short for a slot."""
        self._bytes = [0] * len(SlotState)
        self._bytes[_FREE] = pool_bytes
        self._tick = 0
        self._nodes: dict[int | None, _Node[Owner]] = {node: _Node() for node in nodes}
        self._reclaimable: dict[int, OrderedDict[int, Slab[Owner]]] = {}
        """Size class -> slabs that `Slab.reclaimable` is true of, by slab index, the longest unused first."""
        self._slabs: list[Slab[Owner]] = [
            Slab(index, start, min(slab_bytes, pool_bytes - start), nodes[index])
            for index, start in enumerate(range(0, pool_bytes, slab_bytes))
        ]
        for slab in reversed(self._slabs):
            self._put_whole(slab)

    # -- what there is -----------------------------------------------------------------------------------------

    @property
    def slabs(self) -> Sequence[Slab[Owner]]:
        return self._slabs

    @property
    def free_bytes(self) -> int:
        """Bytes in uncut slabs and in free slots of cut ones."""
        return self._bytes[_FREE]

    def bytes_in(self, state: SlotState) -> int:
        """Bytes of all slots in ``state``; for `SlotState.FREE` with the uncut slabs."""
        return self._bytes[state]

    @property
    def busy_bytes(self) -> int:
        """Bytes of slots that eviction cannot give back now."""
        return self._bytes[_RESERVED] + self._bytes[_HELD] + self._bytes[_QUARANTINED]

    @property
    def largest_slot(self) -> int:
        """Bytes of the largest slot that can be cut."""
        return self._slabs[0].nbytes

    def fits(self, nbytes: int) -> bool:
        """False if a shard of ``nbytes`` bytes is larger than any slab, so that it can never be stored."""
        return size_class(nbytes) <= self.largest_slot

    def slots_per_slab(self, size: int) -> int:
        """Slots of size class ``size`` in a slab of full length."""
        return self.slab_bytes // size

    def free_slots(self, size: int, node: int | None = None) -> int:
        """Free slots in slabs that are already cut to ``size``; those on ``node`` only, unless it is None."""
        if node is not None:
            return self._nodes[node].free_slots[size] if node in self._nodes else 0
        return sum(home.free_slots[size] for home in self._nodes.values())

    def slab_of(self, slot: int) -> Slab[Owner]:
        return self._slabs[slot // self.slab_bytes]

    def supply(self, needs: Mapping[int, int]) -> Supply:
        """A plan of what could be allocated without a preferred node. Needs are slots per size class."""
        last = self._slabs[-1]
        short = last.nbytes if last.nbytes < self.slab_bytes and not last.size else 0
        free_slots = {size: self.free_slots(size) for size in needs}
        return Supply(self, needs, free_slots, whole_slabs=self._whole_slabs(), short_slab=short)

    def can_prefer(self, node: int, needs: Mapping[int, int]) -> bool:
        """All needs can be allocated with ``node`` preferred, larger size classes first.

        That may open a slab on the node although a slot is free elsewhere; so the free slots elsewhere do not count,
        nor the short slab, which one class could so take from another. True is safe, False may be too careful.
        """
        free_slots = {size: self.free_slots(size, node) for size in needs}
        return Supply(self, needs, free_slots, whole_slabs=self._whole_slabs(), short_slab=0).unmet() is None

    def reclaimable(self, other_than: int) -> Iterator[Slab[Owner]]:
        """Slabs of other size classes whose used slots are all evictable, the longest unused first."""
        queues = [slabs.values() for size, slabs in self._reclaimable.items() if size != other_than]
        return merge(*queues, key=lambda slab: slab.touched)

    # -- the life of a slot ------------------------------------------------------------------------------------

    def allocate(self, size: int, owner: Owner, node: int | None = None) -> int | None:
        """Reserve a slot of size class ``size``. None if there is none.

        Partly used slabs come before whole ones, so that whole ones stay for other classes; the ``node``, if given,
        before the others: a copy across sockets is slower than one that finds its slab half empty.
        """
        slab = self._slab_with_room(size, node)
        if slab is None:
            return None
        if slab.reclaimable:
            del self._reclaimable[slab.size][slab.index]
        if slab.returned:
            index = slab.returned.pop()
        else:
            index = slab.fresh
            slab.fresh += 1
        slab.owners[index] = owner
        slab.states[index] = _RESERVED
        slab.used += 1
        self._bytes[_FREE] -= size
        self._bytes[_RESERVED] += size
        home = self._nodes[slab.node]
        home.free_slots[size] -= 1
        if slab.used == slab.capacity:
            del home.partial[size][slab.index]
        return slab.start + index * size

    def seal(self, slot: int) -> None:
        """The slot is filled: RESERVED to HELD."""
        self._move(slot, _RESERVED, _HELD)

    def quarantine(self, slot: int) -> None:
        """The slot may still be written to, for ever: RESERVED to QUARANTINED."""
        slab = self._move(slot, _RESERVED, _QUARANTINED)
        slab.owners[slab.index_of(slot)] = None

    def condemn(self, slot: int) -> None:
        """What it holds is not what was put in: HELD or EVICTABLE to QUARANTINED."""
        slab = self.slab_of(slot)
        if slab.used and slab.states[slab.index_of(slot)] == _EVICTABLE:
            self.hold(slot)
        slab = self._move(slot, _HELD, _QUARANTINED)
        slab.owners[slab.index_of(slot)] = None

    def hold(self, slot: int) -> None:
        """Its block must stay: EVICTABLE to HELD."""
        slab = self._move(slot, _EVICTABLE, _HELD)
        if slab.reclaimable:
            del self._reclaimable[slab.size][slab.index]
        slab.evictable -= 1

    def let_go(self, slot: int, tick: int) -> None:
        """Its block was last used at ``tick`` and may be evicted: HELD to EVICTABLE. Ticks never go back."""
        slab = self._move(slot, _HELD, _EVICTABLE)
        slab.evictable += 1
        slab.touched = self._tick = tick
        if slab.reclaimable:
            self._put_reclaimable(slab)

    def touch(self, slot: int, tick: int) -> None:
        """An evictable block was used at ``tick``."""
        slab = self.slab_of(slot)
        if slab.touched != tick:
            slab.touched = self._tick = tick
            if slab.reclaimable:
                self._reclaimable[slab.size].move_to_end(slab.index)

    def free(self, slot: int) -> None:
        """RESERVED, HELD or EVICTABLE to FREE."""
        slab = self.slab_of(slot)
        state = slab.states[slab.index_of(slot)] if slab.used else _FREE
        if state in (_FREE, _QUARANTINED):
            raise AssertionError(f"slot {slot} is {SlotState(state).name}; only a used slot can be freed")
        self._move(slot, state, _FREE)
        index = slab.index_of(slot)
        slab.owners[index] = None
        slab.returned.append(index)
        slab.used -= 1
        slab.evictable -= state == _EVICTABLE
        home = self._nodes[slab.node]
        home.free_slots[slab.size] += 1
        home.partial.setdefault(slab.size, OrderedDict())[slab.index] = slab
        if not slab.used:
            self._join(slab)
        elif state != _EVICTABLE and slab.reclaimable:
            # Its last busy slot went without a use of its own: as new as the newest, which keeps the order sorted.
            slab.touched = self._tick
            self._put_reclaimable(slab)

    # -- inside ------------------------------------------------------------------------------------------------

    def _slab_with_room(self, size: int, node: int | None) -> Slab[Owner] | None:
        home = self._nodes.get(node) if node is not None else None
        if home is not None and (slab := home.take_partial(size) or self._cut(home, size)) is not None:
            return slab
        for home in self._nodes.values():
            if (slab := home.take_partial(size)) is not None:
                return slab
        # A short slab is the left end of its node, and of all nodes it comes last.
        homes = sorted(self._nodes.values(), key=lambda home: -home.whole[-1].nbytes if home.whole else 0)
        return self._cut(homes[0], size)

    def _cut(self, home: _Node[Owner], size: int) -> Slab[Owner] | None:
        slab = home.take_whole(size)
        if slab is not None:
            self._waste(slab.nbytes - slab.capacity * size)
        return slab

    def _whole_slabs(self) -> int:
        """Uncut slabs of full length."""
        uncut = sum(len(home.whole) for home in self._nodes.values())
        last = self._slabs[-1]
        return uncut - (last.nbytes < self.slab_bytes and not last.size)

    def _waste(self, nbytes: int) -> None:
        self.wasted_bytes += nbytes
        self._bytes[_FREE] -= nbytes

    def _join(self, slab: Slab[Owner]) -> None:
        """All slots of the slab are free: make it whole, for any class to cut."""
        home = self._nodes[slab.node]
        del home.partial[slab.size][slab.index]
        home.free_slots[slab.size] -= slab.capacity
        self._waste(slab.capacity * slab.size - slab.nbytes)
        self._reclaimable.get(slab.size, OrderedDict()).pop(slab.index, None)
        slab.cut(0)
        self._put_whole(slab)

    def _put_whole(self, slab: Slab[Owner]) -> None:
        whole = self._nodes[slab.node].whole
        if slab.nbytes < self.slab_bytes:
            whole.appendleft(slab)
        else:
            whole.append(slab)

    def _put_reclaimable(self, slab: Slab[Owner]) -> None:
        slabs = self._reclaimable.setdefault(slab.size, OrderedDict())
        slabs[slab.index] = slab
        slabs.move_to_end(slab.index)

    def _move(self, slot: int, source: int, target: int) -> Slab[Owner]:
        slab = self._slabs[slot // self.slab_bytes]
        if not slab.used or slab.states[(slot - slab.start) // slab.size] != source:
            raise AssertionError(f"slot {slot} is not {SlotState(source).name}")
        slab.states[(slot - slab.start) // slab.size] = target
        self._bytes[source] -= slab.size
        self._bytes[target] += slab.size
        return slab
