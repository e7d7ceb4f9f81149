"""One rank's Attach stream: handles requests, starts jobs, sends results. Independent of the transport."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial

from kvsidecar.core.job import Job, JobResult, StoreOrder
from kvsidecar.core.jobs import JobRunner
from kvsidecar.core.readiness import DaemonReadiness
from kvsidecar.core.sessions import Instances, RankSession
from kvsidecar.core.watches import Watches
from kvsidecar.errors import InvalidRequest, Refusal
from kvsidecar.protocol.wire import readiness_to_wire
from kvsidecar.server import convert
from kvsidecar.support import log
from kvsidecar.types import Direction, Priority
from kvsidecar.v1 import sidecar_pb2 as pb

MAX_JOBS = 8192
"""Limit of outstanding jobs per rank. A client's default limit is half of it."""
MAX_OUTSTANDING_BLOCKS = 1 << 21
"""Limit of blocks in the outstanding jobs of a rank. Each takes about 50 bytes until its job ends."""

NO_LEASE = -1
"""An id that no lease has. Another user's lease is treated like it, whatever else is wrong with the load."""
MAX_JOBS_OF_USER = 1 << 15
"""Limit of outstanding jobs of all ranks of a user. Each takes some 4 KiB."""
MAX_BLOCKS_OF_USER = 1 << 23
"""Limit of blocks in these."""
MAX_WAITS_OF_USER = 1 << 17
"""Limit of jobs that waiting flushes of a user's ranks name, counted for each flush: each takes some 300 bytes."""
MAX_FLUSHES = 1024
"""Limit of waiting flushes per rank. One more is answered at once, with the jobs that are still pending."""

_caused = log.limited("rpc")

Send = Callable[[pb.AttachReply], None]
"""Sends or queues a reply. Never waits."""


def forward_readiness(readiness: DaemonReadiness, send: Send) -> Callable[[], None]:
    """Send each change. Returns what ends that."""
    return readiness.listen(lambda now: send(pb.AttachReply(readiness=readiness_to_wire(now))))


@dataclass(eq=False)
class AttachStream:
    """The stream from registration to `close`: starts the requested jobs, and sends results and readiness changes."""

    session: RankSession
    send: Send
    instances: Instances
    readiness: DaemonReadiness
    runner: JobRunner
    watches: Watches
    on_close: Callable[[AttachStream], object] = lambda _: None
    _flushes: int = 0

    def __post_init__(self) -> None:
        self._stop_listening = forward_readiness(self.readiness, self.send)
        self._calls = asyncio.Lock()
        """Held by the call that begins its job: the next ones wait, in their order."""

    def close(self) -> None:
        """Accept no more requests. The results of running jobs are still sent. May be called more than once."""
        self._stop_listening()
        self.on_close(self)

    def handle(self, message: pb.AttachRequest) -> None:
        """Handle one request. Jobs start in the order of their messages.

        Raises:
            InvalidRequest: the stream must end with this error.
        """
        match message.WhichOneof("message"):
            case "store":
                self._start(message.store, Direction.STORE, partial(self._done, message.store.job))
            case "load":
                self._start(message.load, Direction.LOAD, partial(self._done, message.load.job))
            case "flush":
                self._flush(message.flush)
            case "idle":
                self.instances.set_idle(self.session, message.idle.idle)
            case "register" | "watch":
                raise InvalidRequest("a stream can register only once")
            case _:
                # From a newer client. The protocol number refuses incompatible clients; unknown extras are ignored.
                _caused.warning("unknown attach message ignored", instance=self.session.registration.instance)

    async def call(
        self, message: pb.Store | pb.Load, direction: Direction, turn: Callable[[], Awaitable[None]]
    ) -> pb.JobDone:
        """Run a job that comes in a call of its own. If cancelled, a copy that has not started never starts; the job
        ends all the same.

        Args:
            turn: waits for a step of the loop's time: many calls may arrive in one iteration.

        Raises:
            InvalidRequest: the job's number is in use.
        """
        answer: asyncio.Future[JobResult] = asyncio.get_running_loop().create_future()

        def done(result: JobResult) -> None:
            self._report(result)
            if not answer.done():  # the call was cancelled
                answer.set_result(result)

        async with self._calls:
            await turn()
            while self.session.beginning:
                await turn()
            self._start(message, direction, done)
        job = self.session.jobs.get(message.job)
        try:
            return convert.job_done_to(message.job, await answer)
        except asyncio.CancelledError:
            if job is not None:
                job.cancel(Refusal.CANCELLED)
            raise

    def _start(self, message: pb.Store | pb.Load, direction: Direction, done: Callable[[JobResult], None]) -> None:
        """Start a job, or decline it at once. When this returns, the blocks of a load are referenced: the next message
        may release their lease.

        Args:
            done: called once, with the result.
        """
        session, runner = self.session, self.runner
        if message.job in session.jobs:
            raise InvalidRequest(f"job {message.job} is still running: a job number may be reused after its JobDone")
        refusal = self._refusal()
        if refusal is not None:
            done(runner.decline(direction, refusal))
            return
        try:
            job = self._job(message, direction, done)
        except InvalidRequest as error:
            done(runner.decline(direction, Refusal.INVALID_REQUEST, str(error)))
            return
        blocks = max(1, job.num_blocks)
        too_many = session.outstanding_blocks + blocks > MAX_OUTSTANDING_BLOCKS
        if too_many or session.of_user.blocks + blocks > MAX_BLOCKS_OF_USER:
            done(runner.decline(direction, Refusal.LIMIT))
            return
        runner.start(session, job, deadline=message.deadline_ms / 1000 if message.deadline_ms else None)

    def _refusal(self) -> Refusal | None:
        """Why this rank cannot start a job now, or None."""
        if self.session.ending:
            return Refusal.DRAINING
        if self.session.denied:
            return Refusal.DENIED
        too_many = len(self.session.jobs) >= MAX_JOBS or self.session.of_user.jobs >= MAX_JOBS_OF_USER
        return Refusal.LIMIT if too_many else None

    def _job(self, message: pb.Store | pb.Load, direction: Direction, done: Callable[[JobResult], None]) -> Job:
        parts = convert.blocks_from(message.blocks, self.session.registration.namespace.hash_bytes)
        order, lease, ttl, idle_ttl, priority = None, None, 0.0, 0.0, Priority.NORMAL
        if isinstance(message, pb.Store):
            ttl, idle_ttl = message.ttl_seconds, message.idle_ttl_seconds
            if message.priority:
                priority = convert.priority_from(message.priority)
            order = self._order(message.event) if message.event else None
            for each in message.blocks:
                if each.notes:
                    namespace, user = self.session.registration.namespace, self.session.peer.uid
                    self.watches.note(namespace, each.group, each.hashes, each.notes, user=user)
        elif message.lease:
            mine = self.instances.may_use_lease(message.lease, self.session.peer.uid)
            lease = message.lease if mine else NO_LEASE
        return Job(
            message.job,
            direction,
            parts,
            lease=lease,
            order=order,
            ttl=ttl,
            idle_ttl=idle_ttl,
            priority=priority,
            traceparent=message.traceparent,
            on_done=done,
        )

    def _done(self, job: int, result: JobResult) -> None:
        self._report(result)
        self.send(pb.AttachReply(done=convert.job_done_to(job, result)))

    def _report(self, result: JobResult) -> None:
        """Log a job that was refused as invalid."""
        if result.reason is Refusal.INVALID_REQUEST:
            _caused.warning(
                "a job was refused as invalid", instance=self.session.registration.instance, error=result.error
            )

    def _order(self, event: int) -> StoreOrder:
        """The event that a store waits for. Raises InvalidRequest if the rank's ring has no event of this number."""
        if not 1 <= event <= self.session.num_events:
            raise InvalidRequest(f"event {event} is not in this rank's ring of {self.session.num_events} events")
        return StoreOrder(event - 1, partial(self.send, pb.AttachReply(wait_issued=pb.WaitIssued(event=event))))

    def _flush(self, message: pb.Flush) -> None:
        """Let the named jobs end first, or cancel them, before the next message is handled."""
        running = self.session.jobs
        named = message.jobs or [job for job, each in running.items() if each.direction is Direction.STORE]
        wanted = {job: running[job] for job in named if job in running}
        for each in wanted.values():
            if message.mode == pb.Flush.MODE_CANCEL:
                each.cancel(Refusal.CANCELLED)
            else:
                each.prioritize()
        self.session.tasks.spawn(self._wait_for_flush(message, wanted), name="flush")

    async def _wait_for_flush(self, message: pb.Flush, wanted: Mapping[int, Job]) -> None:
        """Reply when these jobs have ended, or at the client's timeout with those that have not."""
        if wanted:
            seconds = message.timeout_ms / 1000
            of_user = self.session.of_user
            if self._flushes >= MAX_FLUSHES or of_user.waits + len(wanted) > MAX_WAITS_OF_USER:
                self.runner.refuse(Refusal.LIMIT)
                seconds = 0.0
            self._flushes += 1
            of_user.waits += len(wanted)
            try:
                await asyncio.wait([each.over() for each in wanted.values()], timeout=seconds)
            finally:
                self._flushes -= 1
                of_user.waits -= len(wanted)
        pending = [job for job, each in wanted.items() if each.result is None]
        self.send(pb.AttachReply(flushed=pb.Flushed(flush=message.flush, pending=pending)))
