"""One rank's Attach stream: takes requests, starts jobs, sends results. Independent of the carrier."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any, TypeVar

from kvsidecar.core.jobs import GroupBlocks, JobResult, StoreOrder, Transfers
from kvsidecar.core.readiness import Readiness, Snapshot
from kvsidecar.core.sessions import Instances, JobControl, RunningJob, Session
from kvsidecar.errors import InvalidRequest
from kvsidecar.server import convert as translate
from kvsidecar.support import log
from kvsidecar.types import Direction, Outcome, Refusal
from kvsidecar.v1 import sidecar_pb2 as pb

MAX_JOBS = 8192
"""Of one rank that are not over. A client has half of that by default."""
MAX_OUTSTANDING_BLOCKS = 1 << 21
"""Of one rank's jobs that are not over; each has about 50 bytes here until then."""

NO_LEASE = -1
"""An id that no lease ever has. Another user's is answered like it, whatever else is wrong with the load."""
MAX_FLUSHES = 1024
"""Of one rank that wait; one more is answered at once, with what is pending then."""

_log = log.get("rpc")

Send = Callable[[pb.AttachReply], None]
"""Puts an answer on its way; never waits."""

Job = TypeVar("Job", pb.Store, pb.Load)


class AttachStream:
    """From the registration until `close`: starts the requested jobs, and sends results and readiness as they occur."""

    def __init__(
        self, session: Session, send: Send, *, instances: Instances, readiness: Readiness, transfers: Transfers
    ) -> None:
        self._session = session
        self._send = send
        self._instances = instances
        self._transfers = transfers
        self._flushes = 0
        self._stop_listening = readiness.listen(self._tell_readiness)

    def close(self) -> None:
        """Nothing more is taken. The answers of jobs that run are still sent."""
        self._stop_listening()

    def _tell_readiness(self, snapshot: Snapshot) -> None:
        self._send(pb.AttachReply(readiness=translate.readiness_to(snapshot)))

    def take(self, message: pb.AttachRequest) -> None:
        """Start what one message asks for. The jobs begin in the order of their messages.

        Raises:
            InvalidRequest: the stream must end with it.
        """
        match message.WhichOneof("message"):
            case "store":
                self._start(message.store, Direction.STORE, self._store)
            case "load":
                self._start(message.load, Direction.LOAD, self._load)
            case "flush":
                self._session.jobs.spawn(self._flush(message.flush), name="flush")
            case "idle":
                self._instances.set_idle(self._session, message.idle.idle)
            case "register":
                raise InvalidRequest("a stream can register only once")
            case _:
                # From a newer client: the protocol number is what refuses those, an unknown extra is let pass.
                _log.warning("unknown attach message ignored", instance=self._session.registration.instance)

    def _start(
        self, message: Job, direction: Direction, begin: Callable[[Job, JobControl], Coroutine[Any, Any, JobResult]]
    ) -> None:
        jobs = self._session.jobs_by_id
        if message.job in jobs:
            raise InvalidRequest(f"job {message.job} is still running: a job number may be reused after its JobDone")
        if self._session.ending:
            self._done(message.job, self._transfers.declined(direction, Refusal.DRAINING))
            return
        if self._session.denied or len(jobs) >= MAX_JOBS:
            reason = Refusal.DENIED if self._session.denied else Refusal.LIMIT
            self._done(message.job, self._transfers.declined(direction, reason))
            return
        control = JobControl()
        if message.deadline_ms:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(message.deadline_ms / 1000, control.cancel, Refusal.DEADLINE)
        job = self._answer(message.job, control, begin(message, control))
        task = self._session.jobs.spawn(job, name=f"{direction}-job")
        if message.deadline_ms:
            task.add_done_callback(lambda _: timer.cancel())
        jobs[message.job] = RunningJob(direction, task, control)

    def _done(self, job: int, result: JobResult) -> None:
        self._send(pb.AttachReply(done=translate.job_done_to(job, result)))

    async def _answer(self, job: int, control: JobControl, running: Coroutine[Any, Any, JobResult]) -> None:
        try:
            result = await running
        except Exception:
            # Nobody expected this one. The client is owed an answer all the same, or it would wait for ever.
            error = "internal error; see the daemon's log"
            self._done(job, JobResult(Outcome.FAILED, error=error, unsettled=bool(control.unsettled)))
            raise
        finally:
            del self._session.jobs_by_id[job]
        self._done(job, result)

    def _blocks(self, messages: Collection[pb.Blocks]) -> list[GroupBlocks]:
        return translate.blocks_from(messages, self._session.registration.namespace.hash_bytes)

    async def _store(self, message: pb.Store, control: JobControl) -> JobResult:
        try:
            blocks = self._blocks(message.blocks)
            order = self._order(message.event) if message.event else None
        except InvalidRequest as error:
            return self._transfers.invalid(Direction.STORE, error)
        if not (count := self._take(blocks)):
            return self._transfers.declined(Direction.STORE, Refusal.LIMIT)
        try:
            return await self._transfers.store(self._session, blocks, control, order, message.traceparent)
        finally:
            self._session.outstanding_blocks -= count

    def _load(self, message: pb.Load, control: JobControl) -> Coroutine[Any, Any, JobResult]:
        """Its blocks are pinned when this returns: what comes next may be the release of their lease."""
        try:
            blocks = self._blocks(message.blocks)
        except InvalidRequest as error:
            return _answered(self._transfers.invalid(Direction.LOAD, error))
        if not (count := self._take(blocks)):
            return _answered(self._transfers.declined(Direction.LOAD, Refusal.LIMIT))
        lease = message.lease or None
        if lease is not None and not self._instances.may_use_lease(lease, self._session.peer.uid):
            lease = NO_LEASE
        load = self._transfers.load(self._session, blocks, lease, control, message.traceparent)
        return self._counted(count, load)

    async def _counted(self, count: int, running: Coroutine[Any, Any, JobResult]) -> JobResult:
        try:
            return await running
        finally:
            self._session.outstanding_blocks -= count

    def _take(self, blocks: Sequence[GroupBlocks]) -> int:
        """Count what a job keeps here until it is over, at least 1; 0 if that would be too much."""
        session = self._session
        count = max(1, sum([len(each.block_ids) for each in blocks]))
        if session.outstanding_blocks + count > MAX_OUTSTANDING_BLOCKS:
            return 0
        session.outstanding_blocks += count
        return count

    def _order(self, event: int) -> StoreOrder:
        """The event of the ring that a store comes after. Raises InvalidRequest if there is none of that number."""
        events = self._session.events
        if not 1 <= event <= len(events):
            raise InvalidRequest(f"event {event} is not in this rank's ring of {len(events)} events")
        loop = asyncio.get_running_loop()
        issued = pb.AttachReply(wait_issued=pb.WaitIssued(event=event))

        def on_start() -> None:
            loop.call_soon_threadsafe(self._send, issued)

        return StoreOrder(events[event - 1], on_start)

    async def _flush(self, message: pb.Flush) -> None:
        """Answer when the named jobs are over, or with those that are not when the client's time is."""
        running = self._session.jobs_by_id
        named = message.jobs or [job for job, each in running.items() if each.direction is Direction.STORE]
        wanted = {job: running[job] for job in named if job in running}
        for each in wanted.values():
            if message.mode == pb.Flush.MODE_CANCEL:
                each.control.cancel(Refusal.CANCELLED)
            else:
                each.control.hurry()
        if wanted:
            seconds = message.timeout_ms / 1000
            if self._flushes >= MAX_FLUSHES:
                self._transfers.refuse(Refusal.LIMIT)
                seconds = 0.0
            self._flushes += 1
            try:
                await asyncio.wait([each.task for each in wanted.values()], timeout=seconds)
            finally:
                self._flushes -= 1
        pending = [job for job, each in wanted.items() if not each.task.done()]
        self._send(pb.AttachReply(flushed=pb.Flushed(flush=message.flush, pending=pending)))


async def _answered(result: JobResult) -> JobResult:
    return result
