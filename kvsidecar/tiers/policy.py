"""What is worth writing to a slower tier, and worth fetching from it. Pure: the caller brings the clock."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

DAY_SECONDS: Final = 86400.0
GUESSED_RATE: Final = 1e9
"""Bytes a second that a tier is expected to read before it has read anything."""
OLD_READS: Final = 0.8
"""Weight of earlier reads beside the newest one."""
GUESSED_PREFILL: Final = 20_000.0
"""Tokens a second that an engine is assumed to compute if it does not tell: an 8B model on one large GPU."""


class Admission(StrEnum):
    """The blocks that are written to a tier."""

    SECOND_USE = "second_use"
    """Blocks that are used again after they were stored: most of what is stored never is."""
    ALL = "all"
    """Every block, when it has been stored."""
    ON_EVICT = "on_evict"
    """Every block that the pool is about to evict."""
    NONE = "none"
    """None. What is there can be fetched."""


class FetchRefusal(StrEnum):
    """Why blocks that a tier may have are not fetched."""

    OFF = "off"
    """The tier has failed, or its process has ended."""
    SLOWER = "slower"
    """Computing them again is expected to take less time, or the engine cannot wait that long."""
    POOL_FULL = "pool_full"
    """There is no room in the pool."""
    BUSY = "busy"
    """Too many blocks are being fetched."""
    ABANDONED = "abandoned"
    """Nobody has asked for them again."""
    FAILED = "failed"
    """The tier could not read them, or they were not what had been written."""
    LATE = "late"


class WriteRefusal(StrEnum):
    """Why blocks that a tier should have are not written."""

    OFF = "off"
    QUEUE = "queue"
    """Too many bytes wait to be written; or the block was evicted before its turn."""
    BUDGET = "budget"
    """The day's budget of bytes is used up."""
    FULL = "full"
    """The tier has no room that it may free."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a fetch is expected to cost."""

    nbytes: int
    waiting_bytes: int
    """Bytes that are fetched before."""
    rate: float
    """Bytes a second that the tier reads."""
    tokens: int
    """Tokens that the engine need not compute."""
    prefill_rate: float
    """Tokens a second that the engine computes; 0 if unknown."""

    @property
    def seconds(self) -> float:
        return (self.nbytes + self.waiting_bytes) / self.rate

    @property
    def worth_it(self) -> bool:
        """True if it is expected to beat the computation."""
        return self.seconds < self.tokens / (self.prefill_rate or GUESSED_PREFILL)


class ReadRate:
    """How fast a tier reads: all calls together, of which several run at a time."""

    def __init__(self) -> None:
        self._nbytes = self._seconds = 0.0
        self._ended = -math.inf

    @property
    def value(self) -> float:
        """Bytes a second, of the last reads mostly."""
        return self._nbytes / self._seconds if self._seconds else GUESSED_RATE

    def ended(self, nbytes: int, began: float, now: float) -> None:
        """Count a call that has read this many bytes. The time that other calls took meanwhile is theirs."""
        self._nbytes = OLD_READS * self._nbytes + nbytes
        self._seconds = OLD_READS * self._seconds + now - max(began, self._ended)
        self._ended = now


class WriteBudget:
    """Bytes that may be written in a day, spent evenly: what is not written in an hour is left for the next ones.

    Args:
        per_day: None for no limit.
    """

    def __init__(self, per_day: int | None, now: float) -> None:
        self._per_day, self._left, self._at = per_day, float(per_day or 0), now

    def left(self, now: float) -> int | None:
        """Bytes that may be written now; None for no limit."""
        if self._per_day is None:
            return None
        self._left = min(self._per_day, self._left + (now - self._at) * self._per_day / DAY_SECONDS)
        self._at = now
        return max(0, int(self._left))

    def take(self, blocks: int, block_bytes: int, now: float) -> int:
        """Spend the bytes of as many of these blocks as the budget allows. Returns how many."""
        left = self.left(now)
        if left is None:
            return blocks
        blocks = min(blocks, left // block_bytes)
        self._left -= blocks * block_bytes
        return blocks

    def spend(self, nbytes: int, now: float) -> None:
        """Spend bytes that are written in any case."""
        self.left(now)
        self._left -= nbytes

    def at_most(self, nbytes: int) -> None:
        """Lower the budget to what was left when the tier was last asked."""
        self._left = min(self._left, nbytes)
