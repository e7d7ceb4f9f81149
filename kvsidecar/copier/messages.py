"""The messages about copies between the daemon and a copier, as records of a `Ring`. Pure.

All other requests are rarer and go over a Unix socket: `kvsidecar.support.supervised_child`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from kvsidecar.types import Direction

_COPY: Final = struct.Struct("<BBHIQQB")
"""Kind, direction, parts, event + 1 (0: none), number, session, weight."""
_PART: Final = struct.Struct("<III")
"""Group, slice, blocks; then as many block ids and as many offsets of slots, 8 bytes each. Behind the last part:
checks."""
CHECK: Final = np.dtype([("slot", np.int64), ("nbytes", np.int64), ("expected", np.uint64)])
"""A slot whose checksum is wanted: where it begins, in bytes from the pool's base; how many bytes count; what a load
must find (unused in a store)."""
Checks = npt.NDArray[np.void]
"""dtype `CHECK`, one dimension."""
_NUMBER: Final = struct.Struct("<BQ")
_DONE: Final = struct.Struct("<BBQQddd")
"""Kind, outcome, number, bytes, seconds of copying, seconds of waiting, when it ended; then the values, 8 bytes each,
or the text of an error."""
_DIRECTIONS: Final = tuple(Direction)


class Kind(IntEnum):
    """First byte of a record."""

    COPY = 1
    CANCEL = 2
    PRIORITIZE = 3
    PACE = 4
    STARTED = 5
    DONE = 6
    SOON = 7
    """A copy is expected to end within `SPIN_SECONDS`: the thread that waits for it should be awake then."""
    LAST_WORDS = 8
    """Why the process ends, as text. The last record of a ring."""


class Ended(IntEnum):
    """How a copy has ended."""

    COPIED = 0
    CANCELLED = 1
    FAILED = 2
    """Nothing of it moves any more. (If it might still, the process ends, and the copy with it.)"""
    CORRUPT = 3
    """A load that was not started: slots have other checksums than expected."""


class Progress(IntEnum):
    """The words of `Ring.progress`, written by a direction's thread: monotonic seconds, or 0."""

    WORKING = 0
    """Time since which the thread has not looked for records; 0 while it waits for them."""
    IN_FLIGHT = 1
    """`CopyQueue.in_flight_since`."""


@dataclass(frozen=True, slots=True)
class CopyPart:
    """Blocks of one group. Both arrays have the same length."""

    group: int
    block_ids: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    """Where each block's slot begins, in bytes from the pool's base."""
    slice: int = 0
    """Number of a slice of the group's regions, from 1 on; 0 for all."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy blocks of one session.

    Args:
        number: unique among the copies of this copier.
        event: index in the session's ring; the copy starts when this event is done. None: it may start at once.
        checks: slots whose checksums a store reports when it is over, and a load compares before it starts; None or
            at least one.
        weight: how many turns its session gets on the link.
    """

    number: int
    session: int
    direction: Direction
    parts: Sequence[CopyPart]
    event: int | None = None
    checks: Checks | None = None
    weight: int = 1

    def pack(self) -> bytes:
        head = _COPY.pack(
            Kind.COPY, _DIRECTIONS.index(self.direction), len(self.parts), 0 if self.event is None else self.event + 1,
            self.number, self.session, self.weight,
        )  # fmt: skip
        pieces = [head]
        for part in self.parts:
            head = _PART.pack(part.group, part.slice, len(part.block_ids))
            pieces += (head, part.block_ids.tobytes(), part.slots.tobytes())
        if self.checks is not None:
            pieces.append(self.checks.tobytes())
        return b"".join(pieces)

    @classmethod
    def unpack(cls, record: bytes) -> Copy:
        _, direction, num_parts, event, number, session, weight = _COPY.unpack_from(record)
        position, parts = _COPY.size, []
        for _ in range(num_parts):
            group, number_of_slice, count = _PART.unpack_from(record, position)
            position += _PART.size
            ids = np.frombuffer(record, np.int64, count, position)
            slots = np.frombuffer(record, np.int64, count, position + 8 * count)
            position += 16 * count
            parts.append(CopyPart(group, ids, slots, number_of_slice))
        checks = np.frombuffer(record, CHECK, offset=position) if position < len(record) else None
        return cls(number, session, _DIRECTIONS[direction], parts, event - 1 if event else None, checks, weight)


@dataclass(frozen=True, slots=True)
class Done:
    """A copy has ended. Seconds are of the monotonic clock, which all processes of a machine share.

    Args:
        values: for a store that was copied, the checksums of its checks, in order; for a corrupt load, the indices of
            the checks that differ.
    """

    number: int
    ended: Ended
    nbytes: int = 0
    copy_seconds: float = 0.0
    queue_seconds: float = 0.0
    at: float = 0.0
    values: Sequence[int] = ()
    error: str = ""

    def pack(self) -> bytes:
        head = _DONE.pack(
            Kind.DONE, self.ended, self.number, self.nbytes, self.copy_seconds, self.queue_seconds, self.at
        )
        return head + (np.array(self.values, np.uint64).tobytes() if self.values else self.error.encode())

    @classmethod
    def unpack(cls, record: bytes) -> Done:
        _, ended, number, nbytes, copy_seconds, queue_seconds, at = _DONE.unpack_from(record)
        values: Sequence[int] = ()
        error = ""
        if ended == Ended.FAILED:
            error = record[_DONE.size :].decode(errors="replace")
        elif len(record) > _DONE.size:
            values = np.frombuffer(record, np.uint64, offset=_DONE.size).tolist()
        return cls(number, Ended(ended), nbytes, copy_seconds, queue_seconds, at, values, error)


def kind_of(record: bytes) -> Kind:
    return Kind(record[0])


def pack_number(kind: Kind, number: int) -> bytes:
    """A record that carries one number: CANCEL, PRIORITIZE and STARTED a copy's, PACE bytes (0: the whole link)."""
    return _NUMBER.pack(kind, number)


def pack_last_words(text: str) -> bytes:
    return bytes([Kind.LAST_WORDS]) + text.encode()


def last_words_of(record: bytes) -> str:
    return record[1:].decode(errors="replace")


def number_of(record: bytes) -> int:
    number: int = _NUMBER.unpack_from(record)[1]
    return number
