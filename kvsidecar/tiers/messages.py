"""The messages between the daemon and a tier's process, in frames over a socket pair.

Every request has a number and is answered once, in any order. A space is introduced once, and named by its number
afterwards, until very many others were introduced. Arrays travel as they lie in memory.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any, Final

import numpy as np

from kvsidecar.cache.arrays import Ints, Words
from kvsidecar.protocol.framing import frame
from kvsidecar.tiers.backend import BackendStats, ShardSpace, ShareUse, TierShare
from kvsidecar.types import Namespace, Residency

MAX_FRAME: Final = 1 << 20
"""More than a request for `MAX_BLOCKS` blocks takes."""
MAX_BLOCKS: Final = 4096
"""Blocks of one request."""

_REQUEST: Final = struct.Struct("<BQII")
_REPLY: Final = struct.Struct("<BQd")


class Do(IntEnum):
    """The kind of a request."""

    SPACE = 0
    """Not answered: what a number means from now on."""
    FIND = 1
    READ = 2
    WRITE = 3
    FORGET = 4
    """A namespace, or all."""
    PROBE = 5
    STATS = 6
    SHARES = 7
    """Not answered: what each share may have from now on."""
    WATCH = 8
    """Not answered: report the blocks of a space, and changes."""
    UNWATCH = 9
    """Not answered."""


REPORT: Final = 1 << 63
"""Set in the number of a reply, beside that of a space: a report on a watched space. Its body: an index of `REPORTED`,
then hashes."""
REPORTED: Final = (Residency.STORED, Residency.REMOVED, Residency.CLEARED, Residency.COMPLETE)


@dataclass(frozen=True, slots=True)
class Request:
    do: Do
    number: int = 0
    space: int = 0
    """Number of the space; 0 for none."""
    hashes: bytes = b""
    """Block hashes, joined; for `Do.SPACE`, `Do.FORGET` and `Do.SHARES`, JSON."""
    slots: Ints | None = None
    """Byte offsets in the pool, one per hash."""
    checksums: tuple[Words, Words] | None = None
    """One per hash, and whether it is known."""

    def pack(self) -> bytes:
        parts = [_REQUEST.pack(self.do, self.number, self.space, len(self.hashes)), self.hashes]
        if self.slots is not None:
            parts.append(self.slots.astype(np.int64, copy=False).tobytes())
        if self.checksums is not None:
            parts += [each.astype(np.uint64, copy=False).tobytes() for each in self.checksums]
        return frame(b"".join(parts))

    @classmethod
    def unpack(cls, payload: bytes) -> Request:
        do, number, space, length = _REQUEST.unpack_from(payload)
        hashes = payload[_REQUEST.size : _REQUEST.size + length]
        words = np.frombuffer(payload[_REQUEST.size + length :], np.uint64)
        slots = checksums = None
        if do == Do.READ:
            slots = words.view(np.int64)
        elif do == Do.WRITE:
            first, values, known = np.split(words, 3)
            slots, checksums = first.view(np.int64), (values, known)
        return cls(Do(do), number, space, hashes, slots, checksums)


@dataclass(frozen=True, slots=True)
class Reply:
    number: int
    failed: bool
    seconds: float
    """Time that the backend took."""
    body: bytes = b""
    """One byte per hash, JSON, or why it failed."""

    def pack(self) -> bytes:
        return frame(_REPLY.pack(self.failed, self.number, self.seconds) + self.body)

    @classmethod
    def unpack(cls, payload: bytes) -> Reply:
        failed, number, seconds = _REPLY.unpack_from(payload)
        return cls(number, bool(failed), seconds, payload[_REPLY.size :])

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace")


def pack_space(number: int, space: ShardSpace) -> bytes:
    return Request(Do.SPACE, 0, number, json.dumps(asdict(space)).encode()).pack()


def space_of(request: Request) -> ShardSpace:
    fields: dict[str, Any] = json.loads(request.hashes)
    return ShardSpace(**{**fields, "namespace": Namespace(**fields["namespace"])})


def pack_shares(shares: Sequence[TierShare]) -> bytes:
    return Request(Do.SHARES, hashes=json.dumps([asdict(each) for each in shares]).encode()).pack()


def shares_of(request: Request) -> list[TierShare]:
    return [TierShare(**{**each, "patterns": tuple(each["patterns"])}) for each in json.loads(request.hashes)]


def pack_namespace(namespace: Namespace | None) -> bytes:
    return json.dumps(None if namespace is None else asdict(namespace)).encode()


def namespace_of(body: bytes) -> Namespace | None:
    fields = json.loads(body)
    return None if fields is None else Namespace(**fields)


def stats_of(fields: dict[str, Any]) -> BackendStats:
    """Args: fields: from `dataclasses.asdict`, after a trip through JSON."""
    return BackendStats(**{**fields, "shares": [ShareUse(**each) for each in fields["shares"]]})


def split(hashes: bytes, width: int) -> Sequence[bytes]:
    return [hashes[at : at + width] for at in range(0, len(hashes), width)]
