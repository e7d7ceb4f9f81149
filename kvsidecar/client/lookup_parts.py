"""A lookup of any size as one or more messages of a bounded size. Pure.

A part keeps the daemon's loop for a few milliseconds, so that short lookups of others pass between two of them, and its
answer is a sign of life: the time of a whole lookup shows nothing about the daemon.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat

from kvsidecar.client.messages import LookupQuery
from kvsidecar.client.types import GroupHits, LookupResult
from kvsidecar.errors import ClientError
from kvsidecar.types import LookupMode

PART_HASHES = 8192
"""Most hashes of one message: 256 KiB if each has 32 bytes."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some of one group's hashes: ``first`` to ``end`` (exclusive)."""

    group: int
    first: int
    end: int


class LookupParts:
    """Splits a lookup, and joins the results of its parts. Call `next`, send what it returns, call `take` with the
    result, and so on until `next` returns None."""

    def __init__(self, query: LookupQuery) -> None:
        self._query = query
        self._single = query.hashes <= PART_HASHES
        if query.tails and not self._single:
            raise ClientError(f"a lookup with tails looks for {query.hashes} hashes, and may for {PART_HASHES}")
        self._pieces: Iterator[list[_Piece]] = iter(()) if self._single else _pieces(query)
        self._sent: list[_Piece] = []
        self._results: dict[int, list[GroupHits]] = {group: [] for group in query.groups}
        self._whole: LookupResult | None = None
        """The result, if no further part is needed for it."""
        self._asking = False
        self._lease_seconds = 0.0
        self._wanted = sum([sum(each) for each in (query.wanted or {}).values()])
        self._missed: set[int] = set()
        """Groups with a miss so far."""
        self.lease = query.lease
        """The lease on the hits so far; 0: none. It must be released if the lookup fails or is given up."""

    def next(self) -> LookupQuery | None:
        """The next part; None if there is none left."""
        if self._whole is not None:
            return None
        if self._single:
            return self._query
        for pieces in self._pieces:
            # After the first miss a prefix ends.
            self._sent = [each for each in pieces if not self._ends_before(each)]
            if self._sent:
                return self._part(self._sent)
        return None

    def take(self, result: LookupResult) -> None:
        """Take over the result of the part that `next` returned last."""
        self.lease = result.lease or self.lease
        self._lease_seconds = result.lease_seconds or self._lease_seconds
        if self._single or not result.ready:
            self._whole = result if self._single else self._query.no_hits("")
            return
        self._asking |= result.asking
        for piece in self._sent:
            hits = result.groups[piece.group]
            self._results[piece.group].append(hits)
            if hits.hits < piece.end - piece.first:
                self._missed.add(piece.group)

    def result(self) -> LookupResult:
        """The result of the whole lookup."""
        if self._whole is not None:
            if (self._whole.lease or 0) == self.lease:
                return self._whole
            return replace(self._whole, lease=self.lease or None, lease_seconds=self._lease_seconds)
        groups = {group: self._joined(group, results) for group, results in self._results.items()}
        return LookupResult(True, groups, self.lease or None, self._lease_seconds, self._asking)

    def _joined(self, group: int, results: Sequence[GroupHits]) -> GroupHits:
        found: list[bool] = []
        held: list[bool] = []
        for each in results:
            found += each.found
            held += each.held or repeat(False, len(each.found))
        hits = sum([each.hits for each in results])
        return GroupHits(hits, tuple(found), sum([each.coming for each in results]), tuple(held) if any(held) else ())

    def _ends_before(self, piece: _Piece) -> bool:
        return self._query.mode is LookupMode.PREFIX and piece.group in self._missed

    def _part(self, pieces: Sequence[_Piece]) -> LookupQuery:
        query = self._query
        wanted: Mapping[int, Sequence[bool]] | None = None
        # Without a choice, each group's first misses in a row are fetched, and no others.
        gap = query.wanted is None and all(each.group in self._missed for each in pieces)
        fetch_tokens = 0
        if query.wanted is not None:
            wanted = {
                each.group: query.wanted[each.group][each.first : each.end]
                for each in pieces
                if each.group in query.wanted
            }
            share = sum([sum(each) for each in wanted.values()])
            fetch_tokens = query.fetch_tokens * share // max(1, self._wanted)
        groups = {each.group: _hashes(query, each) for each in pieces}
        return replace(
            query,
            groups=groups,
            wanted=wanted,
            fetch_seconds=0.0 if gap else query.fetch_seconds,
            fetch_tokens=fetch_tokens,
            lease=self.lease,
        )


def touch_parts(query: LookupQuery) -> Iterator[LookupQuery]:
    """Split a touch like a lookup of the same hashes, the last part first: what is touched later is evicted later, so
    that the head of a prompt stays longest."""
    for pieces in reversed(list(_pieces(query))):
        yield replace(query, groups={each.group: _hashes(query, each) for each in pieces})


def _hashes(query: LookupQuery, piece: _Piece) -> bytes | Sequence[bytes]:
    hashes, width = query.groups[piece.group], query.namespace.hash_bytes
    if isinstance(hashes, bytes):
        return hashes[piece.first * width : piece.end * width]
    return hashes[piece.first : piece.end]


def _pieces(query: LookupQuery) -> Iterator[list[_Piece]]:
    """The pieces of each message: at most one of each group, together at most `PART_HASHES` hashes."""
    pieces: list[_Piece] = []
    room = PART_HASHES
    for group in query.groups:
        first, count = 0, query.count(group)
        while first < count or not count:
            end = min(count, first + room)
            pieces.append(_Piece(group, first, end))
            room -= end - first
            first = end
            if not room:
                yield pieces
                pieces, room = [], PART_HASHES
            if not count:
                break
    if pieces:
        yield pieces
