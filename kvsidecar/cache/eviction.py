"""Chooses the blocks to evict. A policy orders blocks, `choose_victims` plans, and the cache evicts, as in Ray's plasma
store. Nothing here frees a slot.

How a plan is made. `AllocationPlan` counts what could be allocated if the victims chosen so far were gone, and names
the largest size class that still lacks slots. Two kinds of victims provide slots of that class: single blocks with a
slot of it, and all blocks of a slab of another class, which can then be cut anew. The least recently used victim goes
first; a slab counts as used when the newest of its blocks was. So blocks no newer than the oldest slab go first, then
that slab, then the blocks up to the next slab, and so on. If slabs did not take part in this order, a second model on
the node would never get more than its first slab.

"Used" is meant as the policy has it: `SpaceBlocks.ranks` are the ticks of the last uses (LRU), or what
`kvsidecar.cache.rhythm` makes of them. A slab goes by the last use alone.

A block is evicted as a whole, with its slots in other slabs and classes. A later victim may therefore provide what an
earlier one was chosen for. At the end the plan takes back the victims that turned out to be unnecessary, newest first.

Priorities order the blocks within a share. How much each share gives is decided by age alone, as if all blocks had the
same priority; then each share gives as much of its blocks of the lowest priority. So a share cannot hold what it has
borrowed by giving its blocks a high priority: it pays for them with its other blocks. A slab goes by its age alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from heapq import merge

import numpy as np

from kvsidecar.cache.arrays import NO_INTS, Ints
from kvsidecar.cache.block import NEVER, Chain, SpaceBlocks
from kvsidecar.cache.shares import Age, Budget, Share, Shares, TableOrder
from kvsidecar.cache.slots import SlotAllocator
from kvsidecar.cache.windows import Window
from kvsidecar.types import EVICTION_ORDER, Priority

REQUESTED, VICTIM = 1, 2
"""Values of `SpaceBlocks.marks` during planning."""
AHEAD_SLOTS = 256
"""The most slots to free beyond the need: the next stores find them. To evict 32 blocks takes half of the time of a
store of as many; to evict eight times as many takes little longer (measured)."""
AHEAD_SHARE = 64
"""No more than this part of the pool is freed ahead: that much of the cache is empty at worst."""
TOGETHER_SHARE = 32
"""Large slots that a store has in one place have no more than this part of the pool."""

Queue = tuple[SpaceBlocks, Priority]
"""The blocks of one priority of a table."""


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

    Some more are chosen than this request needs, in the same order, if there are so many. A share gives what it has
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
    """The oldest blocks of one share that free so many bytes, or all; no more than ``most_blocks`` of each space."""
    try:
        for chain in requested:
            chain.blocks.marks[chain.rows] = REQUESTED
        victims = _oldest([share], None, nbytes, None)
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


def _oldest(
    shares: Iterable[Share], size: int | None, missing: int, until: Age | None, budget: Budget | None = None
) -> list[Chain]:
    """The oldest blocks of these shares that provide ``missing`` slots of a class, or bytes if there is none, or all of
    them; none used after ``until``. It looks at the tables that have some of the oldest blocks, and few more."""
    shares = list(shares)
    ranked = [share for share in shares if share.ranked]
    if ranked == shares and len(shares) == 1:
        return _lowest_first(shares[0], size, missing, until, budget)[0]
    found, _ = _by_age(
        [order for share in shares for order in share.orders.values() if order], size, missing, until, budget
    )
    for share in ranked:
        given = [chain for chain in found if chain.blocks.space.share is share]
        amount = sum([int(_provided(chain, size).sum()) for chain in given])
        instead, left = _lowest_first(share, size, amount, None, budget)
        if left <= 0:  # else blocks of several sizes stand in the way
            found = [chain for chain in found if chain.blocks.space.share is not share] + instead
    return found


def _lowest_first(
    share: Share, size: int | None, missing: int, until: Age | None, budget: Budget | None
) -> tuple[list[Chain], int]:
    """`_by_age` of one share, blocks of a lower priority first. When slabs are asked as well (``until``), all blocks of
    a low priority go before any slab, and all slabs before blocks of a high one."""
    found: list[Chain] = []
    for priority, order in share.orders.items():
        if missing <= 0 or (until is not None and priority is Priority.HIGH):
            break
        if order:
            limit = None if priority is Priority.LOW else until
            chains, missing = _by_age([order], size, missing, limit, _less(budget, found))
            found += chains
    return found, missing


def _less(budget: Budget | None, taken: Iterable[Chain]) -> Budget | None:
    """What is left of a budget when these blocks are evicted."""
    return (
        None
        if budget is None
        else budget.without((each.blocks.space.share, each.blocks.bytes_of(each.rows)) for each in taken)
    )


def _by_age(
    orders: Iterable[TableOrder], size: int | None, missing: int, until: Age | None, budget: Budget | None
) -> tuple[list[Chain], int]:
    """The oldest blocks of these orders, as `_oldest`, and what is missing still."""
    tables: list[Queue] = []
    with ExitStack() as streams:
        streams_of = [streams.enter_context(closing(order.oldest_first())) for order in orders]
        for age, _, priority, blocks in merge(*streams_of):
            if until is not None and age > until:
                break
            if size is not None and size not in blocks.space.slot_sizes:
                continue
            if len(tables).bit_count() == 1:  # not each time: it visits all of them
                found, left = _oldest_in(tables, size, missing, (age[0], age[1] - 1), budget)
                if left <= 0:
                    return found, left
            tables.append((blocks, priority))
    return _oldest_in(tables, size, missing, until, budget)


def _oldest_in(
    tables: Iterable[Queue], size: int | None, missing: int, until: Age | None, budget: Budget | None
) -> tuple[list[Chain], int]:
    """`_oldest` of these tables, and what is missing still."""
    ordered = sorted(tables, key=lambda table: (table[0].number, table[1]))
    found = [_candidates(blocks, priority, size, missing, until) for blocks, priority in ordered]
    found = [each for each in found if len(each[1])]
    queues = [queue for queue, _ in found]
    if (
        budget is not None
        and len(queues) < 2
        and all(each.blocks.bytes_of(each.rows) <= budget.left(each.blocks.space.share) for each in queues)
    ):
        budget = None  # it allows all of them
    if not queues or (len(queues) == 1 and budget is None):
        return queues, missing - sum([int(amounts.sum()) for _, amounts in found])  # cut to length by `_candidates`
    given = [amounts.tolist() for _, amounts in found]
    costs = [] if budget is None else [each.blocks.bytes_of_each(each.rows).tolist() for each in queues]
    left = (
        {} if budget is None else {share: budget.left(share) for share in {each.blocks.space.share for each in queues}}
    )
    chosen: list[list[int]] = [[] for _ in queues]
    for at, position in oldest_first(queues):
        if missing <= 0:
            break
        if budget is not None:
            share, cost = queues[at].blocks.space.share, costs[at][position]
            if cost > left[share]:
                continue
            left[share] -= cost
        missing -= given[at][position]
        chosen[at].append(position)
    chains = [Chain(each.blocks, each.rows[positions]) for each, positions in zip(queues, chosen, strict=True)]
    return [chain for chain in chains if len(chain.rows)], missing


def _candidates(
    blocks: SpaceBlocks, priority: Priority, size: int | None, missing: int, until: Age | None
) -> tuple[Chain, Ints]:
    """`_by_age` of the blocks of one table with this priority, and what each of these blocks provides."""
    pieces: list[Ints] = []
    given: list[Ints] = []
    one_shard = blocks.space.num_shards == 1
    each = 1 if size is not None else blocks.space.slot_sizes[0]
    """What a block of one shard provides."""
    for piece in blocks.candidates(priority):
        rows = piece[blocks.marks[piece] == 0]
        if until is not None:
            rows = rows[blocks.no_younger(rows, until)]
        if one_shard:
            rows = rows[: -(-missing // each)]
            missing -= len(rows) * each
        else:
            amounts = _provided(Chain(blocks, rows), size)
            rows, amounts = rows[amounts > 0], amounts[amounts > 0]
            enough = int(np.searchsorted(amounts.cumsum(), missing)) + 1
            rows, amounts = rows[:enough], amounts[:enough]
            missing -= int(amounts.sum())
            given.append(amounts)
        pieces.append(rows)
        if missing <= 0 or (until is not None and len(piece) and not blocks.no_younger(piece[-1:], until).item()):
            break
    found = pieces[0] if len(pieces) == 1 else np.concatenate((NO_INTS, *pieces))
    return Chain(blocks, found), np.full(len(found), each) if one_shard else np.concatenate((NO_INTS, *given))


def _provided(chain: Chain, size: int | None) -> Ints:
    """Number of slots of this class that each block provides, or its bytes if there is none."""
    blocks = chain.blocks
    if size is None:
        return blocks.bytes_of_each(chain.rows)
    if blocks.space.num_shards == 1:
        return np.ones(len(chain.rows), np.int64)
    shards = [shard for shard, slot_size in enumerate(blocks.space.slot_sizes) if slot_size == size]
    gives: Ints = (blocks.slots[np.array(shards)[:, None], chain.rows] >= 0).sum(axis=0)
    return gives


def _rank_of(queue: Chain) -> int:
    """How late the blocks of a queue go: their place in `EVICTION_ORDER`."""
    return EVICTION_ORDER.index(Priority(queue.blocks.priority.item(queue.rows[0]))) if len(queue.rows) else 0


def oldest_first(queues: Sequence[Chain]) -> list[tuple[int, int]]:
    """The eviction order of the blocks of several spaces, as (queue, position in it) pairs.

    The order is by `SpaceBlocks.ranks`, then by tick of the last use. The groups of one request share a tick and
    alternate: a prefix that is lost in one group is useless in the others.

    Args:
        queues: the candidates of each space, oldest first.
    """
    ticks = [queue.blocks.last_used[queue.rows] for queue in queues]
    keys = [np.concatenate(ticks)]
    if any(queue.blocks.reorders for queue in queues):
        ranks = [queue.blocks.ranks(queue.rows) for queue in queues]
        rounds = [_places_in_runs(rank, tick) for rank, tick in zip(ranks, ticks, strict=True)]
        keys.append(np.concatenate(ranks))
    else:
        rounds = [np.arange(len(tick)) - np.searchsorted(tick, tick) for tick in ticks]
    number = np.repeat(np.arange(len(queues)), [len(tick) for tick in ticks])
    position = np.concatenate([np.arange(len(tick)) for tick in ticks])
    order = np.lexsort((number, np.concatenate(rounds), *keys))
    return list(zip(number[order].tolist(), position[order].tolist(), strict=True))


def _places_in_runs(ranks: Ints, ticks: Ints) -> Ints:
    """The place of each block among those with the same rank and tick, which are neighbours."""
    places = np.arange(len(ticks))
    starts = np.ones(len(ticks), np.bool_)
    starts[1:] = (ticks[1:] != ticks[:-1]) | (ranks[1:] != ranks[:-1])
    found: Ints = places - np.maximum.accumulate(np.where(starts, places, 0))
    return found


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
        """The same of those that overlap a place that was chosen: what is left of one may provide nothing."""

    def hopeless(self) -> bool:
        """Whether all that may go would not be enough: to find that out block by block would visit every one."""
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
                newest = max(chain.blocks.ranks(chain.rows[-1:]).item() for chain in blocks)
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
            chain, _ = _candidates(blocks, priority, unmet.size, missing, None)
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
        return _oldest(shares, size, missing, until, budget)

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
            plan(chain.blocks.held_slots(chain.rows))
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
            chains = [Chain(chain.blocks, chain.rows[_provided(chain, size) <= surplus]) for chain in chains]
        order = oldest_first(chains)[::-1] if any(len(chain.rows) for chain in chains) else []
        if len({chain.blocks.priority.item(chain.rows[0]) for chain in chains if len(chain.rows)}) > 1:
            ranks = [_rank_of(chain) for chain in chains]
            order.sort(key=lambda each: -ranks[each[0]])
        return [[Chain(chains[queue].blocks, chains[queue].rows[at : at + 1])] for queue, at in order]

    def _owners(self, slabs: Iterable[int]) -> list[Chain]:
        """The blocks with a slot in any of these slabs, each once: its shards may lie in several."""
        owners = np.unique(np.concatenate([NO_INTS, *map(self._allocator.owners, slabs)]))
        numbers, rows = owners >> 32, owners & 0xFFFFFFFF
        return [Chain(self._tables[number], rows[numbers == number]) for number in np.unique(numbers).tolist()]


def _with_mark(mark: int, chains: Iterable[Chain]) -> list[Chain]:
    """The blocks of these chains that carry ``mark``, without empty chains."""
    marked = [Chain(each.blocks, each.rows[each.blocks.marks[each.rows] == mark]) for each in chains]
    return [chain for chain in marked if len(chain.rows)]
