"""The gRPC service: passes requests to the handler and replies back."""

from __future__ import annotations

import asyncio
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
from kvsidecar.server.watch_stream import WatchStream
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
        stream = _Attached(self._handler, context)
        if isinstance(first, pb.AttachRequest) and first.HasField("watch"):
            await stream.serve_watcher(first.watch)
            return
        registering = self._handler.start_registration(first)
        try:
            session = await asyncio.shield(registering)
        except asyncio.CancelledError:
            registering.add_done_callback(self._end_orphan)
            raise
        if isinstance(session, KVSidecarError):
            await abort(context, session)
        await stream.serve_rank(session)

    def _end_orphan(self, registering: asyncio.Task[RankSession | KVSidecarError]) -> None:
        if not registering.cancelled() and registering.exception() is None:
            session = registering.result()
            if isinstance(session, RankSession):
                self._handler.tasks.spawn(self._handler.end(session, gone=True), name="end-orphan")


class Outbox:
    """What waits to be written to a client, in a task of its own."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._waiting: asyncio.Queue[pb.AttachReply | None] = asyncio.Queue()
        self._bytes = 0

    def __len__(self) -> int:
        return self._waiting.qsize()

    def put(self, reply: pb.AttachReply | None) -> None:
        """None: `write` returns behind all that was put before."""
        self._waiting.put_nowait(reply)
        self._bytes += 0 if reply is None else reply.ByteSize()

    def put_copy(self, reply: pb.AttachReply) -> None:
        """The caller may change the message afterwards."""
        kept = pb.AttachReply()
        kept.CopyFrom(reply)
        self.put(kept)

    def unread_bytes(self) -> int:
        return self._bytes

    async def write(self) -> None:
        try:
            while (reply := await self._waiting.get()) is not None:
                await self._context.write(reply)
                self._bytes -= reply.ByteSize()
        except grpc.aio.BaseError as error:
            # The client is gone, though the handler has not been cancelled yet.
            _log.debug("a reply was not written", error=str(error))


class _Attached:
    """One Attach stream of gRPC: of a watcher, or of a rank after its registration. Made in the stream's own task."""

    def __init__(self, handler: Handler, context: Context) -> None:
        self._handler = handler
        self._context = context
        # Of a rank: one reply per job, and readiness changes. Beyond MAX_UNREAD replies the stream is ended.
        self._outbox = Outbox(context)
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._reading = False
        self._lost: KVSidecarError | None = None
        """Why the stream must end, whatever its client says."""

    def _lose(self, error: KVSidecarError) -> None:
        first, self._lost = self._lost is None, self._lost or error
        if self._reading and first:
            self._task.cancel()

    async def serve_watcher(self, first: pb.Watch) -> None:
        """Serve the stream until it ends."""
        refused: KVSidecarError | None
        try:
            stream = self._handler.watch(first, self._outbox.put_copy, self._outbox.unread_bytes, self._lose)
        except KVSidecarError as error:
            refused = error
        else:
            writer = self._handler.tasks.spawn(self._outbox.write(), name="watch-writer")
            try:
                refused = self._lost or await self._read(stream)
            finally:
                stream.close()
                writer.cancel()
        if refused is not None:
            self._handler.count_refusal(refused)
            await abort(self._context, refused)

    async def serve_rank(self, session: RankSession) -> None:
        """Serve the stream until it and the session have ended."""
        stream = self._handler.open(session, self._outbox.put, self._lose)
        writer = self._handler.tasks.spawn(self._outbox.write(), name="attach-writer")
        try:
            refused = await self._serve(stream, session, writer)
        finally:
            writer.cancel()
        if refused is not None:
            await abort(self._context, refused)

    async def _serve(
        self, stream: AttachStream, session: RankSession, writer: asyncio.Task[None]
    ) -> KVSidecarError | None:
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
            await self._end(session, gone=gone)
        if not isinstance(refused, LimitExceeded):  # else the client does not read
            self._outbox.put(None)
            # A client whose attach connection has ended is mostly gone, and may not read.
            await asyncio.wait([writer], timeout=LINGER_SECONDS if isinstance(self._lost, UnknownPeer) else None)
        return refused

    async def _read(self, stream: AttachStream | WatchStream) -> KVSidecarError | None:
        """Read until the client half-closes. Returns the error to end the stream with, or None.

        Raises:
            CancelledError: the client has gone.
        """
        self._reading = True
        try:
            while (message := await self._context.read()) is not grpc.aio.EOF:
                if isinstance(message, InvalidRequest):  # it did not parse
                    raise message
                if len(self._outbox) >= MAX_UNREAD:
                    raise LimitExceeded(
                        f"{MAX_UNREAD} replies wait for this client to read them: "
                        "read the Attach stream while jobs are sent"
                    )
                stream.handle(message)
        except KVSidecarError as error:
            return error
        except asyncio.CancelledError:
            if self._lost is None or self._task.uncancel():  # gRPC also reports that the client has gone
                raise
            return self._lost
        finally:
            self._reading = False
        return None

    async def _end(self, session: RankSession, *, gone: bool) -> None:
        """End the session in a separate task, because this coroutine is cancelled when the client dies."""
        tasks = self._handler.tasks
        try:
            await asyncio.shield(tasks.spawn(self._handler.end(session, gone=gone), name=f"end-{session.id:x}"))
        except asyncio.CancelledError:
            # grpc.aio reports the end of a broken stream like a half-close, and cancels afterwards. The client is gone,
            # so jobs that have not started must not start.
            if not gone:
                tasks.spawn(self._handler.end(session, gone=True), name=f"end-{session.id:x}")
            raise
