"""The gRPC service: protobuf messages to domain calls and back, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from functools import wraps
from typing import Any, NoReturn, TypeVar

import grpc

from kvsidecar import __version__, log
from kvsidecar.errors import InvalidRequest, KVSidecarError, ProtocolMismatch, Unavailable
from kvsidecar.instances import Instances, RunningJob, Session
from kvsidecar.lookups import Lookups
from kvsidecar.metrics import Metrics
from kvsidecar.readiness import Readiness, Snapshot
from kvsidecar.rpc import translate
from kvsidecar.rpc.status import code_of
from kvsidecar.tasks import TaskSet
from kvsidecar.transfers import GroupBlocks, JobResult, Transfers
from kvsidecar.types import PROTOCOL, Direction, LookupMode, Outcome, Refusal
from kvsidecar.v1 import sidecar_pb2 as pb
from kvsidecar.v1 import sidecar_pb2_grpc as pb_grpc
from kvsidecar.wire import namespace_from_wire

_log = log.get("rpc")

Context = grpc.aio.ServicerContext[Any, Any]
Request = TypeVar("Request")
Reply = TypeVar("Reply")


async def _abort(context: Context, error: KVSidecarError) -> NoReturn:
    await context.abort(code_of(error), str(error))
    raise AssertionError("abort returned")


def _mapped(
    method: Callable[[Any, Request, Context], Awaitable[Reply]],
) -> Callable[[Any, Request, Context], Awaitable[Reply]]:
    """Answer a `KVSidecarError` with its status code."""

    @wraps(method)
    async def call(self: Any, request: Request, context: Context) -> Reply:
        try:
            return await method(self, request, context)
        except KVSidecarError as error:
            await _abort(context, error)

    return call


class Service(pb_grpc.SidecarServicer):
    """One handler object for all RPCs.

    Args:
        tasks: owns what must go on when an RPC has gone: the ends of sessions.
        status: builds the answer to Status.
        drain: called when an operator asks to drain.
    """

    def __init__(
        self,
        *,
        epoch: int,
        instances: Instances,
        transfers: Transfers,
        lookups: Lookups,
        readiness: Readiness,
        metrics: Metrics,
        tasks: TaskSet,
        status: Callable[[], pb.StatusReply],
        drain: Callable[[], None],
    ) -> None:
        self._epoch = epoch
        self._instances = instances
        self._transfers = transfers
        self._lookups = lookups
        self._readiness = readiness
        self._metrics = metrics
        self._tasks = tasks
        self._status = status
        self._drain = drain

    # -- attach ----------------------------------------------------------------------------------------------------

    async def Attach(self, _requests: AsyncIterator[pb.AttachRequest], context: Context) -> None:  # noqa: N802
        registering = self._tasks.spawn(self._register(await context.read()), name="register")
        try:
            # Shielded: a driver call that imports memory cannot be taken back half way when the client dies.
            session = await asyncio.shield(registering)
        except KVSidecarError as error:
            self._metrics.refuse(Refusal.REGISTER_REFUSED)
            _log.warning("attach refused", reason=str(error))
            await _abort(context, error)
        except asyncio.CancelledError:
            registering.add_done_callback(self._end_orphan)
            raise
        stream = _AttachStream(self, session, context)
        refused: KVSidecarError | None = None
        try:
            await stream.run()
        except KVSidecarError as error:
            refused = error
        except BaseException:
            stream.cancel()
            raise
        finally:
            # In a task of its own: this handler is cancelled when the client dies, the end must come nevertheless.
            ending = self._tasks.spawn(self._end(session), name=f"end-session-{session.id:x}")
            await asyncio.shield(ending)
        await stream.finish()
        if refused is not None:
            await _abort(context, refused)

    async def _register(self, first: Any) -> Session:
        if first is grpc.aio.EOF or first.WhichOneof("message") != "register":
            raise InvalidRequest("the first message of an Attach stream must be `register`")
        message: pb.Register = first.register
        if message.protocol != PROTOCOL:
            raise ProtocolMismatch(
                f"the daemon speaks protocol {PROTOCOL}, the client {message.protocol}: "
                "use the same kvsidecar release on both sides"
            )
        if self._readiness.refusal is Refusal.DRAINING:
            raise Unavailable("the daemon is draining and takes no new ranks", refusal=Refusal.DRAINING)
        session = await self._instances.register(translate.registration_from(message))
        registration = session.registration
        _log.info(
            "rank attached",
            instance=registration.instance,
            rank=registration.rank,
            world_size=registration.world_size,
            device=registration.device,
            pid=session.peer.pid,
            imported_bytes=session.imported_bytes,
        )
        return session

    def _end_orphan(self, registering: asyncio.Task[Session]) -> None:
        if not registering.cancelled() and registering.exception() is None:
            self._tasks.spawn(self._end(registering.result()), name="end-orphan")

    async def _end(self, session: Session) -> None:
        await self._instances.end(session)
        _log.info("rank detached", instance=session.registration.instance, rank=session.registration.rank)

    # -- lookups and leases ----------------------------------------------------------------------------------------

    @_mapped
    async def Lookup(self, request: pb.LookupRequest, _context: Context) -> pb.LookupReply:  # noqa: N802
        return self._lookup(request)

    async def LookupStream(  # noqa: N802
        self, requests: AsyncIterator[pb.LookupRequest], context: Context
    ) -> AsyncIterator[pb.LookupReply]:
        async for request in requests:
            try:
                yield self._lookup(request)
            except KVSidecarError as error:
                await _abort(context, error)

    def _lookup(self, request: pb.LookupRequest) -> pb.LookupReply:
        namespace = namespace_from_wire(request.namespace)
        if problem := namespace.problem():
            raise InvalidRequest(problem)
        mode = translate.mode_from(request.mode)
        owner = self._instances.peer(request.token).token if request.token else None
        result = self._lookups.lookup(
            namespace,
            [(group.group, translate.hashes_from(group.hashes, namespace.hash_bytes)) for group in request.groups],
            mode,
            lease_seconds=request.lease_ms / 1000,
            owner=owner,
        )
        reply = pb.LookupReply(
            ready=result.ready,
            epoch=self._epoch,
            lease=result.lease or 0,
            lease_ms=int(result.lease_seconds * 1000) if result.lease else 0,
        )
        for group in result.groups:
            reply.groups.add(
                group=group.group,
                hits=group.hits,
                bitmap=translate.bitmap_to(group.found) if mode is LookupMode.BITMAP else b"",
            )
        return reply

    @_mapped
    async def Release(self, request: pb.ReleaseRequest, _context: Context) -> pb.ReleaseReply:  # noqa: N802
        return pb.ReleaseReply(released=self._lookups.release(request.lease))

    @_mapped
    async def Renew(self, request: pb.RenewRequest, _context: Context) -> pb.RenewReply:  # noqa: N802
        granted = self._lookups.renew(request.lease, request.lease_ms / 1000)
        return pb.RenewReply(renewed=granted > 0, lease_ms=int(granted * 1000))

    # -- operators -------------------------------------------------------------------------------------------------

    @_mapped
    async def Status(self, _request: pb.StatusRequest, _context: Context) -> pb.StatusReply:  # noqa: N802
        return self._status()

    @_mapped
    async def Clear(self, request: pb.ClearRequest, _context: Context) -> pb.ClearReply:  # noqa: N802
        if request.HasField("namespace") == request.all:
            raise InvalidRequest("clear takes either a namespace or `all`")
        namespace = None if request.all else namespace_from_wire(request.namespace)
        blocks = self._lookups.clear(namespace)
        _log.info("cleared", namespace=str(namespace) if namespace else "all", blocks=blocks)
        return pb.ClearReply(blocks=blocks)

    @_mapped
    async def Drain(self, _request: pb.DrainRequest, _context: Context) -> pb.DrainReply:  # noqa: N802
        self._drain()
        return pb.DrainReply()


class _AttachStream:
    """One rank's open stream: reads requests, starts jobs, and writes what happens in the order it happens."""

    def __init__(self, service: Service, session: Session, context: Context) -> None:
        self._service = service
        self._session = session
        self._context = context
        # Replies are few (one per job) and small; a client with n jobs outstanding is owed n of them at most.
        self._outbox: asyncio.Queue[pb.AttachReply | None] = asyncio.Queue()
        self._writer: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Serve until the client half-closes or goes away."""
        service = self._service
        registered = pb.Registered(
            epoch=service._epoch,
            session=self._session.id,
            readiness=translate.readiness_to(service._readiness.now),
            version=__version__,
        )
        self._outbox.put_nowait(pb.AttachReply(registered=registered))
        stop_listening = service._readiness.listen(self._tell_readiness)
        self._writer = service._tasks.spawn(self._write(), name="attach-writer")
        try:
            while (message := await self._context.read()) is not grpc.aio.EOF:
                self._take(message)
        finally:
            stop_listening()

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
        while (reply := await self._outbox.get()) is not None:
            await self._context.write(reply)

    def _take(self, message: pb.AttachRequest) -> None:
        """Start what one message asks for. The jobs begin in the order of their messages."""
        match message.WhichOneof("message"):
            case "store":
                self._start(message.store.job, self._store(message.store), Direction.STORE)
            case "load":
                self._start(message.load.job, self._load(message.load), Direction.LOAD)
            case "flush":
                self._session.jobs.spawn(self._flush(message.flush), name="flush")
            case "register":
                raise InvalidRequest("a stream registers once")
            case _:
                # From a newer client: the protocol number is what refuses those, an unknown extra is let pass.
                _log.warning("unknown attach message ignored", instance=self._session.registration.instance)

    def _start(self, job: int, running: Coroutine[Any, Any, JobResult], direction: Direction) -> None:
        jobs = self._session.jobs_by_id
        if job in jobs:
            running.close()
            raise InvalidRequest(f"job {job} is still running: a job id may be used again once its JobDone has come")
        task = self._session.jobs.spawn(self._answer(job, running), name=f"{direction}-{job}")
        jobs[job] = RunningJob(direction, task)

    async def _answer(self, job: int, running: Coroutine[Any, Any, JobResult]) -> None:
        try:
            result = await running
        except Exception as error:
            # Nobody expected this one. The client is owed an answer all the same, or it would wait for ever.
            self._outbox.put_nowait(
                pb.AttachReply(done=translate.job_done_to(job, JobResult(Outcome.FAILED, error="internal error")))
            )
            raise RuntimeError(f"job {job} failed unexpectedly") from error
        finally:
            del self._session.jobs_by_id[job]
        self._outbox.put_nowait(pb.AttachReply(done=translate.job_done_to(job, result)))

    def _blocks(self, messages: Iterable[pb.Blocks]) -> list[GroupBlocks]:
        return translate.blocks_from(messages, self._session.registration.namespace.hash_bytes)

    async def _store(self, message: pb.Store) -> JobResult:
        try:
            blocks = self._blocks(message.blocks)
        except InvalidRequest as error:
            return self._service._transfers.invalid(Direction.STORE, error)
        return await self._service._transfers.store(self._session, blocks)

    async def _load(self, message: pb.Load) -> JobResult:
        try:
            blocks = self._blocks(message.blocks)
        except InvalidRequest as error:
            return self._service._transfers.invalid(Direction.LOAD, error)
        return await self._service._transfers.load(self._session, blocks, message.lease or None)

    async def _flush(self, message: pb.Flush) -> None:
        """Wait until the named jobs are over, at most as long as the client said."""
        running = self._session.jobs_by_id
        named = message.jobs or [job for job, each in running.items() if each.direction is Direction.STORE]
        wanted = {job: running[job].task for job in named if job in running}
        if wanted:
            await asyncio.wait(wanted.values(), timeout=message.timeout_ms / 1000)
        pending = [job for job, task in wanted.items() if not task.done()]
        self._outbox.put_nowait(pb.AttachReply(flushed=pb.Flushed(flush=message.flush, pending=pending)))
