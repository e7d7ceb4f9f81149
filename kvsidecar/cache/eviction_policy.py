"""The eviction order of blocks. `kvsidecar.cache.eviction` chooses the victims."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvsidecar.cache.arrays import FEW, Ints, extended, unique_counts, zeros

SEGMENT_BITS = 10
SEGMENT = 1 << SEGMENT_BITS
WINDOW = 32
"""Entries of the log to read first; then twice as many, and so on."""


class LruPolicy:
    """The evictable blocks of one space, least recently used first.

    It is a log of uses in which only the last entry of a block is live. A removed block leaves its entry behind, so a
    use takes one write and no search. Segments without a live entry are dropped. Neighbours that fit into one segment
    are merged, two pairs for every new segment, so the log stays within about twice the number of blocks.
    """

    def __init__(self, capacity: int) -> None:
        self._place: Ints = zeros((capacity,), np.int64)
        """Per row the number of its live entry in the log plus one; 0 for a row without one."""
        self._end = 0
        """Number of the next entry."""
        self._segments: dict[int, npt.NDArray[np.int32]] = {}
        """Segment -> its rows; the oldest segment first."""
        self._live: dict[int, int] = {}
        """Segment -> number of its live entries."""
        self._oldest = 0
        """No entry before this one is live, so that successive evictions need not search for the first."""
        self._to_merge: Iterator[tuple[int, int]] = iter(())

    def insert(self, rows: Ints) -> None:
        """Add distinct blocks that have just been used.

        The blocks of one request are given deepest first: a prefix is useless without its head, so the first block of
        a request is evicted last.
        """
        start = self._end & SEGMENT - 1
        if len(rows) == 1 <= FEW and start:
            row, segment = rows.item(), self._end >> SEGMENT_BITS
            self._end += 1
            self._place[row] = self._end
            self._segments[segment][start] = row
            self._live[segment] += 1
            return
        self._place[rows] = np.arange(self._end + 1, self._end + 1 + len(rows))
        while len(rows):
            segment, start = self._end >> SEGMENT_BITS, self._end & SEGMENT - 1
            if segment not in self._segments:
                self._drop_if_empty(segment - 1)
                self._segments[segment] = np.zeros(SEGMENT, np.int32)
                self._live[segment] = 0
                self._merge_some()
            piece, rows = rows[: SEGMENT - start], rows[SEGMENT - start :]
            self._segments[segment][start : start + len(piece)] = piece
            self._live[segment] += len(piece)
            self._end += len(piece)

    def remove(self, rows: Ints) -> None:
        """Remove blocks that are no longer evictable, or that were just used and are inserted again."""
        if len(rows) <= FEW:
            for row in rows.tolist():
                segment = self._place.item(row) - 1 >> SEGMENT_BITS
                self._place[row] = 0
                self._forget(segment, 1)
            return
        segments = (self._place[rows] - 1) >> SEGMENT_BITS
        self._place[rows] = 0
        for segment, count in zip(*(each.tolist() for each in unique_counts(segments)), strict=True):
            self._forget(segment, count)

    def candidates(self) -> Iterator[Ints]:
        """All blocks in eviction order, in pieces. Nothing may change while the iterator is in use."""
        nothing_yet = True
        window = WINDOW
        for segment, rows in self._segments.items():
            first = segment << SEGMENT_BITS
            start = max(first, self._oldest)
            while start < first + SEGMENT:
                piece = rows[start - first : start - first + window]
                live = (self._place[piece] == np.arange(start + 1, start + 1 + len(piece))).nonzero()[0]
                if len(live):
                    if nothing_yet:
                        nothing_yet, self._oldest = False, start + int(live[0])
                    yield piece[live].astype(np.int64)
                start += window
                window = min(2 * window, SEGMENT)

    def reserve(self, capacity: int) -> None:
        self._place = extended(self._place, capacity)

    def _live_rows(self, segment: int) -> Ints:
        rows = self._segments[segment]
        first = (segment << SEGMENT_BITS) + 1
        live: Ints = rows[self._place[rows] == np.arange(first, first + SEGMENT)].astype(np.int64)
        return live

    def _forget(self, segment: int, count: int) -> None:
        self._live[segment] -= count
        if segment != self._end >> SEGMENT_BITS:  # the last segment is still being filled
            self._drop_if_empty(segment)

    def _drop_if_empty(self, segment: int) -> None:
        if self._live.get(segment) == 0:
            del self._segments[segment], self._live[segment]

    def _merge_some(self) -> None:
        for _ in range(2):
            older, newer = next(self._to_merge, (-1, -1))
            if older < 0:
                self._to_merge = pairwise(list(self._segments)[:-1])
            elif older in self._live and newer in self._live:
                self._merge(older, newer)

    def _merge(self, older: int, newer: int) -> None:
        """Move the live entries of two neighbours into the newer one, if they fit."""
        if self._live[older] + self._live[newer] > SEGMENT:
            return
        rows = np.concatenate((self._live_rows(older), self._live_rows(newer)))
        first = (newer << SEGMENT_BITS) + 1
        self._place[rows] = np.arange(first, first + len(rows))
        self._segments[newer][: len(rows)] = rows
        self._live[newer] = len(rows)
        del self._segments[older], self._live[older]
