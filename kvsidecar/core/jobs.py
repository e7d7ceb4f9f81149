"""Store and load jobs: the cache decides, the layout plans, a copy worker moves the bytes, the cache is told.

A job belongs to the daemon, not to the RPC that asked for it: DMA cannot be cancelled, so a job whose client has gone
still ends, and only then are its slots, pins and mappings given back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsidecar.cache.block import LoadGrant, StoreGrant
from kvsidecar.cache.block_cache import BlockCache, ShardPart
from kvsidecar.copier.hub import DeviceHub
from kvsidecar.copier.worker import CopyResult
from kvsidecar.core.checksums import Checksums
from kvsidecar.core.copy_plan import BlockCopies
from kvsidecar.core.hashes import as_keys
from kvsidecar.core.layout import check_block_ids
from kvsidecar.core.metrics import Metrics
from kvsidecar.core.readiness import Readiness
from kvsidecar.core.sessions import JobControl, Session, SessionGroup
from kvsidecar.device.base import CopyPlan, DeviceEvent
from kvsidecar.errors import DeviceError, DeviceLost, InvalidRequest
from kvsidecar.support import failpoints
from kvsidecar.types import Direction, Outcome, Refusal

MANY_JOBS = 6
"""Outstanding at a time; their threads are woken often enough."""


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """Blocks of one group of one job: ``hashes[i]`` belongs to ``block_ids[i]``."""

    group: int
    hashes: Sequence[bytes]
    block_ids: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class JobResult:
    """What became of one job. Bytes and seconds."""

    outcome: Outcome
    reason: Refusal | None = None
    error: str = ""
    copied_blocks: int = 0
    skipped_blocks: int = 0
    nbytes: int = 0
    copy_seconds: float = 0.0
    queue_seconds: float = 0.0
    copy_ended: float = 0.0
    """Monotonic seconds; 0 if nothing was copied."""
    unsettled: bool = False
    """The copy failed, and may still touch the device's blocks until this process has ended."""


@dataclass(frozen=True, slots=True)
class EndedJob:
    """A job that is over, for who keeps a record of them."""

    direction: Direction
    session: Session
    parts: Sequence[GroupBlocks]
    traceparent: bytes
    """As the client sent it; empty for none."""
    taken: float
    """Monotonic seconds."""
    ended: float
    """A store's blocks can be looked up from then on."""
    result: JobResult


@dataclass(frozen=True, slots=True)
class StoreOrder:
    """When a store's copy may start, for stores that are ordered on the device."""

    after: DeviceEvent
    on_start: Callable[[], None]
    """Called in a worker's thread when the event is not needed any more."""


class Transfers:
    """Runs jobs. Used from the event loop; every decision is made in one step of it, without an await in between.

    Args:
        clock: monotonic seconds, the clock of leases.
        slab_bytes: copies do not span two slabs: pin chunks begin at slabs, and a driver refuses a copy that spans
            two registrations.
        checksums: of the slots, if they are wanted.
        stir: called when a job begins and when it ends.
        on_ended: told each job when its answer is on its way; None costs nothing.
        on_unsettled: told in words of each job that is over although its copy may still move bytes.
    """

    def __init__(
        self,
        cache: BlockCache,
        hub: DeviceHub,
        readiness: Readiness,
        metrics: Metrics,
        clock: Callable[[], float],
        *,
        slab_bytes: int,
        checksums: Checksums | None = None,
        stir: Callable[[], None] = lambda: None,
        on_ended: Callable[[EndedJob], None] | None = None,
        on_unsettled: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._cache = cache
        self._hub = hub
        self._readiness = readiness
        self._metrics = metrics
        self._clock = clock
        self._slab_bytes = slab_bytes
        self._checksums = checksums
        self._stir = stir
        self._on_ended = on_ended
        self._on_unsettled = on_unsettled
        self._counts = {direction: _Counts(metrics, direction) for direction in Direction}
        self.started_at: dict[Direction, dict[object, float]] = {direction: {} for direction in Direction}
        """When each job that is not over was taken, in order."""

    def oldest_seconds(self, direction: Direction) -> float:
        """Age of the oldest job that is not over; 0 if there is none."""
        oldest = next(iter(self.started_at[direction].values()), None)
        return 0.0 if oldest is None else self._clock() - oldest

    async def store(
        self,
        session: Session,
        parts: Sequence[GroupBlocks],
        control: JobControl | None = None,
        order: StoreOrder | None = None,
        traceparent: bytes = b"",
    ) -> JobResult:
        """Copy blocks from the device into the pool and make them readable. Never raises for a bad request.

        Args:
            order: what the copy waits for on the device; None if the client has waited.
            traceparent: of the request, whatever it is, for `EndedJob`.
        """
        control = control or JobControl()
        job = self._store(session, parts, control, order)
        return await self._run(Direction.STORE, session, parts, control, job, traceparent)

    def load(
        self,
        session: Session,
        parts: Sequence[GroupBlocks],
        lease: int | None,
        control: JobControl | None = None,
        traceparent: bytes = b"",
    ) -> Coroutine[Any, Any, JobResult]:
        """Copy blocks from the pool to the device. Never raises for a bad request.

        Decided when this returns, so that whatever comes behind it, such as the end of the lease, finds the blocks
        pinned. What is returned must be awaited.
        """
        control = control or JobControl()
        job = self._load(session, parts, self._begin_load(session, parts, lease), control)
        return self._run(Direction.LOAD, session, parts, control, job, traceparent)

    def declined(self, direction: Direction, reason: Refusal) -> JobResult:
        """Count and answer a job that is not even tried."""
        result = _declined(reason)
        self._count(direction, result)
        return result

    def refuse(self, reason: Refusal) -> None:
        """Count what is refused and is no job."""
        self._metrics.refuse(reason)

    def invalid(self, direction: Direction, error: InvalidRequest) -> JobResult:
        """Count and answer a job that could not even be read."""
        result = JobResult(Outcome.DECLINED, Refusal.INVALID_REQUEST, str(error))
        self._count(direction, result)
        return result

    async def _run(
        self,
        direction: Direction,
        session: Session,
        parts: Sequence[GroupBlocks],
        control: JobControl,
        job: Coroutine[Any, Any, JobResult],
        traceparent: bytes,
    ) -> JobResult:
        self._stir_for(direction, session)
        key = object()
        self.started_at[direction][key] = taken = self._clock()
        try:
            result = await job
        except InvalidRequest as error:
            result = JobResult(Outcome.DECLINED, Refusal.INVALID_REQUEST, str(error))
        except DeviceLost as error:
            result = JobResult(Outcome.FAILED, Refusal.DEVICE_LOST, str(error), unsettled=bool(control.unsettled))
        except (DeviceError, failpoints.FailpointError) as error:
            result = JobResult(Outcome.FAILED, Refusal.COPY_FAILED, str(error), unsettled=bool(control.unsettled))
        finally:
            del self.started_at[direction][key]
            self._stir_for(direction, session)
            if what := control.unsettled:
                session.unsettled = True
                self._metrics.unsettled_copies.labels(direction.value).inc()
                self._on_unsettled(f"the copy of a {direction} on {session.device.uuid} may still run ({what})")
        self._count(direction, result)
        session.copied_bytes[direction] += result.nbytes
        if self._on_ended is not None:
            ended = EndedJob(direction, session, parts, traceparent, taken, self._clock(), result)
            # The client is answered in this turn of the loop, and need not wait for the record.
            asyncio.get_running_loop().call_soon(self._on_ended, ended)
        return result

    async def _store(
        self, session: Session, parts: Sequence[GroupBlocks], control: JobControl, order: StoreOrder | None
    ) -> JobResult:
        if (refusal := self._readiness.refusal) is not None:
            return _declined(refusal)
        groups = _groups(session, parts)
        worker = await self._hub.worker(session.device.uuid, Direction.STORE)
        if (stopped := control.stopped()) is not None:
            return _declined(stopped)
        grant = self._cache.begin_store(_shard_parts(groups, parts), session.device.numa_node)
        if isinstance(grant, Refusal):
            return _declined(grant)
        skipped = grant.present + grant.in_flight
        if not grant.reserved:
            return JobResult(Outcome.DONE, skipped_blocks=skipped)
        try:
            failpoints.hit("store.after_reserve")
            plan = self._plan_store(grant, groups, parts)
            failpoints.hit("store.before_copy")
            copying = worker.submit(
                plan, after=order.after if order else None, on_start=order.on_start if order else None
            )
            control.started(worker, copying)
        except BaseException:
            self._cache.abort_all(grant)  # nothing was started
            raise
        try:
            copied = await _end_of(copying)
        except BaseException:
            if control.unsettled:
                # Some DMA may still write these slots, so they may never hold anything else again.
                self._cache.quarantine_all(grant)
            else:
                self._cache.abort_all(grant)
                # Cancelled: it was still queued, and never started.
                if copying.cancelled() and (stopped := control.stopped()) is not None:
                    return _declined(stopped)
            raise
        try:
            failpoints.hit("store.before_seal")
            if self._checksums is not None:
                await asyncio.to_thread(_take_checksums, self._checksums, grant, groups, parts)
        except BaseException:
            self._cache.abort_all(grant)
            raise
        self._cache.seal_all(grant)
        return _done(grant.reserved, skipped, copied)

    def _begin_load(
        self, session: Session, parts: Sequence[GroupBlocks], lease: int | None
    ) -> tuple[list[SessionGroup], LoadGrant] | Refusal | Exception:
        """Pin the blocks, or say why not."""
        if (refusal := self._readiness.refusal) is not None:
            return refusal
        try:
            groups = _groups(session, parts)
            grant = self._cache.begin_load(_shard_parts(groups, parts), lease, self._clock())
        except Exception as error:  # noqa: BLE001 - raised by the job, which is all that it costs
            return error
        return grant if isinstance(grant, Refusal) else (groups, grant)

    async def _load(
        self,
        session: Session,
        parts: Sequence[GroupBlocks],
        begun: tuple[list[SessionGroup], LoadGrant] | Refusal | Exception,
        control: JobControl,
    ) -> JobResult:
        if isinstance(begun, Exception):
            raise begun
        if isinstance(begun, Refusal):
            return _declined(begun)
        groups, grant = begun
        blocks = sum(len(part.hashes) for part in parts)
        if not blocks:
            self._cache.end_load(grant)
            return JobResult(Outcome.DONE)
        try:
            worker = await self._hub.worker(session.device.uuid, Direction.LOAD)
            if self._checksums is not None and (
                wrong := await asyncio.to_thread(_wrong, self._checksums, grant, groups, parts)
            ):
                for part, index in wrong:
                    self._cache.condemn(grant, part, index)
                self._cache.end_load(grant)
                return _declined(Refusal.CHECKSUM)
            if (stopped := control.stopped()) is not None:
                self._cache.end_load(grant)
                return _declined(stopped)
            plan = self._plan_load(grant, groups, parts)
            failpoints.hit("load.before_copy")
            copying = worker.submit(plan)
            control.started(worker, copying)
        except BaseException:
            self._cache.end_load(grant)  # nothing was started
            raise
        try:
            copied = await _end_of(copying)
        except BaseException:
            if control.unsettled:
                # Some DMA may still read these slots: their pins stay, so that nothing else is written into them.
                self._cache.quarantine_load(grant)
            else:
                self._cache.end_load(grant)
                # Cancelled: it was still queued, and never started.
                if copying.cancelled() and (stopped := control.stopped()) is not None:
                    return _declined(stopped)
            raise
        self._cache.end_load(grant)
        return _done(blocks, 0, copied)

    def _plan_store(self, grant: StoreGrant, groups: Sequence[SessionGroup], parts: Sequence[GroupBlocks]) -> CopyPlan:
        """The copies of what was reserved; blocks that are there already are left out."""
        plans = [
            (group.bound, part.block_ids[granted.index], granted.slots)
            for group, part, granted in zip(groups, parts, grant.parts, strict=True)
        ]
        return BlockCopies(plans, boundary=self._slab_bytes)

    def _plan_load(self, grant: LoadGrant, groups: Sequence[SessionGroup], parts: Sequence[GroupBlocks]) -> CopyPlan:
        plans = [
            (group.bound, part.block_ids, slots) for group, part, slots in zip(groups, parts, grant.slots, strict=True)
        ]
        return BlockCopies(plans, boundary=self._slab_bytes)

    def _stir_for(self, direction: Direction, session: Session) -> None:
        """Somebody may wait for the end of this job: not for a store that is paced anyway, nor where so many jobs
        follow each other that nothing sleeps."""
        jobs = sum(map(len, self.started_at.values()))
        if jobs < MANY_JOBS and self._hub.chunk(session.device.uuid, direction) is None:
            self._stir()

    def _count(self, direction: Direction, result: JobResult) -> None:
        self._counts[direction].outcomes[result.outcome].inc()
        if result.reason is not None:
            self._metrics.refuse(result.reason)
        if result.nbytes:
            self._counts[direction].copied(result)


class _Counts:
    """The metrics of one direction: looking a label up takes longer than counting."""

    def __init__(self, metrics: Metrics, direction: Direction) -> None:
        label = direction.value
        self.outcomes = {outcome: metrics.jobs.labels(label, outcome.value) for outcome in Outcome}
        self._copied_bytes = metrics.copied_bytes.labels(label)
        self._copy_bytes = metrics.copy_bytes.labels(label)
        self._copy_seconds = metrics.copy_seconds.labels(label)
        self._queue_seconds = metrics.queue_seconds.labels(label)

    def copied(self, result: JobResult) -> None:
        self._copied_bytes.inc(result.nbytes)
        self._copy_bytes.observe(result.nbytes)
        self._copy_seconds.observe(result.copy_seconds)
        self._queue_seconds.observe(result.queue_seconds)


async def _end_of(copying: Future[CopyResult]) -> CopyResult:
    """What `asyncio.wrap_future` does, in half the time, since nobody else waits for this future."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def end() -> None:
        if not ended.done():
            ended.set_result(None)

    def wake(_: Future[CopyResult]) -> None:
        if not loop.is_closed():  # a copy that was given up at shutdown may end after it
            loop.call_soon_threadsafe(end)

    copying.add_done_callback(wake)
    try:
        await ended
    except asyncio.CancelledError:
        copying.cancel()  # if it has not started; the caller finds out
        raise
    return copying.result()


def _groups(session: Session, parts: Sequence[GroupBlocks]) -> list[SessionGroup]:
    """The registered group of each part. Raises InvalidRequest: the text says what does not fit."""
    if len({part.group for part in parts}) < len(parts):
        # Block ids are checked for duplicates within a part: two parts could name one block twice.
        raise InvalidRequest("a group comes twice in one job: put all of its blocks into one part")
    return [_group(session, part) for part in parts]


def _group(session: Session, part: GroupBlocks) -> SessionGroup:
    group = session.groups.get(part.group)
    if group is None:
        raise InvalidRequest(f"group {part.group} is not registered; this rank registered {sorted(session.groups)}")
    if len(part.hashes) != len(part.block_ids):
        raise InvalidRequest(f"group {part.group}: {len(part.hashes)} hashes but {len(part.block_ids)} block ids")
    check_block_ids(part.block_ids, group.layout.num_blocks)
    return group


def _take_checksums(
    checksums: Checksums, grant: StoreGrant, groups: Sequence[SessionGroup], parts: Sequence[GroupBlocks]
) -> None:
    """In a thread. The slots are reserved: nobody else touches them."""
    for group, part, granted in zip(groups, parts, grant.parts, strict=True):
        stored = (
            (part.hashes[i], slot) for i, slot in zip(granted.index.tolist(), granted.slots.tolist(), strict=True)
        )
        checksums.take([slot for block_hash, slot in stored if checksums.chosen(block_hash)], group.layout.shard_bytes)


def _wrong(
    checksums: Checksums, grant: LoadGrant, groups: Sequence[SessionGroup], parts: Sequence[GroupBlocks]
) -> list[tuple[int, int]]:
    """In a thread: (part, index) of the blocks whose slots do not hold what was sealed. They are pinned."""
    found = []
    for number, (group, part, slots) in enumerate(zip(groups, parts, grant.slots, strict=True)):
        index = {slot: i for i, slot in enumerate(slots.tolist()) if checksums.chosen(part.hashes[i])}
        found += [(number, index[slot]) for slot in checksums.wrong(index, group.layout.shard_bytes)]
    return found


def _shard_parts(groups: Sequence[SessionGroup], parts: Sequence[GroupBlocks]) -> list[ShardPart]:
    return [(group.space, group.layout.shard, as_keys(part.hashes)) for group, part in zip(groups, parts, strict=True)]


def _declined(reason: Refusal) -> JobResult:
    return JobResult(Outcome.DECLINED, reason)


def _done(copied_blocks: int, skipped_blocks: int, copied: CopyResult) -> JobResult:
    return JobResult(
        Outcome.DONE,
        copied_blocks=copied_blocks,
        skipped_blocks=skipped_blocks,
        nbytes=copied.nbytes,
        copy_seconds=copied.copy_seconds,
        queue_seconds=copied.queue_seconds,
        copy_ended=copied.ended,
    )
