"""One Attach stream, of a rank or of a watcher: does what `AttachProtocol` decides. Independent of the transport."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Any

from kvsidecar.core.sessions import RankSession
from kvsidecar.errors import InvalidRequest, KVSidecarError, UnknownPeer
from kvsidecar.server.attach_protocol import AttachProtocol, AttachState, Do
from kvsidecar.server.attach_stream import AttachStream
from kvsidecar.server.handler import INTERNAL, Handler
from kvsidecar.server.watch_stream import WatchStream
from kvsidecar.support import log
from kvsidecar.v1 import sidecar_pb2 as pb

MAX_UNREAD_BYTES = 1024 * 1024
"""Limit of replies that wait for a client that does not read: about ten thousand."""

_caused = log.limited("rpc")


class Attachment(ABC):
    """Used from the event loop. Its carrier is derived from it, since two objects that hold each other leave garbage.

    Args:
        token: of the connection whose owner ends its sessions when the client has gone. Only this one may register.
            None: the stream ends its session itself.
    """

    def __init__(self, handler: Handler, token: bytes | None = None) -> None:
        self._handler, self._token = handler, token
        self._protocol = AttachProtocol()
        self._stream: AttachStream | WatchStream | None = None
        """None unless it takes messages."""
        self._registering: asyncio.Task[None] | None = None

    @abstractmethod
    def send(self, reply: pb.AttachReply) -> None:
        """The caller may change the reply afterwards."""

    @abstractmethod
    def unread_bytes(self) -> int:
        """Bytes sent but not yet read by the client."""

    @abstractmethod
    def tell(self, error: KVSidecarError | None) -> None:
        """Inform the client that the stream is over, with this error."""

    @property
    def takes_jobs(self) -> bool:
        return self._stream is not None and self._protocol.session is not None

    @property
    def begins_job(self) -> bool:
        """True while a job of very many blocks still begins: messages after it should wait."""
        return isinstance(self._stream, AttachStream) and bool(self._stream.session.beginning)

    def receive(self, message: pb.AttachRequest | InvalidRequest, nbytes: int = 0) -> None:
        """Take a message, or the error that it does not parse. Raises LimitExceeded: there are too many too early."""
        self._do(self._protocol.receive(message, nbytes))

    def finish(self, error: KVSidecarError | None = None) -> None:
        """End the stream in order: take nothing more, finish the jobs, unmap the memory, and `tell`."""
        self._do(self._protocol.finish(error))

    def lose(self, error: KVSidecarError) -> None:
        """`finish` with an error, and count the refusal."""
        if self._protocol.state in (AttachState.NEW, AttachState.REGISTERING, AttachState.OPEN):
            self._handler.count_refusal(error)
        self.finish(error)

    def gone(self) -> None:
        """Note that the client has gone."""
        self._close()
        self._do(self._protocol.gone())

    def _do(self, todo: list[tuple[Do, Any]]) -> None:
        for do, what in todo:
            match do:
                case "register":
                    self._register(what)
                case "open" if what is not None:
                    self._stream = self._handler.open(what, self.send, self.lose)
                case "take" if self._stream is not None:
                    self._handle(self._stream, what)
                case "end" | "cut" if do == "end" or self._token is None:
                    # Not in the carrier's task, which is cancelled when the client dies.
                    self._handler.tasks.spawn(self._end(what, gone=do == "cut"), name="attach-end")
                case "tell":
                    self.tell(what)

    def _register(self, first: Any) -> None:
        kind = first.WhichOneof("message") if isinstance(first, pb.AttachRequest) else None
        try:
            if kind in ("register", "watch") and self._token not in (None, getattr(first, kind).token):
                # The session would outlive this connection, and nobody would read its replies.
                raise UnknownPeer(f"the token is not this connection's: {kind} with the token of its Welcome")
            if kind == "watch":
                self._stream = self._handler.watch(first.watch, self.send, self.unread_bytes, self.lose)
        except KVSidecarError as error:
            self._handler.count_refusal(error)
            self._do(self._protocol.refused(error))
            return
        if kind == "watch":
            self._do(self._protocol.accepted(None))
        else:
            self._registering = self._handler.tasks.spawn(self._register_rank(first), name="attach-register")

    async def _register_rank(self, first: Any) -> None:
        answer = await self._handler.register(first)
        self._registering = None
        if isinstance(answer, KVSidecarError):
            self._do(self._protocol.refused(answer))
        else:
            self._do(self._protocol.accepted(answer))

    def _handle(self, stream: AttachStream | WatchStream, message: pb.AttachRequest | InvalidRequest) -> None:
        try:
            if isinstance(message, InvalidRequest):
                raise message
            stream.handle(message)
        except KVSidecarError as error:
            self.lose(error)
        except Exception as error:  # noqa: BLE001 - ends this stream only
            _caused.error("an attach message failed unexpectedly", error=str(error), exc_info=error)
            self.finish(KVSidecarError(INTERNAL))

    async def _end(self, session: RankSession | None, *, gone: bool) -> None:
        self._close()  # not before: a stream may be lost while it opens
        if session is not None:
            await self._handler.end(session, gone=gone)
        self._do(self._protocol.ended())

    def _close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None
