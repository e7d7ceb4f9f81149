"""The order in which blocks go. `kvsidecar.cache.eviction` decides which of them go."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvsidecar.cache.arrays import FEW, Ints, extended, unique_counts, zeros

SEGMENT_BITS = 10
SEGMENT = 1 << SEGMENT_BITS
WINDOW = 32
"""Entries of the log that are looked at first; then twice as many, and so on."""


class LruPolicy:
    """The order in which one space gives up its blocks, least recently used first. It has exactly the blocks that are
    evictable right now.

    It is a log of uses in which only the last entry of a block counts.

    A removed block leaves its entry behind, so that a use costs one write and no search. Segments without a living
    entry are dropped; neighbours that together fit into one are merged, two pairs for every new segment, so the log
    stays within about twice the number of blocks.
    """

    def __init__(self, capacity: int) -> None:
        self._place: Ints = zeros((capacity,), np.int64)
        """Per row one more than the number of its living entry in the log; 0 for a row without one."""
        self._end = 0
        """Number of the next entry."""
        self._segments: dict[int, npt.NDArray[np.int32]] = {}
        """Segment -> its rows; the oldest segment first."""
        self._living: dict[int, int] = {}
        """Segment -> its living entries."""
        self._oldest = 0
        """No entry before this one is living, so that one eviction after the other need not search for it."""
        self._to_merge: Iterator[tuple[int, int]] = iter(())

    def insert(self, rows: Ints) -> None:
        """These blocks, each once, have become evictable, just used.

        Blocks of one request come the deepest first: a prefix is useless without its head, so of one request the
        block that came first should go last.
        """
        start = self._end & SEGMENT - 1
        if len(rows) == 1 <= FEW and start:
            row, segment = rows.item(), self._end >> SEGMENT_BITS
            self._end += 1
            self._place[row] = self._end
            self._segments[segment][start] = row
            self._living[segment] += 1
            return
        self._place[rows] = np.arange(self._end + 1, self._end + 1 + len(rows))
        while len(rows):
            segment, start = self._end >> SEGMENT_BITS, self._end & SEGMENT - 1
            if segment not in self._segments:
                self._drop_if_dead(segment - 1)
                self._segments[segment] = np.zeros(SEGMENT, np.int32)
                self._living[segment] = 0
                self._merge_some()
            piece, rows = rows[: SEGMENT - start], rows[SEGMENT - start :]
            self._segments[segment][start : start + len(piece)] = piece
            self._living[segment] += len(piece)
            self._end += len(piece)

    def remove(self, rows: Ints) -> None:
        """These blocks are no longer evictable; or they were just used, and `insert` follows."""
        if len(rows) <= FEW:
            for row in rows.tolist():
                segment = self._place.item(row) - 1 >> SEGMENT_BITS
                self._place[row] = 0
                self._lose(segment, 1)
            return
        segments = (self._place[rows] - 1) >> SEGMENT_BITS
        self._place[rows] = 0
        for segment, count in zip(*(each.tolist() for each in unique_counts(segments)), strict=True):
            self._lose(segment, count)

    def candidates(self) -> Iterator[Ints]:
        """All blocks, in pieces, sorted by their last use, the next to be evicted first. Nothing may change while the
        iterator is in use."""
        nothing_yet = True
        window = WINDOW
        for segment, rows in self._segments.items():
            first = segment << SEGMENT_BITS
            start = max(first, self._oldest)
            while start < first + SEGMENT:
                piece = rows[start - first : start - first + window]
                living = (self._place[piece] == np.arange(start + 1, start + 1 + len(piece))).nonzero()[0]
                if len(living):
                    if nothing_yet:
                        nothing_yet, self._oldest = False, start + int(living[0])
                    yield piece[living].astype(np.int64)
                start += window
                window = min(2 * window, SEGMENT)

    def reserve(self, capacity: int) -> None:
        """Make room for ``capacity`` rows."""
        self._place = extended(self._place, capacity)

    def _living_rows(self, segment: int) -> Ints:
        rows = self._segments[segment]
        first = (segment << SEGMENT_BITS) + 1
        living: Ints = rows[self._place[rows] == np.arange(first, first + SEGMENT)].astype(np.int64)
        return living

    def _lose(self, segment: int, count: int) -> None:
        self._living[segment] -= count
        if segment != self._end >> SEGMENT_BITS:  # that one is being filled
            self._drop_if_dead(segment)

    def _drop_if_dead(self, segment: int) -> None:
        if self._living.get(segment) == 0:
            del self._segments[segment], self._living[segment]

    def _merge_some(self) -> None:
        for _ in range(2):
            older, newer = next(self._to_merge, (-1, -1))
            if older < 0:
                self._to_merge = pairwise(list(self._segments)[:-1])
            elif older in self._living and newer in self._living:
                self._merge(older, newer)

    def _merge(self, older: int, newer: int) -> None:
        """Move all living entries of two neighbours into the newer one, if they fit."""
        if self._living[older] + self._living[newer] > SEGMENT:
            return
        rows = np.concatenate((self._living_rows(older), self._living_rows(newer)))
        first = (newer << SEGMENT_BITS) + 1
        self._place[rows] = np.arange(first, first + len(rows))
        self._segments[newer][: len(rows)] = rows
        self._living[newer] = len(rows)
        del self._segments[older], self._living[older]
