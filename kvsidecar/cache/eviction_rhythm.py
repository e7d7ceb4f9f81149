"""The eviction policy ``rhythm``: blocks go first whose next use is expected latest, judging by their past.

Requests that come back in turns, as those of coding agents do, defeat an order by the last use alone (LRU): in a pool
that does not hold all sessions, what will be used next is just what has waited longest. So a block keeps its *gap*, the
usual time from the end of one use to the beginning of the next. It moves by at most an octave with each use, so that
one pause changes little. A block that is new has that of its prompt (`kvsidecar.cache.prompts`).

The blocks are in classes by their gaps, one per octave, each a queue of `LRUQueues` in the order of the last use. A
class has a *patience*: how long a next use of its blocks is waited for. However long they have waited already, they go
before those of classes with less patience. The victim is the block with the longest patience, or time without a use if
that is longer already; among equals, the one whose last use is the oldest, and the deepest of a prefix. In ticks: a
block counts as last used when it was, or at `Rhythm.horizons` of its class (now minus the patience) if that is earlier.
With a single class that is LRU.

The code that runs the sessions may know more: how long the next pause is, or that there is no next use at all. A block
with such an announcement has a class for it, with a patience of its own, until its next use (`announced_gap`).

Old blocks stay rather than new ones: a block is not stored in the place of one that is of its class or the next, and
that has not waited for longer than the next class's patience. Otherwise sessions that return equally soon would take
each other's places for ever, and none would be hit.

The order is LRU's, and everything is stored, until LRU would have hit less than four fifths of what came back recently,
and again where it would have hit clearly more than this policy (`Rhythm.on`). In a pool that nearly suffices, all that
is declined is lost: it would have been there when it came back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from math import inf, log2

import numpy as np
import numpy.typing as npt

from kvsidecar.cache.arrays import Bytes, Ints, all_true, only_value
from kvsidecar.cache.use_times import UseTimes

STEP_BITS = 3
STEPS = 1 << STEP_BITS
"""Values of a gap in an octave: a gap of g seconds has the value ``STEPS * log2(g)``."""
MOST_SECONDS = 1 << 17
"""36 hours; longer gaps count as this one."""
MOST_GAP = STEPS * 17
FIRST_GAP = round(STEPS * log2(10))
"""The gap of a block about which nothing is known: 10 seconds, the median of coding agents."""
CLASSES = MOST_GAP // STEPS + 1
PATIENCE = tuple(5.0 * 2.0 ** (number / 2) for number in range(CLASSES))
"""Each class's patience in seconds: 5 times the root of its gap. A gap of 10 seconds gets 16, one of 5 minutes 87: the
next gap is mostly nearer to the gap of all sessions than the block's usual one is."""

NEVER = 1 << 62
"""A tick later than any."""

ANNOUNCED = STEPS * CLASSES
"""Gaps from this one on are announced pauses: an octave each, then `OVER`."""
ANNOUNCED_CLASSES = 13
MOST_ANNOUNCED = 1 << ANNOUNCED_CLASSES - 2
"""34 minutes; longer announced pauses count as this one."""
OVER = ANNOUNCED + STEPS * (ANNOUNCED_CLASSES - 1)
"""The gap that announces that there will be no next use."""
ANNOUNCED_PATIENCE = tuple(2.0**number for number in range(ANNOUNCED_CLASSES - 1))
"""Patience of these classes, but of the last, which gets none: the pause itself. Its announcement is made with
knowledge of what it is for, which a usual gap lacks."""

ENOUGH, TOO_LITTLE = 0.85, 0.8
"""LRU's order begins when it would hit more than the first of what is known, and ends when less than the second."""
CLEARLY = 1.3
"""When LRU would recently have hit this many times as much, the order is LRU's for `TRY_AGAIN`."""
FIRST_POOLS, LATE_POOLS, TRY_AGAIN = 2.0, 8.0, 32.0
"""Known bytes that are looked up, as multiples of the pool's size: hits of LRU that are assumed at the start; how far
back a hit counts a third; and when the policy is tried again. In bytes, not lookups: a few long prompts fill a pool, or
many short ones."""

Stream = tuple[Iterator[Ints], int, int, int]
"""The blocks of one class in the order of their last use, its horizon, its number, and a tick that is not later than
any of these uses."""


def class_of(gaps: Bytes) -> Bytes:
    """The class of each of these gaps; that of the longest is the highest."""
    classes: Bytes = (gaps + np.uint8(STEPS // 2)) >> np.uint8(STEP_BITS)  # to divide bytes takes ten times as long
    return classes


CLASS_OF = tuple(class_of(np.arange(OVER + 1, dtype=np.uint8)).tolist())
"""The class of each gap."""


def announced_gap(seconds: float) -> int:
    """The gap of a block whose next use is announced in this many seconds; infinity: there will be none."""
    if seconds == inf:
        return OVER
    return ANNOUNCED + STEPS * round(log2(min(max(seconds, 1.0), MOST_ANNOUNCED)))


class Rhythm:
    """The clock of the policy, for all tables of a cache.

    Args:
        times: when ticks were.
        on_switch: called when `on` has changed, and with it the order of the blocks.
    """

    def __init__(self, times: UseTimes, on_switch: Callable[[], None] = lambda: None) -> None:
        self._times, self._on_switch = times, on_switch
        self._now = 0.0
        self._hit = self._lru_hit = 1.0
        """The shares of recent prompts' known blocks that were hit, and that LRU would have hit."""
        self._late = FIRST_POOLS
        """What these are shares of, as a multiple of the pool."""
        self._rest = 0.0
        """Multiple of the pool that is to be looked up before the policy may be tried again."""
        self.on = False
        """False: LRU hits enough, or clearly more. Then blocks go by their last use, but first those that are announced
        not to be used again."""
        self.horizons: Ints = np.full(CLASSES + ANNOUNCED_CLASSES, NEVER, np.int64)
        """Each class's tick that is as long ago as its patience: blocks used later are still waited for."""
        self.horizons[-1] = -2  # before all others, whose earliest is -1

    def set_time(self, now: float) -> None:
        """It is ``now``, in seconds on the cache's clock."""
        self._now = now
        if not self.on:
            self.horizons[:-1] = NEVER
            return
        self.horizons[:-1] = [self._times.last_tick(now - patience) for patience in (*PATIENCE, *ANNOUNCED_PATIENCE)]

    def count(self, hit: int, lru_hit: int, known: int, pools: float) -> None:
        """Count a lookup of a prompt with known blocks.

        Args:
            hit: how many known blocks were hit.
            lru_hit: how many LRU would have hit.
            known: at least 1.
            pools: size of the known blocks, as a multiple of the pool.
        """
        self._late = min(self._late + pools, LATE_POOLS)
        weight = min(pools / self._late, 1.0)
        self._hit += weight * (hit / known - self._hit)
        self._lru_hit += weight * (lru_hit / known - self._lru_hit)
        self._rest -= pools
        was_on = self.on
        if self.on:
            lost = self._lru_hit > CLEARLY * self._hit
            self._rest = TRY_AGAIN if lost else 0.0
            self.on = not lost and self._lru_hit <= ENOUGH
        elif self._rest <= 0 and self._lru_hit < TOO_LITTLE:
            self.on, self._hit = True, self._lru_hit  # what other orders hit says nothing of this one
        if self.on != was_on:
            self.set_time(self._now)
            self._on_switch()

    def ranks(self, gaps: Bytes, last_used: Ints) -> Ints:
        """Blocks with the lowest rank go first; a rank is a tick.

        Args:
            last_used: tick of each block's last use.
        """
        ranks: Ints = np.minimum(last_used, self.horizons[class_of(gaps)])
        return ranks

    def rank(self, gap: int, last_used: int) -> int:
        """`ranks` of one block."""
        return min(last_used, self.horizons.item(CLASS_OF[gap]))

    def rank_of_new(self, gap: int) -> int:
        """The tick that limits the victims of a new block with this gap: it replaces only blocks with a lower rank, or
        last used at this tick or before."""
        return self.horizons.item(min(CLASS_OF[gap] + 1, CLASSES - 1))

    def use(self, gaps: Bytes, last_used: Ints, rows: Ints) -> None:
        """Change the gaps of blocks that are used now. Uses within a second are one. Announcements end with this use.

        Args:
            last_used: ticks of the last uses of all blocks.
            rows: at least one.
        """
        used, before = last_used[rows], gaps[rows]
        gap = only_value(before)
        if gap is not None and all_true(used == used[0]):  # a prompt, as nearly always
            after = moved(
                gap if gap < ANNOUNCED else FIRST_GAP, self._now - self._times.before(used.item(0), self._now)
            )
            if after != gap:
                gaps[rows] = after
        else:
            gaps[rows] = self._after(before, used)

    def _after(self, gaps: Bytes, last_used: Ints) -> Bytes:
        """The gaps of blocks that are used now, and were last used at these ticks."""
        gaps = np.where(gaps < ANNOUNCED, gaps, np.uint8(FIRST_GAP))
        seconds = self._now - self._times.earliest(last_used, self._now)
        found = np.rint(STEPS * np.log2(np.clip(seconds, 1.0, MOST_SECONDS)))
        moves = np.clip(found - gaps, -STEPS, STEPS)
        moved: Bytes = np.where(seconds >= 1.0, gaps + moves, gaps).astype(np.uint8)
        return moved


def moved(gap: int, seconds: float) -> int:
    """A gap after one more pause of this many seconds; see `Rhythm.use` for the rules."""
    if seconds < 1.0:
        return gap
    found = round(STEPS * log2(min(seconds, MOST_SECONDS)))
    return gap + min(max(found - gap, -STEPS), STEPS)


def in_order(streams: Iterable[Stream], last_used: npt.NDArray[np.int64]) -> Iterator[Ints]:
    """The blocks of all classes by rank, in pieces. Nothing may change while the iterator is in use.

    Args:
        last_used: per row the tick of its last use.
    """
    # A class is opened only when its turn may have come: an eviction mostly needs one or two of them.
    # Of blocks that were used together the longer gap goes first: it is the deeper part of a prefix.
    heads: list[tuple[int, int, int, Ints | None, Iterator[Ints], int]] = [
        (min(oldest, horizon), oldest, -number, None, stream, horizon) for stream, horizon, number, oldest in streams
    ]
    heapify(heads)
    while heads:
        _, _, number, rows, stream, horizon = heappop(heads)
        if rows is None:
            rows = next(stream, None)
        elif heads:
            count = _before(last_used[rows], horizon, number, heads[0][:3])
            yield rows[:count]
            rows = rows[count:] if count < len(rows) else next(stream, None)
        while rows is not None:
            last = last_used.item(rows.item(-1))
            if heads and (min(last, horizon), last, number) > heads[0]:
                used = last_used.item(rows.item(0))
                heappush(heads, (min(used, horizon), used, number, rows, stream, horizon))
                break
            yield rows
            rows = next(stream, None)


def _before(used: Ints, horizon: int, number: int, other: tuple[int, int, int]) -> int:
    """How many of the first blocks of a class go before the first of another class: at least one.

    Args:
        used: ticks of their last uses, ascending.
        other: rank and last use of the other class's first block, and the class's number.
    """
    rank, last_used, other_number = other
    if horizon < rank:
        return len(used)
    if horizon > rank and last_used > rank:
        number, last_used = other_number - 1, rank
    return max(1, int(np.searchsorted(used, last_used, "right" if number < other_number else "left")))
