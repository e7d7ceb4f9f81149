"""What a client gives and gets: blocks, the ends of jobs, readiness, answers to lookups. Plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvsidecar.types import Outcome, State

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

DAEMON_LOST = "daemon_lost"
"""There is no connection to the daemon, or the job's one ended before its answer came."""
NOT_ATTACHED = "not_attached"
"""`Client.attach` was not called, or failed."""
CLOSED = "closed"
"""`Client.close` was called."""
BACKPRESSURE = "backpressure"
"""As many jobs are outstanding as this client allows: the daemon hangs, or is far behind."""
EVENT_FAILED = "event_failed"
"""The engine's event that the job comes after could not be recorded or waited for."""
NO_ANSWER = "no_answer"
"""A lookup's budget passed without an answer."""
BREAKER_OPEN = "breaker_open"
"""Lookups are not sent: the last ones were not answered in time. A probe in the background ends this."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of one KV cache group: ``hashes[i]`` is the content of block ``block_ids[i]`` of this rank.

    Hashes joined to one `bytes`, and ids in an array of int64 (numpy's, or any with the buffer protocol) or in what
    `pack_ids` has made of them, cost the engine's thread nothing per block.
    """

    group: int
    hashes: bytes | Sequence[bytes]
    block_ids: bytes | Sequence[int] | npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class JobDone:
    """The end of one job. Bytes and seconds."""

    job: int
    outcome: Outcome
    reason: str = ""
    """Why it was declined or failed: a name of `kvsidecar.errors.Refusal`, or one of this module's."""
    error: str = ""
    copied_blocks: int = 0
    skipped_blocks: int = 0
    """Stores only: blocks that the daemon has already, or that another rank is storing."""
    nbytes: int = 0
    copy_seconds: float = 0.0
    """In which the device moved bytes: no planning, no gaps between its copies."""
    queue_seconds: float = 0.0
    """The rest of the time that the copies took in the daemon."""


@dataclass(frozen=True, slots=True)
class Readiness:
    """What the daemon said last of itself. Bytes and seconds."""

    state: State
    pool_bytes: int = 0
    pinned_bytes: int = 0
    pin_bytes_per_second: float = 0.0
    eta_seconds: float | None = None
    reason: str = ""

    @property
    def ready(self) -> bool:
        return self.state is State.READY


@dataclass(frozen=True, slots=True)
class GroupHits:
    hits: int
    """Readable blocks: length of the prefix, or how many of all."""
    found: tuple[bool, ...] = ()
    """`LookupMode.BITMAP` only: one flag per hash."""


@dataclass(frozen=True, slots=True)
class LookupResult:
    ready: bool
    """False: the daemon is not ready, or did not answer, and every hit is 0."""
    groups: Mapping[int, GroupHits] = field(default_factory=dict)
    lease: int | None = None
    lease_seconds: float = 0.0
    """Granted; may be shorter than asked."""
    reason: str = ""
    """Why the daemon did not answer: `DAEMON_LOST`, `NO_ANSWER` or `BREAKER_OPEN`. Empty when it did."""
