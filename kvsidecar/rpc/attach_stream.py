"""One rank's open Attach stream: requests in, jobs started, answers out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

import grpc

from kvsidecar import __version__, log
from kvsidecar.errors import InvalidRequest, KVSidecarError, LimitExceeded
from kvsidecar.instances import JobControl, RunningJob, Session
from kvsidecar.readiness import Readiness, Snapshot
from kvsidecar.rpc import translate
from kvsidecar.tasks import TaskSet
from kvsidecar.transfers import GroupBlocks, JobResult, StoreOrder, Transfers
from kvsidecar.types import Direction, Outcome, Refusal
from kvsidecar.v1 import sidecar_pb2 as pb

_log = log.get("rpc")

Context = grpc.aio.ServicerContext[Any, Any]
MAX_UNREAD = 8192
"""Answers kept for a client that does not read its stream; each is about 100 bytes."""

Job = TypeVar("Job", pb.Store, pb.Load)


class AttachStream:
    """One rank's open stream: reads requests, starts jobs, and writes what happens in the order it happens."""

    def __init__(
        self,
        session: Session,
        context: Context,
        *,
        epoch: int,
        readiness: Readiness,
        transfers: Transfers,
        tasks: TaskSet,
    ) -> None:
        self._session = session
        self._context = context
        self._epoch = epoch
        self._readiness = readiness
        self._transfers = transfers
        self._tasks = tasks
        # One reply per job, and some of readiness: bounded by MAX_UNREAD, beyond which the stream is ended.
        self._outbox: asyncio.Queue[pb.AttachReply | None] = asyncio.Queue()
        self._writer: asyncio.Task[None] | None = None

    async def run(self) -> KVSidecarError | None:
        """Serve until the client half-closes. Returns why the stream must end with an error, or None.

        Raises:
            CancelledError: the client has gone.
        """
        session = self._session
        registered = pb.Registered(
            epoch=self._epoch,
            session=session.id,
            readiness=translate.readiness_to(self._readiness.now),
            version=__version__,
            device_order=bool(session.events),
            device_order_refused=session.device_order_refused,
        )
        self._outbox.put_nowait(pb.AttachReply(registered=registered))
        stop_listening = self._readiness.listen(self._tell_readiness)
        self._writer = self._tasks.spawn(self._write(), name="attach-writer")
        try:
            while (message := await self._context.read()) is not grpc.aio.EOF:
                self._take(message)
        except KVSidecarError as error:
            return error
        finally:
            stop_listening()
        return None

    def cancel(self) -> None:
        """Nobody reads any more what is owed."""
        if self._writer is not None:
            self._writer.cancel()

    async def finish(self) -> None:
        """Write what is still owed, then let the stream end."""
        self._outbox.put_nowait(None)
        if self._writer is not None:
            await self._writer

    def _tell_readiness(self, snapshot: Snapshot) -> None:
        self._outbox.put_nowait(pb.AttachReply(readiness=translate.readiness_to(snapshot)))

    async def _write(self) -> None:
        try:
            while (reply := await self._outbox.get()) is not None:
                await self._context.write(reply)
        except grpc.aio.BaseError as error:
            # The client has gone, and the handler has not heard of it yet: nobody reads what is owed.
            _log.debug("a reply was not written", error=str(error))

    def _take(self, message: pb.AttachRequest | InvalidRequest) -> None:
        """Start what one message asks for. The jobs begin in the order of their messages."""
        if isinstance(message, InvalidRequest):  # it did not parse
            raise message
        match message.WhichOneof("message"):
            case "store":
                self._start(message.store, Direction.STORE, self._store)
            case "load":
                self._start(message.load, Direction.LOAD, self._load)
            case "flush":
                self._session.jobs.spawn(self._flush(message.flush), name="flush")
            case "register":
                raise InvalidRequest("a stream registers once")
            case _:
                # From a newer client: the protocol number is what refuses those, an unknown extra is let pass.
                _log.warning("unknown attach message ignored", instance=self._session.registration.instance)

    def _start(
        self, message: Job, direction: Direction, run: Callable[[Job, JobControl], Coroutine[Any, Any, JobResult]]
    ) -> None:
        jobs = self._session.jobs_by_id
        if message.job in jobs:
            raise InvalidRequest(
                f"job {message.job} is still running: a job id may be used again once its JobDone has come"
            )
        if self._outbox.qsize() >= MAX_UNREAD:
            raise LimitExceeded(
                f"{MAX_UNREAD} answers wait for this client to read them: read the Attach stream while jobs are sent"
            )
        if self._session.ending:
            self._done(message.job, self._transfers.declined(direction, Refusal.DRAINING))
            return
        control = JobControl()
        if message.deadline_ms:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(message.deadline_ms / 1000, control.cancel, Refusal.DEADLINE)
        task = self._session.jobs.spawn(self._answer(message.job, run(message, control)), name=f"{direction}-job")
        if message.deadline_ms:
            task.add_done_callback(lambda _: timer.cancel())
        jobs[message.job] = RunningJob(direction, task, control)

    def _done(self, job: int, result: JobResult) -> None:
        self._outbox.put_nowait(pb.AttachReply(done=translate.job_done_to(job, result)))

    async def _answer(self, job: int, running: Coroutine[Any, Any, JobResult]) -> None:
        try:
            result = await running
        except Exception:
            # Nobody expected this one. The client is owed an answer all the same, or it would wait for ever.
            self._done(job, JobResult(Outcome.FAILED, error="internal error; see the daemon's log", unsettled=True))
            raise
        finally:
            del self._session.jobs_by_id[job]
        self._done(job, result)

    def _blocks(self, messages: Iterable[pb.Blocks]) -> list[GroupBlocks]:
        return translate.blocks_from(messages, self._session.registration.namespace.hash_bytes)

    async def _store(self, message: pb.Store, control: JobControl) -> JobResult:
        try:
            blocks = self._blocks(message.blocks)
            order = self._order(message.event) if message.event else None
        except InvalidRequest as error:
            return self._transfers.invalid(Direction.STORE, error)
        return await self._transfers.store(self._session, blocks, control, order)

    async def _load(self, message: pb.Load, control: JobControl) -> JobResult:
        try:
            blocks = self._blocks(message.blocks)
        except InvalidRequest as error:
            return self._transfers.invalid(Direction.LOAD, error)
        return await self._transfers.load(self._session, blocks, message.lease or None, control)

    def _order(self, event: int) -> StoreOrder:
        """The event of the ring that a store comes after. Raises InvalidRequest if there is none of that number."""
        events = self._session.events
        if not 1 <= event <= len(events):
            raise InvalidRequest(f"event {event} is none of the {len(events)} that this rank's ring has")
        loop = asyncio.get_running_loop()
        issued = pb.AttachReply(wait_issued=pb.WaitIssued(event=event))

        def on_start() -> None:
            loop.call_soon_threadsafe(self._outbox.put_nowait, issued)

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
            await asyncio.wait([each.task for each in wanted.values()], timeout=message.timeout_ms / 1000)
        pending = [job for job, each in wanted.items() if not each.task.done()]
        self._outbox.put_nowait(pb.AttachReply(flushed=pb.Flushed(flush=message.flush, pending=pending)))
