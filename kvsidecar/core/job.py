"""One store or load job, and everything that the daemon holds for it until it is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field

import numpy as np
import numpy.typing as npt

from kvsidecar.cache.grants import LoadGrant, StoreGrant
from kvsidecar.copier.copiers import Copier
from kvsidecar.copier.link import Copying
from kvsidecar.copier.messages import Checks, CopyPart, Done
from kvsidecar.errors import DeviceLost, Refusal
from kvsidecar.types import Direction, Outcome, Priority


@dataclass(frozen=True, slots=True)
class JobBlocks:
    """Blocks of one group of one job: ``hashes[i]`` belongs to ``block_ids[i]``."""

    group: int
    hashes: Sequence[bytes]
    block_ids: npt.NDArray[np.int64]
    slice: int = 0
    """Slice of the group's regions that a load copies, from 1 on; 0 for all."""


@dataclass(frozen=True, slots=True)
class StoreOrder:
    """When a store's copy may start, for stores that are ordered on the device."""

    event: int
    """Index of the event in the rank's ring."""
    on_start: Callable[[], None]
    """Called when the event is not needed any more."""


@dataclass(frozen=True, slots=True)
class JobResult:
    """The result of one job. Bytes and seconds."""

    outcome: Outcome
    reason: Refusal | None = None
    error: str = ""
    copied_blocks: int = 0
    skipped_blocks: int = 0
    nbytes: int = 0
    copy_seconds: float = 0.0
    queue_seconds: float = 0.0
    copy_ended: float = 0.0
    """On the monotonic clock of its copier; 0 if nothing was copied."""


@dataclass(eq=False, slots=True)
class Job:
    """A store or a load, from the message that asks for it to its answer.

    It owns all that is held for it: its place among the jobs of its rank, the cache's grant, its copy, its deadline.
    `kvsidecar.core.jobs.JobRunner` takes all of that and gives all of it back, in one place, however the job ends. It
    can be stopped before its copy starts, and never after: DMA cannot be cancelled.

    Args:
        number: chosen by the client; unique among the jobs of its rank that are not over.
        lease: the lease that a load names, if it names one.
        order: what a store waits for on the device; None if the client has waited.
        ttl: seconds after which the blocks of a store expire; 0: when their share's do.
        idle_ttl: seconds after their last use until they expire; 0: when their share's do.
        priority: how long a store's blocks are worth keeping, compared with others.
        traceparent: as the client sent it; empty for none.
        on_done: called once, with the result.
    """

    number: int
    direction: Direction
    parts: Sequence[JobBlocks]
    _: KW_ONLY
    lease: int | None = None
    order: StoreOrder | None = None
    ttl: float = 0.0
    idle_ttl: float = 0.0
    priority: Priority = Priority.NORMAL
    traceparent: bytes = b""
    on_done: Callable[[JobResult], None] = lambda _: None
    num_blocks: int = field(init=False)
    taken: float = field(default=0.0, init=False)
    """Monotonic seconds."""
    ended: float = field(default=0.0, init=False)
    """A store's blocks can be looked up from then on."""
    grants: list[StoreGrant | LoadGrant] = field(default_factory=list, init=False)
    """Grants of slots or references: one, or several for very many blocks, in the order of the blocks."""
    timer: asyncio.TimerHandle | None = field(default=None, init=False)
    """Cancels it at its deadline."""
    stopped: Refusal | None = field(default=None, init=False)
    """Why its copy must not start, if it has not started yet."""
    result: JobResult | None = field(default=None, init=False)
    _goes_first: bool = field(default=False, init=False)
    _copying: Copying | None = field(default=None, init=False)
    _over: asyncio.Future[None] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.num_blocks = sum([len(part.block_ids) for part in self.parts])

    def copy(
        self,
        copier: Copier,
        session: int,
        parts: Sequence[CopyPart],
        checks: Checks | None,
        weight: int,
        on_end: Callable[[Done | DeviceLost], None],
    ) -> None:
        """Hand the copy to a copier; see `CopierLink.submit`."""
        event, on_start = (None, None) if self.order is None else (self.order.event, self.order.on_start)
        self._copying = copier.live().submit(
            session, self.direction, parts, event=event, on_start=on_start, checks=checks, weight=weight, on_end=on_end
        )
        if self._goes_first:
            self._copying.prioritize()

    def end(self, result: JobResult, now: float) -> None:
        """Answer it."""
        self.result, self.ended = result, now
        if self._over is not None:
            self._over.set_result(None)
        self.on_done(result)

    def over(self) -> asyncio.Future[None]:
        """Resolved when it is answered."""
        if self._over is None:
            self._over = asyncio.get_running_loop().create_future()
            if self.result is not None:
                self._over.set_result(None)
        return self._over

    def cancel(self, reason: Refusal) -> None:
        """Do not start the copy, if it has not started yet."""
        if self.stopped is None:
            self.stopped = reason
        if self._copying is not None:
            self._copying.cancel()

    def prioritize(self) -> None:
        """Make the copy the next one of its direction, also if it is handed over only later."""
        self._goes_first = True
        if self._copying is not None:
            self._copying.prioritize()
