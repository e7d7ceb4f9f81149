"""Eviction that only chooses (as in Ray's plasma store): a policy orders blocks, `choose_victims` plans, and the
cache does it. Nothing here frees a slot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvsidecar.cache.arrays import NO_INTS, Bools, Ints, some
from kvsidecar.cache.block import Chain, SpaceBlocks
from kvsidecar.cache.slots import SlotAllocator

ASKED, VICTIM = 1, 2
"""In `SpaceBlocks.marks`, while a plan is made."""


def choose_victims(
    needs: Mapping[int, int],
    allocator: SlotAllocator,
    tables: Mapping[int, SpaceBlocks],
    asked: Sequence[Chain],
) -> list[Chain] | None:
    """Blocks to evict so that all needs can be allocated, or None if no choice would do. Changes nothing.

    The oldest evictable blocks with a slot of the needed class go first. A whole slab of another class goes instead
    if no block of it was used since, or if there are no such blocks: without that the second model on a node would
    starve with its first slab. A block is evicted as a whole, with its slots in other slabs and classes.

    Args:
        needs: slots needed per size class.
        tables: all blocks of the pool, by number.
        asked: blocks that the same request is about; never chosen.
    """
    if sum(size * need for size, need in needs.items()) > allocator.total_bytes - allocator.busy_bytes:
        return None  # without this a request that is too large would look at every block first
    plan = _Plan(needs, allocator, tables)
    try:
        for chain in asked:
            chain.blocks.marks[chain.rows] = ASKED
        if (blocks := plan.only_table()) is not None:
            return plan.oldest_of(blocks)
        return plan.victims() if plan.make() else None
    finally:
        for chain in (*asked, *plan.chosen()):
            chain.blocks.marks[chain.rows] = 0


def oldest_first(queues: Sequence[Chain]) -> list[tuple[int, int]]:
    """Order in which blocks of several spaces go: (queue, position in it) of each.

    By the tick of their last use. Those of one tick, the groups of one request, come in turns: a prefix that one group
    has lost is of no use in the others.

    Args:
        queues: of each space its candidates, the oldest first.
    """
    ticks = [queue.blocks.last_used[queue.rows] for queue in queues]
    turns = [np.arange(len(tick)) - np.searchsorted(tick, tick) for tick in ticks]
    number = np.repeat(np.arange(len(queues)), [len(tick) for tick in ticks])
    position = np.concatenate([np.arange(len(tick)) for tick in ticks])
    order = np.lexsort((number, np.concatenate(turns), np.concatenate(ticks)))
    return list(zip(number[order].tolist(), position[order].tolist(), strict=True))


@dataclass(slots=True)
class _Choice:
    """Blocks that were chosen together."""

    victims: list[Chain]
    tick: int
    slab: bool
    """They make a whole slab, and only all of them do."""


class _IdleSlab(NamedTuple):
    """A slab that could go as a whole."""

    number: int
    last_used: int
    """Tick."""


class _Plan:
    """The state of one `choose_victims`."""

    def __init__(self, needs: Mapping[int, int], allocator: SlotAllocator, tables: Mapping[int, SpaceBlocks]) -> None:
        self._allocator = allocator
        self._supply = allocator.supply(needs)
        self._tables = tables
        self._choices: list[_Choice] = []
        self._slabs: dict[int, list[int]] = {}
        """Size class -> slabs of other classes that could go, the longest unused last."""

    def make(self) -> bool:
        """Choose until the needs are met. False if they cannot be.

        What goes next is what was not used for longest: blocks with a slot of the class that is missing, or all of a
        slab of another class. A slab was last used when the newest of its blocks was, so the blocks that are no newer
        than the oldest slab go first, then that slab, then the blocks up to the next slab, and so on.
        """
        while (unmet := self._supply.unmet()) is not None:
            slab = self._oldest_slab(unmet.size)
            blocks = self._oldest_blocks(unmet.size, unmet.missing, None if slab is None else slab.last_used)
            if blocks:
                newest = max(int(chain.blocks.last_used[chain.rows[-1]]) for chain in blocks)
                self._choose(_Choice(blocks, newest, slab=False))
            elif slab is not None:
                self._choose(_Choice(self._blocks_in(slab.number), slab.last_used, slab=True))
            else:
                return False
        self._spare()
        return True

    def only_table(self) -> SpaceBlocks | None:
        """The one table that can give anything, if each of its blocks gives one slot: as with one model on the node.

        Then there is no slab to weigh against blocks and nothing to spare, and `make` would choose `oldest_of`.
        """
        tables = [blocks for blocks in self._tables.values() if not blocks.cleared]
        if len(tables) == 1 and tables[0].space.num_shards == 1 and self._supply.surplus() is not None:
            size = tables[0].space.slot_sizes[0]
            return tables[0] if self._supply.largest == size and not len(self._allocator.reclaimable(size)) else None
        return None

    def oldest_of(self, blocks: SpaceBlocks) -> list[Chain] | None:
        """The oldest blocks that are enough, if there are so many."""
        unmet = self._supply.unmet()
        if unmet is None:
            return []
        victims = self._candidates(blocks, unmet.size, unmet.missing, None)
        return [victims] if len(victims.rows) == unmet.missing else None

    def chosen(self) -> list[Chain]:
        """All that were chosen, also those that are spared."""
        return [chain for choice in self._choices for chain in choice.victims]

    def victims(self) -> list[Chain]:
        chosen = [Chain(chain.blocks, chain.rows[self._marked(chain, VICTIM)]) for chain in self.chosen()]
        return [chain for chain in chosen if len(chain.rows)]

    # -- who comes next ------------------------------------------------------------------------------------------

    def _oldest_blocks(self, size: int, missing: int, until: int | None) -> list[Chain]:
        """The oldest blocks that give so many slots of this class, or all there are; none used after tick ``until``."""
        tables = [blocks for blocks in self._tables.values() if size in blocks.space.slot_sizes and not blocks.cleared]
        queues = [self._candidates(blocks, size, missing, until) for blocks in tables]
        queues = [queue for queue in queues if len(queue.rows)]
        if len(queues) < 2:
            return queues  # it is cut to length already
        gives = [self._gives(queue, size).tolist() for queue in queues]
        taken = [0] * len(queues)
        for queue, position in oldest_first(queues):
            if missing <= 0:
                break
            missing -= gives[queue][position]
            taken[queue] += 1
        return [Chain(queue.blocks, queue.rows[:count]) for queue, count in zip(queues, taken, strict=True) if count]

    def _candidates(self, blocks: SpaceBlocks, size: int, missing: int, until: int | None) -> Chain:
        """The oldest blocks of one space that would be enough, or all there are."""
        pieces: list[Ints] = []
        for piece in blocks.policy.candidates():
            rows = piece[blocks.marks[piece] == 0]
            if until is not None:
                rows = rows[blocks.last_used[rows] <= until]
            if blocks.space.num_shards == 1:
                rows = rows[:missing]
                missing -= len(rows)
            else:
                gives = self._gives(Chain(blocks, rows), size)
                rows, gives = rows[gives > 0], gives[gives > 0]
                enough = int(np.searchsorted(gives.cumsum(), missing)) + 1
                rows = rows[:enough]
                missing -= int(gives[:enough].sum())
            pieces.append(rows)
            if missing <= 0 or (until is not None and len(piece) and blocks.last_used[piece[-1]] > until):
                break
        return Chain(blocks, pieces[0] if len(pieces) == 1 else np.concatenate((NO_INTS, *pieces)))

    def _oldest_slab(self, size: int) -> _IdleSlab | None:
        """The longest unused slab of another class that can be had as a whole."""
        if size not in self._slabs:
            self._slabs[size] = self._allocator.reclaimable(other_than=size).tolist()[::-1]
        slabs = self._slabs[size]
        while slabs and not self._gives_whole(slabs[-1], size):
            slabs.pop()
        return _IdleSlab(slabs[-1], int(self._allocator.slabs.touched[slabs[-1]])) if slabs else None

    def _gives_whole(self, slab: int, size: int) -> bool:
        if self._allocator.slabs.nbytes[slab] < size or self._supply.is_whole(slab):
            return False
        return not any(some(self._marked(chain, ASKED)) for chain in self._owners(slab))

    # -- the choice ----------------------------------------------------------------------------------------------

    def _choose(self, choice: _Choice) -> None:
        self._choices.append(choice)
        self._mark(choice.victims)

    def _mark(self, victims: Iterable[Chain]) -> None:
        for chain in victims:
            chain.blocks.marks[chain.rows] = VICTIM
            self._supply.free(chain.blocks.held_slots(chain.rows))

    def _unmark(self, victims: Iterable[Chain]) -> None:
        for chain in victims:
            chain.blocks.marks[chain.rows] = 0
            self._supply.keep(chain.blocks.held_slots(chain.rows))

    def _spare(self) -> None:
        """Take needless victims back, the newest first.

        A block with several shards gives several slots, and a slab many: more than was missing, perhaps, so that a
        victim chosen before is not needed any more. Each is taken back, and stays so if the needs are met without it.
        A slab is whole or of no use, so its blocks are taken back together.
        """
        for choice in sorted(self._choices, key=lambda choice: choice.tick, reverse=True):
            if self._supply.surplus() == 0:
                return  # whatever is taken back now would be missing
            for victims in [choice.victims] if choice.slab else self._one_by_one(choice):
                self._unmark(victims)
                if self._supply.unmet() is not None:
                    self._mark(victims)

    def _one_by_one(self, choice: _Choice) -> list[list[Chain]]:
        """The blocks of a choice that might be spared, the newest first."""
        surplus, size = self._supply.surplus(), self._supply.largest
        spared = choice.victims
        if surplus is not None:  # then only this class counts: a block that gives more than is left over must go
            spared = [Chain(chain.blocks, chain.rows[self._gives(chain, size) <= surplus]) for chain in spared]
        order = oldest_first(spared)[::-1] if any(len(chain.rows) for chain in spared) else []
        return [[Chain(spared[queue].blocks, spared[queue].rows[at : at + 1])] for queue, at in order]

    # -- inside --------------------------------------------------------------------------------------------------

    def _gives(self, chain: Chain, size: int) -> Ints:
        """Slots of this class that each block gives."""
        blocks = chain.blocks
        if blocks.space.num_shards == 1:
            return np.ones(len(chain.rows), np.int64)
        shards = [shard for shard, slot_size in enumerate(blocks.space.slot_sizes) if slot_size == size]
        gives: Ints = (blocks.slots[np.array(shards)[:, None], chain.rows] >= 0).sum(axis=0)
        return gives

    def _marked(self, chain: Chain, mark: int) -> Bools:
        marked: Bools = chain.blocks.marks[chain.rows] == mark
        return marked

    def _blocks_in(self, slab: int) -> list[Chain]:
        """The owners of a slab that are not chosen yet."""
        chains = [Chain(chain.blocks, chain.rows[self._marked(chain, 0)]) for chain in self._owners(slab)]
        return [chain for chain in chains if len(chain.rows)]

    def _owners(self, slab: int) -> list[Chain]:
        owners = np.unique(self._allocator.owners(slab))
        numbers, rows = owners >> 32, owners & 0xFFFFFFFF
        return [Chain(self._tables[number], rows[numbers == number]) for number in np.unique(numbers).tolist()]
