"""Store and load jobs: the cache decides, a copier moves the bytes, the cache learns the result.

A job belongs to the daemon, not to the RPC that asked for it: DMA cannot be cancelled, so a job whose client has gone
still ends, and only then are its slots, references and mappings given back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from kvsidecar.cache.block_cache import BlockCache, ShardPart
from kvsidecar.cache.grants import LoadGrant, StoreGrant
from kvsidecar.copier.copiers import Copiers
from kvsidecar.copier.messages import Checks, CopyPart, Done, Ended
from kvsidecar.core.checksums import BlocksInSlots, Checksums
from kvsidecar.core.hashes import PackedHashes
from kvsidecar.core.job import Job, JobBlocks, JobResult
from kvsidecar.core.layout_checks import check_block_ids
from kvsidecar.core.metrics import Metrics
from kvsidecar.core.readiness import DaemonReadiness
from kvsidecar.core.sessions import RankSession, SessionGroup
from kvsidecar.core.tiering import Tiering
from kvsidecar.core.zeroing import Zeroing
from kvsidecar.errors import CopyFailed, DeviceError, DeviceLost, InvalidRequest, Refusal
from kvsidecar.support import failpoints
from kvsidecar.support.cpu_sleep import NO_GUARD, SleepGuard
from kvsidecar.types import Direction, Outcome

STORE_BLOCKS = 1024
"""Blocks of a store that one step reserves or seals at most: some 2 milliseconds where each evicts another."""
LOAD_BLOCKS = 8192
"""Blocks of a load that one step references at most."""
MANY_JOBS = 6
"""With this many jobs outstanding, threads are woken often enough to stay awake."""
UNEXPECTED = JobResult(Outcome.FAILED, error="internal error; see the daemon's log")
"""The answer to a job that ended with an unexpected error: without one its client would wait for ever."""


@dataclass(eq=False)
class JobRunner:
    """Runs jobs. Used from the event loop; every decision about up to ``store_blocks`` or ``load_blocks`` blocks is
    made in one step of it, without an await in between.

    Args:
        clock: seconds, the clock of leases.
        later: takes the next step of a larger job in one of the next iterations of the loop.
        store_blocks, load_blocks: the most blocks that one step decides about.
        checksums: checksums of the slots; None for none.
        guard: kept awake when a job begins and when it ends.
        on_ended: called with each job when its answer is on its way.
        tiering: blocks that are worth it go to slower tiers; None: there are none.
    """

    cache: BlockCache
    copiers: Copiers
    readiness: DaemonReadiness
    metrics: Metrics
    clock: Callable[[], float]
    _: KW_ONLY
    later: Callable[[Callable[[], None]], None]
    checksums: Checksums | None = None
    guard: SleepGuard = NO_GUARD
    on_ended: Callable[[RankSession, Job], None] | None = None
    tiering: Tiering | None = None
    zeroing: Zeroing | None = None
    store_blocks: int = STORE_BLOCKS
    load_blocks: int = LOAD_BLOCKS

    def __post_init__(self) -> None:
        self._counts = {direction: _Counts(self.metrics, direction) for direction in Direction}
        self._running: dict[Direction, dict[Job, None]] = {direction: {} for direction in Direction}
        """Jobs that are not over, in the order in which they were taken."""

    @property
    def num_running(self) -> int:
        return sum(map(len, self._running.values()))

    def oldest_seconds(self, direction: Direction) -> float:
        """Age of the oldest job that is not over; 0 if there is none."""
        oldest = next(iter(self._running[direction]), None)
        return 0.0 if oldest is None else self.clock() - oldest.taken

    async def wait_for(self, direction: Direction) -> None:
        """Return when all jobs of this direction that run now are over."""
        if running := self._running[direction]:
            await asyncio.wait([job.over() for job in running])

    # -- the way in ------------------------------------------------------------------------------------------------

    def start(self, session: RankSession, job: Job, *, deadline: float | None = None) -> None:
        """Decide about the job, and hand its copy over; or answer it at once. Never raises.

        When this returns, the slots of a store are reserved, and the blocks of a load are referenced. So a message
        behind the load, such as the release of its lease, cannot take the blocks away. Of a job with very many blocks
        that holds only when it has left `RankSession.beginning`: until then, the rank's other jobs wait, and its other
        messages should.

        Args:
            deadline: seconds from now after which its copy must not start any more.
        """
        self._keep_awake_for(session, job)
        job.taken = self.clock()
        session.add(job)
        self._running[job.direction][job] = None
        if deadline is not None:
            job.timer = asyncio.get_running_loop().call_later(deadline, job.cancel, Refusal.DEADLINE)
        session.beginning.append(job)
        begin = self._begin_store if job.direction is Direction.STORE else self._begin_load
        self._begin(session, job, begin(session, job))

    def decline(self, direction: Direction, reason: Refusal, error: str = "") -> JobResult:
        """Count and answer a job that is never started."""
        result = _declined(reason, error)
        self._count(direction, result)
        return result

    def refuse(self, reason: Refusal) -> None:
        """Count the refusal of a request that is no job."""
        self.metrics.refuse(reason)

    # -- the way through -------------------------------------------------------------------------------------------

    def _begin(self, session: RankSession, job: Job, steps: Generator[None, None, JobResult | None]) -> None:
        """Take the next step of a job's beginning, whose last one hands the copy over."""
        again = partial(self._begin, session, job, steps)
        if session.beginning[0] is not job:
            self.later(again)
            return
        begun = True

        def step() -> JobResult | None:
            nonlocal begun
            if job.stopped is not None:
                return _declined(job.stopped)
            try:
                next(steps)
            except StopIteration as end:
                result: JobResult | None = end.value
                return result
            begun = False
            return None

        self._step(session, job, step)
        if begun:
            session.beginning.pop(0)
        else:
            self.later(again)

    def _step(self, session: RankSession, job: Job, step: Callable[[], JobResult | None]) -> None:
        """Take one step of a job, and end the job if it has a result then. An error is this job's alone."""
        result: JobResult | None = UNEXPECTED
        try:
            result = step()
        except InvalidRequest as error:
            result = _declined(Refusal.INVALID_REQUEST, str(error))
        except DeviceLost as error:
            result = JobResult(Outcome.FAILED, Refusal.DEVICE_LOST, str(error))
        except (DeviceError, failpoints.FailpointError) as error:
            result = JobResult(Outcome.FAILED, Refusal.COPY_FAILED, str(error))
        except Exception as error:  # noqa: BLE001 - reported; the loop and the other jobs go on
            session.tasks.report(f"{job.direction}-job", error)
        if result is not None:
            self._end(session, job, result)

    def _begin_store(self, session: RankSession, job: Job) -> Generator[None, None, JobResult | None]:
        if (refusal := self.readiness.refusal) is not None:
            return _declined(refusal)
        groups = _groups(session, job.parts)
        if any(part.slice for part in job.parts):
            raise InvalidRequest("a store names a slice of a group, but a store always copies whole blocks")
        if lost := session.lost:
            return _declined(Refusal.DEVICE_LOST, lost)
        parts: list[CopyPart] = []
        taken: list[tuple[StoreGrant, Checks]] = []
        """The checksums that the copier takes, in this order."""
        zeroing = 1  # besides the grants, this job's own beginning

        def go_on() -> JobResult | None:
            nonlocal zeroing
            zeroing -= 1
            if zeroing:
                return None
            if job.stopped is not None:
                return _declined(job.stopped)
            self._copy(session, job, _merged(parts), _joined([checks for _, checks in taken]), copied)
            return None

        later, checksums = partial(self._step, session, job, go_on), self.checksums
        reserved = skipped = 0
        for piece in _pieces(groups, job.parts, self.store_blocks):
            if job.num_blocks > self.store_blocks:
                yield
            grant = self.cache.begin_store(
                [_shard_part(each) for each in piece], session.copier.numa_node, job.ttl, job.priority, job.idle_ttl
            )
            if isinstance(grant, Refusal):
                return _declined(grant)
            job.grants.append(grant)
            reserved += grant.reserved
            skipped += grant.present + grant.in_flight
            if not grant.reserved:
                continue
            failpoints.hit("store.after_reserve")
            # Blocks that are present, or that another store fills, are left out.
            parts += [
                CopyPart(each.part.group, each.block_ids[part.index], part.slots)
                for each, part in zip(piece, grant.parts, strict=True)
            ]
            if checksums is not None and (checks := checksums.to_take(_stored(grant, piece))) is not None:
                taken.append((grant, checks))
            if self.zeroing is not None and not self.zeroing.may_write(grant, later):
                zeroing += 1
        if not reserved:
            return JobResult(Outcome.DONE, skipped_blocks=skipped)
        failpoints.hit("store.before_copy")

        def copied(done: Done) -> JobResult:
            failpoints.hit("store.before_seal")
            if checksums is not None:
                first = 0
                for grant, checks in taken:
                    checksums.keep(grant, checks, done.values[first : first + len(checks)])
                    first += len(checks)
            return _done(reserved, skipped, done)

        return go_on()

    def _begin_load(self, session: RankSession, job: Job) -> Generator[None, None, JobResult | None]:
        if (refusal := self.readiness.read_refusal) is not None:
            return _declined(refusal)
        if lost := session.lost:
            return _declined(Refusal.DEVICE_LOST, lost)
        groups = _groups(session, job.parts)
        parts: list[CopyPart] = []
        compared: list[Checks] = []
        places: list[tuple[LoadGrant, int, int]] = []
        for piece in _pieces(groups, job.parts, self.load_blocks):
            if job.num_blocks > self.load_blocks:  # also before the first, since to look at all ids takes its time
                yield
            grant = self.cache.begin_load([_shard_part(each) for each in piece], job.lease, self.clock())
            if isinstance(grant, Refusal):
                return _declined(grant)
            job.grants.append(grant)
            parts += [
                CopyPart(each.part.group, each.block_ids, slots, each.part.slice)
                for each, slots in zip(piece, grant.slots, strict=True)
            ]
            if self.checksums is not None:
                checks, places_of = self.checksums.to_compare(_loaded(grant, piece))
                if checks is not None:
                    compared.append(checks)
                places += [(grant, *place) for place in places_of]
        if not job.num_blocks:
            return JobResult(Outcome.DONE)
        failpoints.hit("load.before_copy")

        def copied(done: Done) -> JobResult:
            if done.ended is Ended.CORRUPT:
                for index in done.values:
                    self.cache.mark_corrupt(*places[index])
                return _declined(Refusal.CHECKSUM)
            return _done(job.num_blocks, 0, done)

        self._copy(session, job, _merged(parts), _joined(compared), copied)
        return None

    def _copy(
        self,
        session: RankSession,
        job: Job,
        parts: Sequence[CopyPart],
        checks: Checks | None,
        copied: Callable[[Done], JobResult],
    ) -> None:
        """Hand the copy over. The job continues when it ends, with `copied` if its bytes were moved or compared.

        Raises:
            CopyFailed, DeviceLost: it was not handed over.
        """

        if lost := session.lost:  # since the job's first step: the next copier does not have the rank's memory
            raise DeviceLost(lost)

        def result_of(end: Done | DeviceLost) -> JobResult:
            if isinstance(end, DeviceLost):
                raise end
            if end.ended is Ended.FAILED:
                raise CopyFailed(end.error)
            if end.ended is Ended.CANCELLED:
                assert job.stopped is not None
                return _declined(job.stopped)
            return copied(end)

        def ended(end: Done | DeviceLost) -> None:
            self._step(session, job, lambda: result_of(end))

        job.copy(session.copier, session.id, parts, checks, session.weight, ended)

    # -- the way out -----------------------------------------------------------------------------------------------

    def _end(self, session: RankSession, job: Job, result: JobResult) -> None:
        """End a job, whatever its outcome: give back all that is held for it, and answer its client. Its copy is over:
        a copier settles every copy, if not alive then by its death. Of a large job, one grant in each step."""
        if job.grants:
            # The last blocks of a prompt first: they count as used before the others.
            grant = job.grants.pop()
            try:
                self._end_grant(grant, done=result.outcome is Outcome.DONE)
            except Exception as error:  # noqa: BLE001 - reported; the loop and the other jobs go on
                session.tasks.report(f"{job.direction}-job", error)
                result = UNEXPECTED
            if job.grants:
                self.later(partial(self._end, session, job, result))
                return
        try:
            self._answer(session, job, result)
        except Exception as error:  # noqa: BLE001 - as above
            session.tasks.report(f"{job.direction}-job", error)

    def _answer(self, session: RankSession, job: Job, result: JobResult) -> None:
        if job.timer is not None:
            job.timer.cancel()
            job.timer = None
        del self._running[job.direction][job]
        session.remove(job)
        self._keep_awake_for(session, job)
        self._count(job.direction, result)
        now = self.clock()
        if result.nbytes:
            self.metrics.job_seconds.labels(job.direction.value).observe(now - job.taken)
            session.copied_bytes[job.direction] += result.nbytes
            self.metrics.devices.of(session.copier.uuid).copied(job.direction, result.nbytes)
            self.metrics.models.copied(session.registration.namespace.model, job.direction, result.nbytes)
            if job.direction is Direction.LOAD and session.registration.rank == 0:
                self.metrics.loaded_tokens.inc(_tokens(job.parts, session.registration.namespace.block_size))
        job.end(result, now)
        if self.on_ended is not None:
            # The client is answered in this iteration of the loop, and need not wait for the record.
            asyncio.get_running_loop().call_soon(self.on_ended, session, job)

    def _end_grant(self, grant: StoreGrant | LoadGrant, *, done: bool) -> None:
        """End a grant.

        Args:
            done: the bytes of its blocks were copied.
        """
        if isinstance(grant, StoreGrant):
            if done:
                self.cache.seal_all(grant)
                if self.tiering is not None:
                    self.tiering.stored(grant)
            else:
                self.cache.abort_all(grant)
        else:
            if done and self.tiering is not None:
                self.tiering.used(grant)
            self.cache.end_load(grant)

    def _keep_awake_for(self, session: RankSession, job: Job) -> None:
        """Keep the loop awake for the end of this job, unless it is a paced store, whose end is not urgent, or enough
        jobs are running that nothing sleeps."""
        if self.num_running < MANY_JOBS and self.copiers.pacing.of(session.copier.uuid, job.direction) is None:
            self.guard.keep_awake()

    def _count(self, direction: Direction, result: JobResult) -> None:
        self._counts[direction].outcomes[result.outcome].inc()
        if result.reason is not None:
            self.metrics.refuse(result.reason)
        if result.nbytes:
            self._counts[direction].copied(result)


def _tokens(parts: Sequence[JobBlocks], block_tokens: int) -> int:
    """Tokens of the prompts that a load continues: those of the group with most blocks, as others need only the last
    ones. For a load by slices, the first slice counts."""
    return block_tokens * max((len(part.block_ids) for part in parts if part.slice <= 1), default=0)


class _Counts:
    """The metrics of one direction, looked up once: finding a label takes longer than counting."""

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


def _groups(session: RankSession, parts: Sequence[JobBlocks]) -> list[SessionGroup]:
    """The registered group of each part. Raises InvalidRequest."""
    if len({part.group for part in parts}) < len(parts):
        # Block ids are checked for duplicates within a part only: two parts could name one block twice.
        raise InvalidRequest("a group appears twice in one job: put all of its blocks into one part")
    return [_group(session, part) for part in parts]


def _group(session: RankSession, part: JobBlocks) -> SessionGroup:
    group = session.groups.get(part.group)
    if group is None:
        raise InvalidRequest(f"group {part.group} is not registered; this rank registered {sorted(session.groups)}")
    if len(part.hashes) != len(part.block_ids):
        raise InvalidRequest(f"group {part.group}: {len(part.hashes)} hashes but {len(part.block_ids)} block ids")
    if part.slice > len(group.layout.slices):
        raise InvalidRequest(f"group {part.group} has {len(group.layout.slices)} slices, but no slice {part.slice}")
    check_block_ids(part.block_ids, group.layout.num_blocks)
    return group


@dataclass(frozen=True, slots=True)
class _Span:
    """Adjacent blocks of one part of a job, as many as one step takes."""

    group: SessionGroup
    part: JobBlocks
    first: int
    end: int

    @property
    def block_ids(self) -> npt.NDArray[np.int64]:
        return self.part.block_ids[self.first : self.end]

    @property
    def hashes(self) -> Sequence[bytes] | bytes:
        """Their hashes, in the form that the cache takes fastest."""
        hashes = self.part.hashes
        return hashes.cut(self.first, self.end) if isinstance(hashes, PackedHashes) else hashes[self.first : self.end]


_Piece = list[_Span]
"""The blocks of a job that one step takes."""


def _pieces(groups: Sequence[SessionGroup], parts: Sequence[JobBlocks], most: int) -> Iterator[_Piece]:
    """The job's blocks in order, cut into pieces of limited size; at least one piece."""
    piece, left = _Piece(), most
    for group, part in zip(groups, parts, strict=True):
        first, count = 0, len(part.block_ids)
        while True:
            end = min(count, first + left)
            piece.append(_Span(group, part, first, end))
            left -= end - first
            if end == count:
                break
            yield piece
            piece, left, first = _Piece(), most, end
    yield piece


def _merged(parts: Sequence[CopyPart]) -> Sequence[CopyPart]:
    """One part for each group and slice."""
    found: dict[tuple[int, int], list[CopyPart]] = {}
    for each in parts:
        found.setdefault((each.group, each.slice), []).append(each)
    if len(found) == len(parts):
        return parts
    return [
        CopyPart(
            group, np.concatenate([each.block_ids for each in some]), np.concatenate([each.slots for each in some]), at
        )
        for (group, at), some in found.items()
    ]


def _joined(checks: Sequence[Checks]) -> Checks | None:
    return np.concatenate(checks) if len(checks) > 1 else checks[0] if checks else None


def _stored(grant: StoreGrant, piece: _Piece) -> Iterator[BlocksInSlots]:
    """The blocks that a store was granted."""
    for each, granted in zip(piece, grant.parts, strict=True):
        hashes = [each.part.hashes[each.first + index] for index in granted.index.tolist()]
        yield hashes, granted.slots.tolist(), each.group.layout.shard_bytes


def _loaded(grant: LoadGrant, piece: _Piece) -> Iterator[BlocksInSlots]:
    for each, slots in zip(piece, grant.slots, strict=True):
        yield each.part.hashes[each.first : each.end], slots.tolist(), each.group.layout.shard_bytes


def _shard_part(span: _Span) -> ShardPart:
    return span.group.space, span.group.layout.shard, span.hashes


def _declined(reason: Refusal, error: str = "") -> JobResult:
    return JobResult(Outcome.DECLINED, reason, error)


def _done(copied_blocks: int, skipped_blocks: int, copied: Done) -> JobResult:
    return JobResult(
        Outcome.DONE,
        copied_blocks=copied_blocks,
        skipped_blocks=skipped_blocks,
        nbytes=copied.nbytes,
        copy_seconds=copied.copy_seconds,
        queue_seconds=copied.queue_seconds,
        copy_ended=copied.at,
    )
