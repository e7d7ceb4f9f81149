"""Keeps track of the blocks that slower tiers have a copy of, and of those that are being written to one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from kvsidecar.cache.arrays import Bools, Ints, first_of_each
from kvsidecar.cache.block_table import BlockTable, require
from kvsidecar.cache.grants import Chain, StoreGrant, WriteGrant
from kvsidecar.cache.room import Room
from kvsidecar.cache.space_blocks import Space


class TierCopies:
    """The marks of the tiers on blocks of a table, and the references to those that are being written.

    Args:
        next_tick: of a use.
    """

    def __init__(self, table: BlockTable, room: Room, next_tick: Callable[[], int]) -> None:
        self._table, self._room, self._next_tick = table, room, next_tick
        self._writes: set[WriteGrant] = set()

    def unwritten(self, chain: Chain, tier: int) -> Ints:
        """Rows of the readable blocks of a chain that a tier does not have, without duplicates.

        Args:
            chain: of blocks that are referenced, or were sealed in this step.
            tier: its bit in `SpaceBlocks.tiers`.
        """
        blocks, rows = chain.blocks, chain.rows
        if blocks.cleared:
            return rows[:0]  # the others may be gone
        absent: Bools = blocks.tiers[rows] & tier == 0
        # One that expires stays in the pool: a tier would bring it back.
        if blocks.next_expiry or blocks.space.share.idle_ttl:
            absent &= (blocks.expires[rows] == 0) & (blocks.idle[rows] == 0) & (blocks.space.share.idle_ttl is None)
        rows = rows[absent & (blocks.missing[rows] == 0) & ~blocks.detached[rows]]
        unwritten: Ints = rows[first_of_each(rows)] if len(rows) > 1 else rows
        return unwritten

    @property
    def evicted_unkept(self) -> int:
        """Readable blocks that stores have evicted and that no tier had."""
        return self._room.evicted_unkept

    def evict_ahead(self, needs: Mapping[int, int], tier: int, space: Space) -> list[Chain]:
        """Evict the blocks that a store with these needs would evict now, as far as a tier has them.

        Args:
            needs: slots needed per size class.
            space: the store's space.

        Returns:
            The blocks that the tier lacks. Valid in this step only.
        """
        others = []
        for chain in self._room.victims(needs, space.share):
            kept: Bools = chain.blocks.tiers[chain.rows] & tier != 0
            others.append(Chain(chain.blocks, chain.rows[~kept]))
            if kept.any():
                self._table.evict(Chain(chain.blocks, chain.rows[kept]))
        return others

    def begin_write(self, chain: Chain, tier: int) -> WriteGrant:
        """Reference blocks from `unwritten` until `end_write`: they are written to a tier."""
        blocks, rows = chain.blocks, chain.rows
        blocks.tiers[rows] |= tier
        self._table.add_refs([chain])
        grant = WriteGrant(chain, blocks.index.hashes_of(rows), blocks.slots[:, rows], tier, blocks.last_used[rows])
        self._writes.add(grant)
        return grant

    def end_write(self, grant: WriteGrant, kept: Bools, *, evict: bool = False) -> None:
        """End a write: nothing reads the slots any more.

        Args:
            kept: which blocks the tier has.
            evict: evict those that nobody has used since the write began. False: it counts as a use.
        """
        require(grant.open, "the write has already ended")
        grant.open = False
        self._writes.remove(grant)
        chain, blocks, rows = grant.chain, grant.chain.blocks, grant.chain.rows
        blocks.tiers[rows[~kept]] &= ~np.uint8(grant.tier)
        unused = rows[(blocks.refs[rows] == 1) & (blocks.last_used[rows] == grant.last_used) & ~blocks.detached[rows]]
        self._table.drop_refs([chain], self._next_tick())
        if evict and len(unused) and not blocks.cleared:
            self._table.evict(Chain(blocks, unused))

    def mark(self, grant: StoreGrant, tier: int) -> None:
        """Note that a tier has the blocks of this store, which has just been sealed: they came from there."""
        for part in grant.parts:
            if not part.blocks.cleared:
                part.blocks.tiers[part.rows] |= tier
