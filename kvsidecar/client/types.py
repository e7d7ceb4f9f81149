"""The client's data types: blocks, results of jobs and lookups, and the reasons that only a client gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Final

from kvsidecar.types import Outcome, Residency

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

DAEMON_LOST = "daemon_lost"
"""There is no connection to the daemon, or it ended before the job did."""
NOT_ATTACHED = "not_attached"
"""`Client.attach` was not called, or failed."""
CLOSED = "closed"
"""`Client.close` was called."""
BACKPRESSURE = "backpressure"
"""Too many jobs are outstanding: the daemon hangs, or is far behind."""
EVENT_FAILED = "event_failed"
"""The event that the job comes after could not be recorded or waited for."""
NO_ANSWER = "no_answer"
"""The lookup was not answered within its time budget."""
BREAKER_OPEN = "breaker_open"
"""The lookup was not sent: the ones before were not answered in time. A background probe ends this."""


class Default(Enum):
    """Stands for the client's own default, where None already means something."""

    DEFAULT = "default"


DEFAULT: Final = Default.DEFAULT


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of one KV cache group: ``hashes[i]`` is the content of block ``block_ids[i]`` of this rank.

    It is fastest to join hashes in one `bytes`, and to pass ids as an array of int64 (numpy's, or any with the buffer
    protocol) or packed by `pack_ids`.
    """

    group: int
    hashes: bytes | Sequence[bytes]
    block_ids: bytes | Sequence[int] | npt.NDArray[np.int64]
    notes: bytes = b""
    """Stores only: what watchers need to know about each block, equally many bytes for each, joined; or empty."""
    slice: int = 0
    """Loads only: which of `GroupLayout.slices` to copy, from 1 on; 0: all of each block."""


@dataclass(frozen=True, slots=True)
class JobDone:
    """The result of one job. Bytes and seconds."""

    job: int
    outcome: Outcome
    reason: str = ""
    """Why it was declined or failed: a value of `kvsidecar.errors.Refusal`, or a constant of this module."""
    error: str = ""
    copied_blocks: int = 0
    skipped_blocks: int = 0
    """Stores only: blocks that the daemon has already, or that another rank is storing."""
    nbytes: int = 0
    copy_seconds: float = 0.0
    """Time in which the device moved bytes, without planning and without gaps between copies."""
    queue_seconds: float = 0.0
    """The rest of the time that the job took in the daemon."""


@dataclass(frozen=True, slots=True)
class GroupHits:
    hits: int
    """Number of readable blocks: of the prefix, or of all."""
    found: tuple[bool, ...] = ()
    """`LookupMode.BITMAP` only: one flag per hash."""
    coming: int = 0
    """Blocks that the daemon is fetching from a slower tier: from the first miss on, or of those wanted. They may still
    fail to arrive."""
    held: tuple[bool, ...] = ()
    """If the caller chooses what is fetched: one flag per hash, whether it is missing and a slower tier has it; empty
    for none."""
    first: int = 0
    """The place of the hash to which the first flag belongs: more than 0 only for a group with a tail."""


@dataclass(frozen=True, slots=True)
class LookupResult:
    ready: bool
    """False: the daemon declines lookups, or did not answer, and every hit is 0. Also True before the daemon is ready,
    while `Readiness.serves_kept`."""
    groups: Mapping[int, GroupHits] = field(default_factory=dict)
    lease: int | None = None
    lease_seconds: float = 0.0
    """The granted time; may be shorter than requested."""
    asking: bool = False
    """The daemon asks a slower tier: look up again, in a millisecond or so."""
    reason: str = ""
    """Why there is no answer: `DAEMON_LOST`, `NO_ANSWER` or `BREAKER_OPEN`. Empty if there is one."""

    @property
    def coming(self) -> bool:
        """Whether another lookup may find more."""
        return self.asking or any(group.coming for group in self.groups.values())


@dataclass(frozen=True, slots=True)
class ResidencyChange:
    """What a client that called `Client.watch` received, in order."""

    kind: Residency
    group: int = 0
    hashes: bytes = b""
    """The block hashes, joined."""
    notes: bytes = b""
    """`Residency.NOTES` only: joined, equally many bytes for each hash."""
