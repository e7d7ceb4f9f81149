"""The eviction policy ``lru``: the blocks of a table go in the order of their last uses, the oldest first.

The policy ``rhythm`` (`kvsidecar.cache.eviction_rhythm`) orders blocks of several classes, and those of each as here.
`kvsidecar.cache.victims` chooses the victims.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvsidecar.cache import kernels
from kvsidecar.cache.arrays import Ints, extended, zeros

SEGMENT_BITS = 10
SEGMENT = 1 << SEGMENT_BITS
FIRST_ENTRIES = 8
"""Entries that a queue's first segment begins with. It grows; tables of a client that makes very many stay small."""
WINDOW = 32
"""Entries of the log to read first; then twice as many, and so on."""


class _Queue:
    """The log of one queue."""

    __slots__ = ("filled", "newest", "oldest", "room", "segments", "to_merge")

    def __init__(self) -> None:
        self.segments: dict[int, npt.NDArray[np.int32]] = {}
        """Segment -> its rows; the oldest segment first."""
        self.newest = -1
        """The segment that is being filled; -1: there is none yet."""
        self.filled = 0
        """Entries of the newest segment."""
        self.room = 0
        """Entries that it has memory for; fewer than `SEGMENT` in the first one, until it has grown."""
        self.oldest = 0
        """No entry before this one is live, so that successive evictions need not search for the first."""
        self.to_merge: Iterator[tuple[int, int]] = iter(())


class LRUQueues:
    """The evictable blocks of one table in queues, in each of them the least recently used first.

    A queue is a log of uses in which only the last entry of a block is live. A removed block leaves its entry behind,
    so a use takes one write and no search. Segments without a live entry are dropped. Neighbours that fit into one
    segment are merged, two pairs for every new segment, so the log stays within about twice the number of blocks.

    Segments are numbered over all queues, so that a block takes no more memory however many queues there are.
    """

    def __init__(self, capacity: int) -> None:
        self._place: Ints = zeros((capacity,), np.int64)
        """Per row the number of its live entry plus one; 0 for a row without one."""
        self._live: dict[int, int] = {}
        """Segment -> number of its live entries."""
        self._queue_of: dict[int, _Queue] = {}
        """Segment -> its queue."""
        self._queues: dict[int, _Queue] = {}
        self._num_segments = 0
        """How many there have been."""

    def insert(self, rows: Ints, queue: int = 0) -> None:
        """Add distinct blocks that have just been used.

        The blocks of one request are given deepest first: a prefix is useless without its head, so the first block of
        a request is evicted last.
        """
        log = self._queues.get(queue)
        if log is None:
            log = self._queues[queue] = _Queue()
        while len(rows):
            if log.filled == log.room:
                self._make_room(log, len(rows))
            segment, start = log.newest, log.filled
            piece, rows = rows[: log.room - start], rows[log.room - start :]
            log.filled += len(piece)
            number = (segment << SEGMENT_BITS) + 1 + start
            kernels.enter_log(self._place, log.segments[segment], piece, start, number)
            self._live[segment] += len(piece)

    def remove(self, rows: Ints) -> None:
        """Remove blocks that are no longer evictable, or that were just used and are inserted again."""
        for segment, count in kernels.leave_log(self._place, rows, SEGMENT_BITS):
            self._forget(segment, count)

    def candidates(self, queue: int = 0) -> Iterator[Ints]:
        """All blocks of a queue in eviction order, in pieces. Nothing may change while the iterator is in use."""
        log = self._queues.get(queue)
        nothing_yet = True
        window = WINDOW
        for segment, rows in () if log is None else log.segments.items():
            assert log is not None
            first = segment << SEGMENT_BITS
            start = max(first, log.oldest)
            while start < first + len(rows):
                piece = rows[start - first : start - first + window]
                live = (self._place[piece] == np.arange(start + 1, start + 1 + len(piece))).nonzero()[0]
                if len(live):
                    if nothing_yet:
                        nothing_yet, log.oldest = False, start + int(live[0])
                    yield piece[live].astype(np.int64)
                start += window
                window = min(2 * window, SEGMENT)

    def reserve(self, capacity: int) -> None:
        self._place = extended(self._place, capacity)

    def _make_room(self, log: _Queue, count: int) -> None:
        """The newest segment is full: make room for some of so many more."""
        if log.newest < 0:
            self._begin_segment(log, min(SEGMENT, max(FIRST_ENTRIES, count)))
        elif log.room == SEGMENT:
            self._begin_segment(log, SEGMENT)
        else:
            living = self._live_rows(log.newest)
            if len(living) > log.room // 2 or count > log.room // 2:
                log.room = min(SEGMENT, max(4 * log.room, len(living) + count))
            log.filled, log.oldest, first = len(living), 0, (log.newest << SEGMENT_BITS) + 1
            log.segments[log.newest] = grown = np.zeros(log.room, np.int32)
            grown[: log.filled] = living
            self._place[living] = np.arange(first, first + log.filled)

    def _begin_segment(self, log: _Queue, room: int) -> None:
        full, log.newest, log.filled, log.room = log.newest, self._num_segments, 0, room
        self._num_segments += 1
        self._drop_if_empty(full)
        log.segments[log.newest] = np.zeros(room, np.int32)
        self._live[log.newest] = 0
        self._queue_of[log.newest] = log
        self._merge_some(log)

    def _live_rows(self, segment: int) -> Ints:
        rows = self._queue_of[segment].segments[segment]
        first = (segment << SEGMENT_BITS) + 1
        live: Ints = rows[self._place[rows] == np.arange(first, first + len(rows))].astype(np.int64)
        return live

    def _forget(self, segment: int, count: int) -> None:
        self._live[segment] -= count
        self._drop_if_empty(segment)

    def _drop_if_empty(self, segment: int) -> None:
        if self._live.get(segment) == 0 and segment != self._queue_of[segment].newest:
            self._drop(segment)

    def _drop(self, segment: int) -> None:
        del self._live[segment], self._queue_of.pop(segment).segments[segment]

    def _merge_some(self, log: _Queue) -> None:
        for _ in range(2):
            older, newer = next(log.to_merge, (-1, -1))
            if older < 0:
                log.to_merge = pairwise(list(log.segments)[:-1])
            elif older in self._live and newer in self._live:
                self._merge(log, older, newer)

    def _merge(self, log: _Queue, older: int, newer: int) -> None:
        """Move the live entries of two neighbours into the newer one, if they fit."""
        if self._live[older] + self._live[newer] > SEGMENT:
            return
        rows = np.concatenate((self._live_rows(older), self._live_rows(newer)))
        first = (newer << SEGMENT_BITS) + 1
        self._place[rows] = np.arange(first, first + len(rows))
        log.segments[newer][: len(rows)] = rows
        self._live[newer] = len(rows)
        self._drop(older)
