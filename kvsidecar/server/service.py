"""The gRPC service: passes requests to the handler and replies back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Hashable
from typing import Any, NoReturn

import grpc

from kvsidecar.core.access import Caller
from kvsidecar.errors import KVSidecarError, LimitExceeded, UnknownPeer
from kvsidecar.server.attachment import MAX_UNREAD_BYTES, Attachment
from kvsidecar.server.handler import INTERNAL, Handler
from kvsidecar.server.status_codes import code_of
from kvsidecar.server.stream_clients import StreamClient, StreamClients
from kvsidecar.support import log
from kvsidecar.support.turns import Turns
from kvsidecar.types import TOKEN_METADATA, Direction
from kvsidecar.v1 import sidecar_pb2 as pb
from kvsidecar.v1 import sidecar_pb2_grpc as pb_grpc

_log = log.get("rpc")

Context = grpc.aio.ServicerContext[Any, Any]
LARGE_LOOKUP_BYTES = 16 * 1024
"""Lookups that look for more bytes of hashes take turns."""
LOOKUP_SHARE = 5 / 6
"""Part of the loop's time that one user's large lookups may take in the long run; everything else that a user causes
takes less (`turns.SHARE`). gRPC hands over new calls from its own thread, one at a time, and a loop that is never idle
keeps that thread waiting. (Measured with 128 outstanding lookups of 20,000 hashes: another user's call waited for all
of them. With pauses, on an otherwise idle machine, it waited for none.)"""
LOOKUP_BURST_SECONDS = 0.001
"""Time that they may take before `LOOKUP_SHARE` holds."""
FIRST_MESSAGE_SECONDS = 5.0
"""Time limit for the first message of an Attach stream."""
LINGER_SECONDS = 5.0
"""Time for a client whose attach connection has ended to read its outstanding replies."""
MAX_UNREAD = 8192
"""Limit of queued replies for a client that does not read its stream, beside that of their bytes: a small one takes
more memory than its bytes."""


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


def looked_for_bytes(request: pb.LookupRequest) -> int:
    """Bytes of the hashes that a lookup looks for. Those of a tail may be the first group's, and come once."""
    nbytes = 0
    for group in request.groups:
        size = len(group.hashes)
        if group.tail:
            size = min(size or len(request.groups[0].hashes), (group.tail + 1) * request.namespace.hash_bytes)
        nbytes += size
    return nbytes


class Service(pb_grpc.SidecarServicer):
    """
    Args:
        clients: admits those that attach without a token; None: nobody may.
    """

    def __init__(self, handler: Handler, clients: StreamClients | None = None) -> None:
        self._handler, self._clients = handler, clients
        self._large_lookups = Turns(handler.steps.loop_time, share=LOOKUP_SHARE, burst_seconds=LOOKUP_BURST_SECONDS)

    async def Lookup(self, request: pb.LookupRequest, context: Context) -> pb.LookupReply:  # noqa: N802
        def lookup() -> pb.LookupReply:
            return self._handler.lookup(request, self._caller(request, context))

        arrived = self._handler.user_time.clock()
        try:
            if looked_for_bytes(request) > LARGE_LOOKUP_BYTES:
                reply = await self._large_lookups.run(self._user(request, context), lookup)
            else:
                reply = lookup()
        except KVSidecarError as error:
            await self._refuse(context, error)
        self._handler.answered(request, arrived)
        return reply

    async def Store(self, request: pb.StoreRequest, context: Context) -> pb.JobDone:  # noqa: N802
        return await self._job(request, request.store, Direction.STORE, context)

    async def Load(self, request: pb.LoadRequest, context: Context) -> pb.JobDone:  # noqa: N802
        return await self._job(request, request.load, Direction.LOAD, context)

    async def _job(
        self, request: Any, message: pb.Store | pb.Load, direction: Direction, context: Context
    ) -> pb.JobDone:
        try:
            return await self._handler.job(request.session, message, direction, token_of(request, context))
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
        """The user whose turns a large lookup takes. Callers without a token share one place."""
        return self._handler.instances.uid_of(token_of(request, context))

    async def _refuse(self, context: Context, error: KVSidecarError) -> NoReturn:
        self._handler.count_refusal(error)
        await abort(context, error)

    async def Attach(self, _requests: AsyncIterator[pb.AttachRequest], context: Context) -> None:  # noqa: N802
        await _Attached(self._handler, context, self._clients).serve()


class _Attached(Attachment):
    """One Attach stream of gRPC. A task of its own writes what waits to be sent."""

    def __init__(self, handler: Handler, context: Context, clients: StreamClients | None) -> None:
        super().__init__(handler)
        self._context, self._clients = context, clients
        self._client: StreamClient | None = None
        """The client whose only connection this stream is; None if it has a token of the attach socket."""
        self._unread: asyncio.Queue[pb.AttachReply | None] = asyncio.Queue()
        self._unread_bytes = 0
        self._over: asyncio.Future[KVSidecarError | None] = asyncio.get_running_loop().create_future()

    def send(self, reply: pb.AttachReply) -> None:
        if reply.HasField("residency"):  # its sender is going to change it
            shared, reply = reply, pb.AttachReply()
            reply.CopyFrom(shared)
        self._unread.put_nowait(reply)
        self._unread_bytes += reply.ByteSize()

    def unread_bytes(self) -> int:
        return self._unread_bytes

    def tell(self, error: KVSidecarError | None) -> None:
        self._over.set_result(error)

    async def serve(self) -> None:
        """Serve the stream until it and its session have ended."""
        reader = self._handler.tasks.spawn(self._run(self._read), name="attach-reader")
        writer = self._handler.tasks.spawn(self._run(self._write), name="attach-writer")
        try:
            await asyncio.wait([self._over])
            error = self._over.result()
            if self._protocol.session and not isinstance(error, LimitExceeded):  # else the client does not read
                self._unread.put_nowait(None)
                # A client whose attach connection has ended is mostly gone, and may not read.
                await asyncio.wait([writer], timeout=LINGER_SECONDS if isinstance(error, UnknownPeer) else None)
        finally:
            self.gone()
            reader.cancel()
            writer.cancel()
            if self._client is not None:
                self._client.end()
        if error is not None:
            await abort(self._context, error)

    async def _run(self, part: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Read, or write. Any error ends the stream: otherwise its client would wait for ever."""
        try:
            await part()
        except Exception:
            self.finish(KVSidecarError(INTERNAL))
            raise

    async def _read(self) -> None:
        """Read until the client half-closes. (gRPC reports that of a broken stream, too, and then cancels the call.)"""
        try:
            async with asyncio.timeout(FIRST_MESSAGE_SECONDS):
                message = await self._context.read()
        except TimeoutError:
            self.lose(LimitExceeded(f"no message arrived within {FIRST_MESSAGE_SECONDS:g} s: register at once"))
            return
        try:
            self._client = await self._admit(message)
        except KVSidecarError as error:
            self.lose(error)
            return
        while message is not grpc.aio.EOF:
            many = self._unread.qsize() >= MAX_UNREAD
            if many or self._unread_bytes >= MAX_UNREAD_BYTES:
                what = f"{MAX_UNREAD} replies" if many else f"{MAX_UNREAD_BYTES} bytes of replies"
                text = f"{what} wait for this client to read them"
                self.lose(LimitExceeded(f"{text}: read the Attach stream while jobs are sent"))
                return
            self.receive(message)
            if self._registering is not None:
                await asyncio.wait([self._registering])
            while self.begins_job:
                await self._handler.steps.loop_time.turn()
            message = await self._context.read()
        self.finish()

    async def _admit(self, message: Any) -> StreamClient | None:
        """Give a client without a token one. Raises KVSidecarError."""
        kind = message.WhichOneof("message") if isinstance(message, pb.AttachRequest) else None
        if self._clients is None or kind not in ("register", "watch") or getattr(message, kind).token:
            return None
        return await self._clients.admit(self._context.peer(), getattr(message, kind))

    async def _write(self) -> None:
        try:
            while (reply := await self._unread.get()) is not None:
                await self._context.write(reply)
                self._unread_bytes -= reply.ByteSize()
        except grpc.aio.BaseError as error:
            # The client is gone, though the handler has not been cancelled yet.
            _log.debug("a reply was not written", error=str(error))
