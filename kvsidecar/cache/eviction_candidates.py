"""The candidates for eviction in their order: those of one table, of a share by priority, and of all shares by age.

Changes nothing. Blocks that carry a mark (`SpaceBlocks.marks`) are left out: they are chosen already, or wanted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from heapq import merge

import numpy as np

from kvsidecar.cache.arrays import NO_INTS, Ints
from kvsidecar.cache.grants import Chain
from kvsidecar.cache.shares import Age, Budget, Share, TableOrder
from kvsidecar.cache.space_blocks import SpaceBlocks
from kvsidecar.types import EVICTION_ORDER, Priority

Queue = tuple[SpaceBlocks, Priority]
"""The blocks of one priority of a table."""


def oldest_blocks(
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
        amount = sum([int(provided(chain, size).sum()) for chain in given])
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
    """The rest of a budget when these blocks are evicted."""
    return (
        None
        if budget is None
        else budget.without((each.blocks.space.share, each.blocks.bytes_of(each.rows)) for each in taken)
    )


def _by_age(
    orders: Iterable[TableOrder], size: int | None, missing: int, until: Age | None, budget: Budget | None
) -> tuple[list[Chain], int]:
    """The `oldest_blocks` of these orders, and what is still missing."""
    tables: list[Queue] = []
    with ExitStack() as streams:
        streams_of = [streams.enter_context(closing(order.oldest_first())) for order in orders]
        for age, _, priority, blocks in merge(*streams_of):
            if until is not None and age > until:
                break
            if size is not None and size not in blocks.space.slot_sizes:
                continue
            if len(tables).bit_count() == 1:  # at 1, 2, 4, 8... tables, because it visits all of them
                found, left = _oldest_in(tables, size, missing, (age[0], age[1] - 1), budget)
                if left <= 0:
                    return found, left
            tables.append((blocks, priority))
    return _oldest_in(tables, size, missing, until, budget)


def _oldest_in(
    tables: Iterable[Queue], size: int | None, missing: int, until: Age | None, budget: Budget | None
) -> tuple[list[Chain], int]:
    """The `oldest_blocks` of these tables, and what is still missing."""
    ordered = sorted(tables, key=lambda table: (table[0].number, table[1]))
    found = [candidates_of(blocks, priority, size, missing, until) for blocks, priority in ordered]
    found = [each for each in found if len(each[1])]
    queues = [queue for queue, _ in found]
    if (
        budget is not None
        and len(queues) < 2
        and all(each.blocks.bytes_of(each.rows) <= budget.left(each.blocks.space.share) for each in queues)
    ):
        budget = None  # it allows all of them
    if not queues or (len(queues) == 1 and budget is None):
        return queues, missing - sum([int(amounts.sum()) for _, amounts in found])  # cut to length by `candidates_of`
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
    chains = [
        Chain(each.blocks, each.rows[positions], each.in_turn) for each, positions in zip(queues, chosen, strict=True)
    ]
    return [chain for chain in chains if len(chain.rows)], missing


def candidates_of(
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
            amounts = provided(Chain(blocks, rows), size)
            rows, amounts = rows[amounts > 0], amounts[amounts > 0]
            enough = int(np.searchsorted(amounts.cumsum(), missing)) + 1
            rows, amounts = rows[:enough], amounts[:enough]
            missing -= int(amounts.sum())
            given.append(amounts)
        pieces.append(rows)
        if missing <= 0 or (until is not None and len(piece) and not blocks.no_younger(piece[-1:], until).item()):
            break
    found = pieces[0] if len(pieces) == 1 else np.concatenate((NO_INTS, *pieces))
    return Chain(blocks, found, in_turn=True), np.full(len(found), each) if one_shard else np.concatenate(
        (NO_INTS, *given)
    )


def provided(chain: Chain, size: int | None) -> Ints:
    """Number of slots of this class that each block provides, or its bytes if there is none."""
    blocks = chain.blocks
    if size is None:
        return blocks.bytes_of_each(chain.rows)
    if blocks.space.num_shards == 1:
        return np.ones(len(chain.rows), np.int64)
    shards = [shard for shard, slot_size in enumerate(blocks.space.slot_sizes) if slot_size == size]
    gives: Ints = (blocks.slots[np.array(shards)[:, None], chain.rows] >= 0).sum(axis=0)
    return gives


def rank_of(queue: Chain) -> int:
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
