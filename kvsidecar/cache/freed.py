"""Keeps track of the pool's pages that hold bytes of blocks that are gone, and are to be zeroed.

A store may take a freed slot whose bytes are still there: it writes over all of them before anybody can read the slot.
So nothing waits for the zeroing, and no store is refused for it. But a page that is being zeroed may be given out
meanwhile, too: the store then has to wait until that is over (`Freed.is_zeroing`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from kvsidecar.cache.arrays import FEW, Ints

PAGE_BYTES = 4096
_DIRTY, _ZEROING = 1, 2
_VISITS = 4096
"""Most runs of pages to look at in one step."""
_WINDOW = 1 << 16
"""Most pages of a run to look at at once."""


@dataclass(slots=True)
class _Runs:
    """Runs of pages that were freed at about the same time."""

    turn: int
    starts: list[int]
    ends: list[int]
    at: int = 0
    """The first run that was not looked at."""


class Freed:
    """The pages to zero, in the order in which they were freed. A page leaves it when a store takes its slot.

    Args:
        pool_bytes: size of the pool; a multiple of `PAGE_BYTES`.
        unknown: whether the pool may hold bytes of an earlier daemon: then all pages are to be zeroed, but those of
            slots that are taken over.
    """

    def __init__(self, pool_bytes: int, *, unknown: bool = False) -> None:
        count = pool_bytes // PAGE_BYTES
        self._pages = np.full(count, _DIRTY, np.uint8) if unknown else np.zeros(count, np.uint8)
        self._left = count if unknown else 0
        self._turn = 1
        self._waiting = deque([_Runs(0, [0], [count])] if unknown else [])
        self._zeroing: list[tuple[int, int]] = []

    @property
    def nbytes(self) -> int:
        """Bytes that are to be zeroed, or are being zeroed."""
        return self._left * PAGE_BYTES

    def add(self, slots: Ints, sizes: Ints | int) -> None:
        """Add slots that have been freed, or will never be used again.

        Args:
            sizes: bytes of all slots, or of each.
        """
        starts, ends = _runs(slots, sizes)
        for start, end in zip(starts, ends, strict=True):
            piece = self._pages[start:end]
            self._left += end - start - int(np.count_nonzero(piece))
            piece |= _DIRTY
        self._waiting.append(_Runs(self._turn, starts, ends))

    def take_out(self, slots: Ints, sizes: Ints | int) -> None:
        """Remove slots that have been given out."""
        for start, end in zip(*_runs(slots, sizes), strict=True):
            piece = self._pages[start:end]
            self._left -= int(np.count_nonzero(piece == _DIRTY))
            piece &= _ZEROING

    def is_zeroing(self, slots: Ints, size: int) -> bool:
        """Whether any byte of these slots is being zeroed."""
        if not self._zeroing:
            return False
        return any(
            bool(np.count_nonzero(self._pages[start:end] & _ZEROING))
            for start, end in zip(*_runs(slots, size), strict=True)
        )

    def next_turn(self) -> None:
        """Allow zeroing of what has been freed so far. What is freed later waits for the next turn: most of it is given
        out again soon, and need not be zeroed."""
        self._turn += 1

    def begin(self, most_bytes: int) -> list[tuple[int, int]]:
        """Offset and length of pieces to zero now; none may be being zeroed already. Empty: there are none to be found
        in this turn."""
        left, pieces = most_bytes // PAGE_BYTES, self._zeroing
        for _ in range(_VISITS):
            if not left or not self._waiting or self._waiting[0].turn >= self._turn:
                break
            runs = self._waiting[0]
            start = runs.starts[runs.at]
            end = min(runs.ends[runs.at], start + _WINDOW)
            dirty = (self._pages[start:end] & _DIRTY).nonzero()[0][:left]
            left -= len(dirty)
            if not left:
                end = start + int(dirty[-1]) + 1
            self._pages[start:end][dirty] = _ZEROING
            pieces += _pieces(dirty + start)
            runs.starts[runs.at] = end
            if end >= runs.ends[runs.at]:
                runs.at += 1
                if runs.at == len(runs.starts):
                    self._waiting.popleft()
        return pieces

    @property
    def waits(self) -> bool:
        """Whether there is more to look at in this turn."""
        return bool(self._waiting) and self._waiting[0].turn < self._turn

    def end(self) -> None:
        """Note that what `begin` has returned is zeroed."""
        for offset, nbytes in self._zeroing:
            piece = self._pages[offset // PAGE_BYTES : (offset + nbytes) // PAGE_BYTES]
            self._left -= int(np.count_nonzero(piece == _ZEROING))
            piece &= _DIRTY  # of those that were given out and freed again meanwhile
        self._zeroing = []


def _runs(slots: Ints, sizes: Ints | int) -> tuple[list[int], list[int]]:
    """First page and end of each run of adjacent slots."""
    if len(slots) <= FEW and isinstance(sizes, int):
        starts = [slot // PAGE_BYTES for slot in slots.tolist()]
        return starts, [start + sizes // PAGE_BYTES for start in starts]
    first = slots // PAGE_BYTES
    end = first + np.asarray(sizes, np.int64) // PAGE_BYTES
    order = first.argsort(kind="stable")
    first, end = first[order], end[order]
    breaks = (first[1:] != end[:-1]).nonzero()[0]
    return first[[0, *(breaks + 1)]].tolist(), end[[*breaks, len(end) - 1]].tolist()


def _pieces(pages: Ints) -> list[tuple[int, int]]:
    """Offset and length of each run of these ascending pages."""
    if not len(pages):
        return []
    breaks = (pages[1:] != pages[:-1] + 1).nonzero()[0]
    starts, ends = pages[[0, *(breaks + 1)]].tolist(), pages[[*breaks, len(pages) - 1]].tolist()
    return [(start * PAGE_BYTES, (end + 1 - start) * PAGE_BYTES) for start, end in zip(starts, ends, strict=True)]
