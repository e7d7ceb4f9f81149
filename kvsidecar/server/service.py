"""The gRPC service: passes requests to the handler and replies back."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Hashable
from typing import Any, NoReturn

import grpc

from kvsidecar.core.access import Caller
from kvsidecar.core.sessions import RankSession
from kvsidecar.errors import InvalidRequest, KVSidecarError, LimitExceeded, UnknownPeer
from kvsidecar.server.attach_stream import AttachStream
from kvsidecar.server.fair_queue import FairQueue
from kvsidecar.server.handler import Handler
from kvsidecar.server.status_codes import code_of
from kvsidecar.support import log
from kvsidecar.types import TOKEN_METADATA
from kvsidecar.v1 import sidecar_pb2 as pb
from kvsidecar.v1 import sidecar_pb2_grpc as pb_grpc

_log = log.get("rpc")

Context = grpc.aio.ServicerContext[Any, Any]
LARGE_LOOKUP_BYTES = 16 * 1024
"""Lookups with more bytes of hashes go through the fair queue."""
FIRST_MESSAGE_SECONDS = 5.0
"""Time limit for the first message of an Attach stream."""
LINGER_SECONDS = 5.0
"""Time for a client whose attach connection has ended to read its outstanding replies."""
MAX_UNREAD = 8192
"""Limit of queued replies for a client that does not read its stream; each has about 100 bytes."""


async def abort(context: Context, error: KVSidecarError) -> NoReturn:
    await context.abort(code_of(error), str(error))
    raise AssertionError("abort returned")


def _unary(name: str, *, for_admins: bool = False) -> Any:
    """An RPC that calls a method of the handler and answers a `KVSidecarError` with its status code."""

    async def call(self: Service, request: Any, context: Context) -> Any:
        try:
            answer = getattr(self._handler, name)(request, self._caller(request, context, for_admins=for_admins))
            return await answer if isinstance(answer, Awaitable) else answer
        except KVSidecarError as error:
            await self._refuse(context, error)

    return call


def token_of(request: Any, context: Context) -> bytes:
    """The token in the call's metadata, or in a lookup the token for its lease; empty if there is none."""
    for key, value in context.invocation_metadata() or ():
        if key == TOKEN_METADATA and isinstance(value, bytes):
            return value
    return request.token if isinstance(request, pb.LookupRequest) else b""


class Service(pb_grpc.SidecarServicer):
    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._fair_queue = FairQueue()

    async def Lookup(self, request: pb.LookupRequest, context: Context) -> pb.LookupReply:  # noqa: N802
        try:
            if sum([len(group.hashes) for group in request.groups]) > LARGE_LOOKUP_BYTES:
                await self._fair_queue.wait(self._user(request, context))
            return self._handler.lookup(request, self._caller(request, context))
        except KVSidecarError as error:
            await self._refuse(context, error)

    Release = _unary("release")
    Renew = _unary("renew")
    Status = _unary("status", for_admins=True)
    Clear = _unary("clear", for_admins=True)
    Pin = _unary("pin", for_admins=True)
    Unpin = _unary("unpin", for_admins=True)
    Drain = _unary("drain", for_admins=True)
    CancelDrain = _unary("cancel_drain", for_admins=True)

    def _caller(self, request: Any, context: Context, *, for_admins: bool = False) -> Caller:
        """The caller. Raises KVSidecarError if it is not identified as it must be."""
        anyone = self._handler.open_to_all and not for_admins
        return self._handler.caller(b"" if anyone else token_of(request, context))

    def _user(self, request: pb.LookupRequest, context: Context) -> Hashable:
        """The user in the fair queue. Callers without a token share one place."""
        return self._handler.uid_of(token_of(request, context))

    async def _refuse(self, context: Context, error: KVSidecarError) -> NoReturn:
        self._handler.count_refusal(error)
        await abort(context, error)

    async def Attach(self, _requests: AsyncIterator[pb.AttachRequest], context: Context) -> None:  # noqa: N802
        try:
            # Not wait_for: in Python 3.11 that loses the cancellation of a stream which ends with its first message.
            async with asyncio.timeout(FIRST_MESSAGE_SECONDS):
                first = await context.read()
        except TimeoutError:
            silent = LimitExceeded(f"no message arrived within {FIRST_MESSAGE_SECONDS:g} s: register at once")
            await self._refuse(context, silent)
        if isinstance(first, pb.AttachRequest) and first.HasField("watch"):
            await self._watch(first.watch, context)
            return
        registering = self._handler.start_registration(first)
        try:
            session = await asyncio.shield(registering)
        except asyncio.CancelledError:
            registering.add_done_callback(self._end_orphan)
            raise
        if isinstance(session, KVSidecarError):
            await abort(context, session)
        await _Attached(self._handler, session, context).serve()

    async def _watch(self, first: pb.Watch, context: Context) -> None:
        """Serve a watcher's stream until it ends."""
        outbox = Outbox(context)
        task = asyncio.current_task()
        assert task is not None
        lost: list[KVSidecarError] = []

        def end(error: KVSidecarError) -> None:
            if not lost:
                task.cancel()
            lost.append(error)

        try:
            stream = self._handler.watch(first, outbox.put, outbox.unread_bytes, end)
        except KVSidecarError as error:
            await self._refuse(context, error)
        writer = self._handler.tasks.spawn(outbox.write(), name="watch-writer")
        try:
            if await context.read() is not grpc.aio.EOF:
                lost.append(InvalidRequest("a watcher sends nothing after its first message"))
        except asyncio.CancelledError:
            if not lost or task.uncancel():  # gRPC also reports that the client has gone
                raise
        finally:
            stream.close()
            writer.cancel()
        if lost:
            await self._refuse(context, lost[0])

    def _end_orphan(self, registering: asyncio.Task[RankSession | KVSidecarError]) -> None:
        if not registering.cancelled() and registering.exception() is None:
            session = registering.result()
            if isinstance(session, RankSession):
                self._handler.tasks.spawn(self._handler.end(session, gone=True), name="end-orphan")


class Outbox:
    """What waits to be written to a watcher."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._waiting: deque[pb.AttachReply] = deque()
        self._bytes = 0
        self._more = asyncio.Event()

    def put(self, reply: pb.AttachReply) -> None:
        """The caller may change the message afterwards."""
        kept = pb.AttachReply()
        kept.CopyFrom(reply)
        self._waiting.append(kept)
        self._bytes += reply.ByteSize()
        self._more.set()

    def unread_bytes(self) -> int:
        return self._bytes

    async def write(self) -> None:
        try:
            while True:
                await self._more.wait()
                self._more.clear()
                while self._waiting:
                    await self._context.write(self._waiting[0])
                    self._bytes -= self._waiting.popleft().ByteSize()
        except grpc.aio.BaseError as error:
            _log.debug("a reply was not written", error=str(error))


class _Attached:
    """One Attach stream of gRPC, after its registration."""

    def __init__(self, handler: Handler, session: RankSession, context: Context) -> None:
        self._handler = handler
        self._session = session
        self._context = context
        # One reply per job, and readiness changes. Beyond MAX_UNREAD replies the stream is ended.
        self._outbox: asyncio.Queue[pb.AttachReply | None] = asyncio.Queue()
        self._reading = False
        self._lost: KVSidecarError | None = None
        """Why the stream must end, whatever its client says."""

    async def serve(self) -> None:
        """Serve the stream until it and the session have ended."""
        task = asyncio.current_task()
        assert task is not None

        def lost(error: KVSidecarError) -> None:
            first, self._lost = self._lost is None, self._lost or error
            if self._reading and first:
                task.cancel()

        stream = self._handler.open(self._session, self._outbox.put_nowait, lost)
        writer = self._handler.tasks.spawn(self._write(), name="attach-writer")
        try:
            refused = await self._serve(stream, writer)
        finally:
            writer.cancel()
        if refused is not None:
            await abort(self._context, refused)

    async def _serve(self, stream: AttachStream, writer: asyncio.Task[None]) -> KVSidecarError | None:
        """Read, end the session, and write outstanding replies. Returns the error to end the stream with, or None."""
        refused: KVSidecarError | None = None
        gone = True
        try:
            refused = self._lost or await self._read(stream)
            gone = False
            if refused is not None:
                self._handler.count_refusal(refused)
        finally:
            stream.close()
            if gone:
                writer.cancel()  # nobody reads the outstanding replies
            await self._end(gone=gone)
        if not isinstance(refused, LimitExceeded):  # else the client does not read
            self._outbox.put_nowait(None)
            # A client whose attach connection has ended is mostly gone, and may not read.
            await asyncio.wait([writer], timeout=LINGER_SECONDS if isinstance(self._lost, UnknownPeer) else None)
        return refused

    async def _read(self, stream: AttachStream) -> KVSidecarError | None:
        """Read until the client half-closes. Returns the error to end the stream with, or None.

        Raises:
            CancelledError: the client has gone.
        """
        task = asyncio.current_task()
        assert task is not None
        self._reading = True
        try:
            while (message := await self._context.read()) is not grpc.aio.EOF:
                if isinstance(message, InvalidRequest):  # it did not parse
                    raise message
                if self._outbox.qsize() >= MAX_UNREAD:
                    raise LimitExceeded(
                        f"{MAX_UNREAD} replies wait for this client to read them: "
                        "read the Attach stream while jobs are sent"
                    )
                stream.handle(message)
        except KVSidecarError as error:
            return error
        except asyncio.CancelledError:
            if self._lost is None or task.uncancel():  # gRPC also reports that the client has gone
                raise
            return self._lost
        finally:
            self._reading = False
        return None

    async def _end(self, *, gone: bool) -> None:
        """End the session in a separate task, because this coroutine is cancelled when the client dies."""
        tasks, session = self._handler.tasks, self._session
        try:
            await asyncio.shield(tasks.spawn(self._handler.end(session, gone=gone), name=f"end-{session.id:x}"))
        except asyncio.CancelledError:
            # grpc.aio reports the end of a broken stream like a half-close, and cancels afterwards. The client is gone,
            # so jobs that have not started must not start.
            if not gone:
                tasks.spawn(self._handler.end(session, gone=True), name=f"end-{session.id:x}")
            raise

    async def _write(self) -> None:
        try:
            while (reply := await self._outbox.get()) is not None:
                await self._context.write(reply)
        except grpc.aio.BaseError as error:
            # The client is gone, though the handler has not been cancelled yet.
            _log.debug("a reply was not written", error=str(error))
