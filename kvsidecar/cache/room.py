"""Finds room for a store: whether its shares may have it, and what has to go for it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvsidecar.cache.arrays import all_true, least
from kvsidecar.cache.block_table import BlockTable
from kvsidecar.cache.expiry import SWEEP, Expiry
from kvsidecar.cache.grants import Chain, StoreGrant
from kvsidecar.cache.shares import Age, Share
from kvsidecar.cache.space_blocks import SpaceBlocks
from kvsidecar.cache.victims import AHEAD_SHARE, choose_victims, oldest_of_share
from kvsidecar.errors import Refusal
from kvsidecar.types import EVICTION_ORDER, Priority

SWEEPS, PIECE = 16, 512
"""The most pieces of cleared or expired blocks that a store frees, and blocks of a piece, unless the store has more. If
it finds no room there, others go, or it is refused: the rest goes soon."""


@dataclass(frozen=True, slots=True)
class _NewBlocks:
    """Blocks that a store creates."""

    age: Age
    priority: Priority

    def may_replace(self, victims: Iterable[Chain], needs: Mapping[int, int]) -> bool:
        """Whether the policy evicts all these victims first. Victims of other sizes, whose slab is recut, go in any
        case."""
        place = EVICTION_ORDER.index(self.priority)
        lower = EVICTION_ORDER[:place]
        for chain in victims:
            blocks, rows = chain.blocks, chain.rows
            priorities = blocks.priorities_of(rows)
            if priorities is not None:
                rows = rows[~np.isin(priorities, lower)]
            elif Priority.NORMAL in lower:
                continue
            if needs.keys().isdisjoint(blocks.space.slot_sizes) or not len(rows):
                continue
            if chain.in_turn:  # the last one is the youngest
                row = rows.item(-1)
                younger = (blocks.rank(row), blocks.last_used.item(row)) > self.age
            else:
                younger = not all_true(blocks.no_younger(rows, self.age))
            if younger:
                return False
        return True


class Room:
    """Makes room in a table, all or nothing."""

    def __init__(self, table: BlockTable, expiry: Expiry) -> None:
        self._table = table
        self._expiry = expiry
        self.evicted_unkept = 0
        """Readable blocks that stores have evicted and that no tier had."""

    def make(self, needs: Mapping[int, int], grant: StoreGrant) -> Refusal | None:
        """Evict until all blocks of this store can be allocated. Returns the reason if that is impossible; nothing has
        changed then.

        Args:
            needs: slots needed per size class.
        """
        table = self._table
        fits = table.slots.can_allocate(needs) or self._sweep_for(needs)
        if fits and not table.shares.limited:
            return None
        requested = [Chain(part.blocks, part.chain_rows) for part in grant.parts]
        first: list[Chain] = []
        incoming: dict[Share, int] = {}
        if table.shares.limited:
            for part in grant.parts:
                share = part.blocks.space.share
                incoming[share] = incoming.get(share, 0) + len(part.index) * part.slot_size
            if not self._may_fill(grant, incoming):
                return Refusal.QUOTA
            for share, nbytes in incoming.items():
                for _ in range(SWEEPS):
                    if share.most is None or share.used + nbytes <= share.most:
                        break
                    if not self._expiry.collect(PIECE):
                        break
            for share, nbytes in incoming.items():  # nothing expires any more that is among the victims
                own = self._own_victims(share, nbytes, requested)
                if own is None:
                    return Refusal.QUOTA
                first += own
        if fits:
            self._evict(first)
            return None
        victims, new_blocks = None, self._age_of(grant, incoming)
        for ahead in (True,) if new_blocks is None else (True, False):
            victims = choose_victims(
                needs, table.slots, table.tables, table.shares, requested, incoming, first, ahead=ahead
            )
            if victims is None:
                break
            if new_blocks is None or new_blocks.may_replace(victims[len(first) :], needs):
                self._evict(victims)
                return None
        if victims is not None:
            return Refusal.NOT_ADMITTED
        return Refusal.POOL_FRAGMENTED if table.slots.is_fragmented(needs) else Refusal.POOL_FULL

    def victims(self, needs: Mapping[int, int], share: Share) -> list[Chain]:
        """The blocks that a store of this share with these needs would evict now."""
        table = self._table
        if table.slots.can_allocate(needs) or self._sweep_for(needs):
            return []
        nbytes = sum([size * need for size, need in needs.items()])
        return choose_victims(needs, table.slots, table.tables, table.shares, (), {share: nbytes}) or []

    def shrink(self, share: Share, blocks: int) -> bool:
        """Evict up to this many of the oldest blocks of a share that is over its maximum. False if there are none."""
        victims = oldest_of_share(share, share.over, most_blocks=blocks)
        self._evict(victims)
        return any(len(chain.rows) for chain in victims)

    def place_below(self, below: int) -> tuple[int, int] | None:
        """See `BlockCache.find_place`."""
        table, to_sweep = self._table, True
        while (place := table.slots.find_free(below)) is None and to_sweep:
            to_sweep = table.sweep(SWEEP)
        if place is not None:
            return place
        candidates = [
            oldest for blocks in table.tables.values() if (oldest := _oldest_below(blocks, below)) is not None
        ]
        if not candidates:
            return None
        table.evict(min(candidates, key=lambda chain: int(chain.blocks.last_used[chain.rows[0]])))
        return table.slots.find_free(below)

    def busy_room(self, share: Share) -> int:
        """Bytes that a share may still reference or fill."""
        return self._table.shares.busy_room(share, self._table.slots.usable_bytes)

    def may_reference(self, chains: Sequence[Chain]) -> bool:
        """Whether these readable blocks may be referenced without taking what is guaranteed to others."""
        table = self._table
        if not table.shares.limited:
            return True
        most = sum([len(chain.rows) * chain.blocks.space.block_bytes for chain in chains])
        if most <= table.slots.usable_bytes - table.shares.committed:
            return True
        wanted: dict[Share, int] = {}
        for blocks in {chain.blocks.number: chain.blocks for chain in chains}.values():
            rows = np.unique(np.concatenate([chain.rows for chain in chains if chain.blocks is blocks]))
            share, idle = blocks.space.share, int(np.count_nonzero(blocks.evictable[rows]))
            wanted[share] = wanted.get(share, 0) + idle * blocks.space.block_bytes
        return all(nbytes <= self.busy_room(share) for share, nbytes in wanted.items())

    def _age_of(self, grant: StoreGrant, incoming: Mapping[Share, int]) -> _NewBlocks | None:
        """The age at which the blocks that a store creates would go themselves. None: it is admitted whatever goes for
        it."""
        rhythm = self._table.rhythm
        parts = [part for part in grant.parts if len(part.created)]
        if rhythm is None or not rhythm.on or grant.wanted or not parts:
            return None  # of blocks that are there already, it brings other shards
        for share, nbytes in incoming.items():
            if share.used + nbytes <= share.guaranteed:
                return None
        gap = min([least(part.blocks.gaps[part.created]) for part in parts])
        rank = rhythm.rank_of_new(gap)
        return _NewBlocks((rank, rank), Priority(parts[0].blocks.priority.item(parts[0].created[0])))

    def _may_fill(self, grant: StoreGrant, incoming: Mapping[Share, int]) -> bool:
        busy = dict(incoming)
        for part in grant.parts:
            blocks = part.blocks
            if blocks.space.num_shards > 1:  # the sealed shards of these blocks cannot be evicted meanwhile
                busy[blocks.space.share] += blocks.bytes_of(part.rows[blocks.evictable[part.rows]])
        table = self._table
        if sum(busy.values()) <= table.slots.usable_bytes - table.shares.committed:
            return True
        return all(nbytes <= self.busy_room(share) for share, nbytes in busy.items())

    def _own_victims(self, share: Share, incoming: int, requested: Sequence[Chain]) -> list[Chain] | None:
        """The blocks that a share must give up to stay within its maximum. None: it cannot."""
        if share.most is None or share.used + incoming <= share.most:
            return []
        if share.used > share.most:
            return None  # since a reload: to bring it down here might take long
        over = share.used + incoming - share.most
        ahead = min(8 * incoming, share.most // AHEAD_SHARE)  # so that the next stores need not choose again
        for wanted in (over + ahead, over) if ahead >= incoming else (over,):
            victims = oldest_of_share(share, wanted, requested)
            if sum([chain.blocks.bytes_of(chain.rows) for chain in victims]) >= wanted:
                return victims
        return None

    def _evict(self, victims: Iterable[Chain]) -> None:
        for chain in victims:
            blocks, rows = chain.blocks, chain.rows
            self.evicted_unkept += int(np.count_nonzero((blocks.tiers[rows] == 0) & (blocks.missing[rows] == 0)))
            self._table.evict(chain)

    def _sweep_for(self, needs: Mapping[int, int]) -> bool:
        """Free cleared and expired blocks: some of them, if they are many. Returns whether that is enough."""
        most = max(PIECE, sum(needs.values()))
        for _ in range(SWEEPS):
            if not (self._table.sweep(most) or self._expiry.collect(most)):
                break
            if self._table.slots.can_allocate(needs):
                return True
        return False


def _oldest_below(blocks: SpaceBlocks, below: int) -> Chain | None:
    """The evictable block of this table that was used least recently, of those with a slot below this offset."""
    for rows in () if blocks.cleared else itertools.chain.from_iterable(map(blocks.candidates, blocks.priorities)):
        slots = blocks.slots[:, rows]
        there = rows[((slots >= 0) & (slots < below)).any(axis=0)]
        if len(there):
            return Chain(blocks, there[:1])
    return None
