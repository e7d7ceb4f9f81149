"""Chooses the blocks to evict. A policy orders blocks, `choose_victims` plans, and the cache evicts, as in Ray's plasma
store. Nothing here frees a slot.

How a plan is made. `AllocationPlan` counts what could be allocated if the victims chosen so far were gone, and names
the largest size class that still lacks slots. Two kinds of victims provide slots of that class: single blocks with a
slot of it, and all blocks of a slab of another class, which can then be recut. The least recently used victim goes
first; a slab counts as used when the newest of its blocks was. So blocks no newer than the oldest slab go first, then
that slab, then the blocks up to the next slab, and so on. If slabs did not take part in this order, a second model on
the node would never get more than its first slab.

"Used" has the policy's meaning: `SpaceBlocks.ranks` are the ticks of the last uses, which is LRU
(`kvsidecar.cache.eviction_lru`), or what `kvsidecar.cache.eviction_rhythm` makes of them. A slab is ordered by the last
use alone.

A block is evicted as a whole, with its slots in other slabs and classes. A later victim may therefore provide what an
earlier one was chosen for. At the end the plan takes back the victims that turned out to be unnecessary, newest first.

Priorities order the blocks within a share. How much each share gives is decided by age alone, as if all blocks had the
same priority; then each share gives as much of its blocks of the lowest priority. So a share cannot hold what it has
borrowed by giving its blocks a high priority: it pays for them with its other blocks. A slab goes by its age alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvsidecar.cache.arrays import NO_INTS
from kvsidecar.cache.eviction_candidates import candidates_of, oldest_blocks, oldest_first, provided, rank_of
from kvsidecar.cache.eviction_rhythm import NEVER
from kvsidecar.cache.grants import Chain
from kvsidecar.cache.shares import Age, Budget, Share, Shares
from kvsidecar.cache.slots import SlotAllocator
from kvsidecar.cache.space_blocks import SpaceBlocks
from kvsidecar.cache.windows import Window
from kvsidecar.types import Priority

REQUESTED, VICTIM = 1, 2
"""Values of `SpaceBlocks.marks` during planning."""
AHEAD_SLOTS = 256
"""The most slots to free beyond the need: the next stores find them. To evict 32 blocks takes half of the time of a
store of as many; to evict eight times as many takes little longer (measured)."""
AHEAD_SHARE = 64
"""No more than this part of the pool is freed ahead: that much of the cache is empty at worst."""
TOGETHER_SHARE = 32
"""Large slots that a store has in one place have no more than this part of the pool."""


def choose_victims(
    needs: Mapping[int, int],
    allocator: SlotAllocator,
    tables: Mapping[int, SpaceBlocks],
    shares: Shares,
    requested: Sequence[Chain],
    incoming: Mapping[Share, int],
    first: Sequence[Chain] = (),
    *,
    ahead: bool = True,
) -> list[Chain] | None:
    """Blocks to evict so that all needs can be allocated, or None if that is impossible. Changes nothing.

    Some more are chosen than this request needs, in the same order, if there are enough. A share gives what it has
    beyond its guarantee; if that is not enough, those that pay for the request give what is left of theirs.

    Args:
        needs: slots needed per size class.
        tables: all blocks of the pool, by number.
        requested: blocks of the same request; never chosen.
        incoming: bytes that the request adds to its shares.
        first: blocks that have to go in any case; the first ones of the answer.
        ahead: False: choose no more than are needed.
    """
    more: Mapping[int, int] = needs  # of large slots that leave gaps: a place is chosen with what is to lie there
    nests = all(allocator.grid.shape(size).nests for size in needs)
    if ahead and (nests or not allocator.leaves_gaps(needs)):
        more = _with_more(needs, allocator.total_bytes // AHEAD_SHARE)
    for own in (False, True) if shares.limited else (False,):
        for wanted in (more, needs) if more != needs else (needs,):
            budget = Budget(incoming, own=own) if shares.limited else None
            victims = _choose(_EvictionPlan(wanted, allocator, tables, shares, budget), requested, first)
            if victims is not None:
                return victims
    return None


def oldest_of_share(
    share: Share, nbytes: int, requested: Sequence[Chain] = (), most_blocks: int | None = None
) -> list[Chain]:
    """The oldest blocks of one share that free this many bytes, or all; at most ``most_blocks`` of each space."""
    try:
        for chain in requested:
            chain.blocks.marks[chain.rows] = REQUESTED
        victims = oldest_blocks([share], None, nbytes, None)
    finally:
        for chain in requested:
            chain.blocks.marks[chain.rows] = 0
    return [Chain(chain.blocks, chain.rows[:most_blocks]) for chain in victims]


def _with_more(needs: Mapping[int, int], most_bytes: int) -> dict[int, int]:
    """The needs, and up to `AHEAD_SLOTS` and ``most_bytes`` more of the same kind."""
    slots, nbytes = sum(needs.values()), sum(size * need for size, need in needs.items())
    more = min(AHEAD_SLOTS, slots * most_bytes // nbytes)
    return {size: need + need * more // slots for size, need in needs.items()}


def _choose(plan: _EvictionPlan, requested: Sequence[Chain], first: Sequence[Chain]) -> list[Chain] | None:
    if plan.hopeless():
        return None
    try:
        for chain in requested:
            chain.blocks.marks[chain.rows] = REQUESTED
        if not first and (blocks := plan.only_table()) is not None:
            return plan.oldest_of(blocks)
        return [*first, *_with_mark(VICTIM, plan.chosen())] if plan.make(first) else None
    finally:
        for chain in (*requested, *first, *plan.chosen()):
            chain.blocks.marks[chain.rows] = 0


@dataclass(slots=True)
class _Choice:
    """Victims that are chosen together."""

    victims: list[Chain]
    last_used: int
    """Tick of the last use of the newest victim; of blocks, the highest of `SpaceBlocks.ranks`."""
    window: Window | None = None
    """The place for a slab that they free, which only all of them together do; None: they provide slots one by one."""

    def overlaps(self, window: Window) -> bool:
        mine = self.window
        return mine is not None and window.start < mine.end and mine.start < window.end


class _EvictionPlan:
    """The state of one `choose_victims`."""

    def __init__(
        self,
        needs: Mapping[int, int],
        allocator: SlotAllocator,
        tables: Mapping[int, SpaceBlocks],
        shares: Shares,
        budget: Budget | None,
    ) -> None:
        self._needs = needs
        self._allocator = allocator
        self._allocation = allocator.plan(needs)
        self._tables = tables
        self._shares = shares
        self._budget = budget
        self._choices: list[_Choice] = []
        self._windows: dict[int, list[Window]] = {}
        """Size class -> places where a slab of it could be, least recently used last."""
        self._later: dict[int, list[Window]] = {}
        """Places, by size class, that overlap a chosen one: the rest of such a place may provide nothing."""

    def hopeless(self) -> bool:
        """Whether all that may go would not be enough: finding that out block by block would visit every one."""
        busy = self._allocator.busy_bytes
        if self._budget is not None:
            busy += sum([max(0, share.evictable - self._budget.left(share)) for share in self._shares])
        return sum([size * need for size, need in self._needs.items()]) > self._allocator.total_bytes - busy

    def make(self, first: Sequence[Chain] = ()) -> bool:
        """Choose victims until the needs are met, beside the ``first`` ones. False if they cannot be met."""
        self._mark(first)
        while (unmet := self._allocation.unmet()) is not None:
            choice = self._oldest_slab(*unmet)
            limit = None if choice is None else (choice.last_used, NEVER)
            blocks = self._oldest_blocks(unmet.size, unmet.missing, limit)
            if blocks:
                newest = max(chain.blocks.rank(chain.rows.item(-1)) for chain in blocks)
                choice = _Choice(blocks, newest)
            if choice is None:
                return False
            self._choices.append(choice)
            self._mark(choice.victims)
        self._take_back_unnecessary()
        return True

    def only_table(self) -> SpaceBlocks | None:
        """The only table, if each of its blocks provides one slot of the only class that is needed; else None.

        This is the normal case on a node with one model. No slab competes with blocks and no victim is unnecessary, so
        `oldest_of` chooses what `make` would choose, in less time.
        """
        only = None
        for blocks in self._tables.values():
            if not blocks.cleared:
                if only is not None:
                    return None
                only = blocks
        if only is None or only.space.num_shards > 1 or self._allocation.surplus() is None:
            return None
        size = only.space.slot_sizes[0]
        if self._allocation.largest != size or self._allocator.leaves_gaps((size,)):
            return None
        return None if self._allocator.windows(size) else only

    def oldest_of(self, blocks: SpaceBlocks) -> list[Chain] | None:
        """Enough of the oldest blocks of one table; None if there are too few."""
        unmet = self._allocation.unmet()
        if unmet is None:
            return []
        victims, missing = [], unmet.missing
        for priority in blocks.priorities:
            chain, _ = candidates_of(blocks, priority, unmet.size, missing, None)
            missing -= len(chain.rows)
            if len(chain.rows):
                victims.append(chain)
            if not missing:
                return victims
        return None

    def chosen(self) -> list[Chain]:
        """All chosen blocks, including those that were taken back."""
        return [chain for choice in self._choices for chain in choice.victims]

    # -- candidates ----------------------------------------------------------------------------------------------

    def _oldest_blocks(self, size: int, missing: int, until: Age | None) -> list[Chain]:
        """The oldest blocks that provide ``missing`` slots of this class, or all of them; none used after ``until``."""
        budget = self._budget
        shares = [share for share in self._shares if budget is None or budget.left(share)]
        return oldest_blocks(shares, size, missing, until, budget)

    def _oldest_slab(self, size: int, missing: int) -> _Choice | None:
        """All blocks of the least recently used place for a slab of this class that can be freed as a whole."""
        if self._allocator.leaves_gaps((size,)):
            return self._cheapest_place(size, missing)
        if size not in self._windows:
            self._windows[size], self._later[size] = self._allocator.windows(size)[::-1], []
        candidates, later, plan = self._windows[size], self._later[size], self._allocation
        while candidates or later:
            second = not candidates
            if second:
                candidates.extend(reversed(later))
                later.clear()
            window = candidates[-1]
            slabs = self._allocator.slabs.within(window.start, window.end)
            if not all(plan.is_whole(slab) for slab in slabs):
                if not second and any(choice.overlaps(window) for choice in self._choices):
                    later.append(candidates.pop())
                    continue
                owners = self._owners(slabs)
                if not _with_mark(REQUESTED, owners) and self._may_go(_with_mark(0, owners)):
                    return _Choice(_with_mark(0, owners), window.touched, window)
            candidates.pop()
        return None

    def _cheapest_place(self, size: int, missing: int) -> _Choice | None:
        """All blocks of the best place where slabs leave gaps: for the slots that are missing side by side, as each
        choice looks at all slabs, or for one."""
        together = min(missing, max(1, self._allocator.total_bytes // TOGETHER_SHARE // size))
        found = self._cheapest_place_for(size, together) if together > 1 else None
        return self._cheapest_place_for(size, 1) if found is None else found

    def _cheapest_place_for(self, size: int, slots: int) -> _Choice | None:
        """A block of the class itself that has a high priority is no part of it: such blocks go after all slabs."""
        plan = self._allocation
        for window in self._allocator.cheapest_windows(size, plan, slots):
            slabs = self._allocator.slabs.within(window.start, window.end)
            owners = self._owners([slab for slab in slabs if not plan.is_whole(slab)])
            spared = any(
                size in each.blocks.space.slot_sizes and np.any(each.blocks.priority[each.rows] == Priority.HIGH)
                for each in owners
            )
            victims = _with_mark(0, owners)
            if victims and not spared and not _with_mark(REQUESTED, owners) and self._may_go(victims):
                return _Choice(victims, window.touched, window)
        return None

    def _may_go(self, chains: Iterable[Chain]) -> bool:
        """Whether their shares can give all of these blocks."""
        if self._budget is None:
            return True
        nbytes: Counter[Share] = Counter()
        for chain in chains:
            nbytes[chain.blocks.space.share] += chain.blocks.bytes_of(chain.rows)
        return all(self._budget.left(share) >= each for share, each in nbytes.items())

    # -- the choice ----------------------------------------------------------------------------------------------

    def _mark(self, victims: Iterable[Chain], mark: int = VICTIM) -> None:
        plan = self._allocation.free if mark == VICTIM else self._allocation.undo_free
        for chain in victims:
            chain.blocks.marks[chain.rows] = mark
            plan(chain.blocks.sealed_slots(chain.rows))
            if self._budget is not None:
                nbytes = chain.blocks.bytes_of(chain.rows)
                self._budget.take(chain.blocks.space.share, nbytes if mark == VICTIM else -nbytes)

    def _take_back_unnecessary(self) -> None:
        """Take back each victim that the needs do not require, newest first. Only a whole slab is of use, so its blocks
        are taken back together."""
        for choice in sorted(self._choices, key=lambda choice: choice.last_used, reverse=True):
            if self._allocation.surplus() == 0:
                return  # every remaining victim is required
            for victims in self._one_by_one(choice) if choice.window is None else [choice.victims]:
                self._mark(victims, 0)
                if self._allocation.unmet() is not None:
                    self._mark(victims)

    def _one_by_one(self, choice: _Choice) -> list[list[Chain]]:
        """The blocks of a choice that might be unnecessary, newest first."""
        surplus, size = self._allocation.surplus(), self._allocation.largest
        chains = choice.victims
        if surplus is not None:  # only one class is needed: a block with more slots than the surplus is required
            chains = [Chain(chain.blocks, chain.rows[provided(chain, size) <= surplus]) for chain in chains]
        order = oldest_first(chains)[::-1] if any(len(chain.rows) for chain in chains) else []
        if len({chain.blocks.priority.item(chain.rows[0]) for chain in chains if len(chain.rows)}) > 1:
            ranks = [rank_of(chain) for chain in chains]
            order.sort(key=lambda each: -ranks[each[0]])
        return [[Chain(chains[queue].blocks, chains[queue].rows[at : at + 1])] for queue, at in order]

    def _owners(self, slabs: Iterable[int]) -> list[Chain]:
        """The blocks with a slot in any of these slabs, each once: its shards may lie in several."""
        owners = np.unique(np.concatenate([NO_INTS, *map(self._allocator.owners, slabs)]))
        numbers, rows = owners >> 32, owners & 0xFFFFFFFF
        return [Chain(self._tables[number], rows[numbers == number]) for number in np.unique(numbers).tolist()]


def _with_mark(mark: int, chains: Iterable[Chain]) -> list[Chain]:
    """The blocks of these chains that carry ``mark``, without empty chains."""
    marked = [Chain(each.blocks, each.rows[each.blocks.marks[each.rows] == mark], each.in_turn) for each in chains]
    return [chain for chain in marked if len(chain.rows)]
