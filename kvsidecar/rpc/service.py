"""The gRPC service: protobuf messages to domain calls and back, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import wraps
from typing import Any, NoReturn, TypeVar

import grpc

from kvsidecar import log
from kvsidecar.errors import InvalidRequest, KVSidecarError, LimitExceeded, ProtocolMismatch, Unavailable
from kvsidecar.instances import Instances, Session
from kvsidecar.lookups import Lookups
from kvsidecar.metrics import Metrics
from kvsidecar.readiness import Readiness
from kvsidecar.rpc import translate
from kvsidecar.rpc.attach_stream import AttachStream, Context
from kvsidecar.rpc.status import code_of
from kvsidecar.tasks import TaskSet
from kvsidecar.transfers import Transfers
from kvsidecar.types import PROTOCOL, LookupMode, Refusal
from kvsidecar.v1 import sidecar_pb2 as pb
from kvsidecar.v1 import sidecar_pb2_grpc as pb_grpc
from kvsidecar.wire import namespace_from_wire

_log = log.get("rpc")

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
        self._handlers: dict[int, asyncio.Task[Any]] = {}
        """Of each session's Attach stream."""

    # -- attach ----------------------------------------------------------------------------------------------------

    async def Attach(self, _requests: AsyncIterator[pb.AttachRequest], context: Context) -> None:  # noqa: N802
        registering = self._tasks.spawn(self._try_to_register(await context.read()), name="register")
        try:
            # Shielded: a driver call that imports memory cannot be taken back half way when the client dies.
            session = await asyncio.shield(registering)
        except asyncio.CancelledError:
            registering.add_done_callback(self._end_orphan)
            raise
        if isinstance(session, KVSidecarError):
            self._metrics.refuse(Refusal.REGISTER_REFUSED)
            _log.warning("attach refused", reason=str(session))
            await _abort(context, session)
        stream = AttachStream(
            session,
            context,
            epoch=self._epoch,
            readiness=self._readiness,
            transfers=self._transfers,
            tasks=self._tasks,
        )
        handler = asyncio.current_task()
        assert handler is not None
        self._handlers[session.id] = handler
        refused: KVSidecarError | None = None
        gone = True
        try:
            refused = await stream.run()
            gone = False
        finally:
            if gone:
                stream.cancel()
            # In a task of its own: this handler is cancelled when the client dies, the end must come nevertheless.
            await asyncio.shield(self._tasks.spawn(self._end(session, gone=gone), name=f"end-{session.id:x}"))
            self._handlers.pop(session.id, None)
        if isinstance(refused, LimitExceeded):
            stream.cancel()  # what is owed would wait for a client that does not read
        else:
            await stream.finish()
        if refused is not None:
            await _abort(context, refused)

    async def drop(self, session: Session) -> None:
        """The process of this rank has gone, whatever its stream says: end the session, then the stream."""
        await self._end(session, gone=True)
        if (handler := self._handlers.pop(session.id, None)) is not None:
            handler.cancel()

    async def _try_to_register(self, first: Any) -> Session | KVSidecarError:
        """A refusal is an answer, not a failure of the task."""
        try:
            return await self._register(first)
        except KVSidecarError as error:
            return error

    async def _register(self, first: Any) -> Session:
        if isinstance(first, InvalidRequest):  # it did not parse
            raise first
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

    def _end_orphan(self, registering: asyncio.Task[Session | KVSidecarError]) -> None:
        if not registering.cancelled() and registering.exception() is None:
            session = registering.result()
            if isinstance(session, Session):
                self._tasks.spawn(self._end(session, gone=True), name="end-orphan")

    async def _end(self, session: Session, *, gone: bool) -> None:
        first = not session.ending
        await self._instances.end(session, gone=gone)
        if first:
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

    def _lookup(self, request: pb.LookupRequest | InvalidRequest) -> pb.LookupReply:
        if isinstance(request, InvalidRequest):  # one of a stream that did not parse
            raise request
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
        if namespace is not None and (problem := namespace.problem()):
            raise InvalidRequest(problem)
        blocks = self._lookups.clear(namespace)
        _log.info("cleared", namespace=str(namespace) if namespace else "all", blocks=blocks)
        return pb.ClearReply(blocks=blocks)

    @_mapped
    async def Drain(self, _request: pb.DrainRequest, _context: Context) -> pb.DrainReply:  # noqa: N802
        self._drain()
        return pb.DrainReply()
