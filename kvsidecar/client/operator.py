"""What operators ask, on connections of its own."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any

import grpc

from kvsidecar.client.grpc_transport import open_channel
from kvsidecar.client.link import Link, connect
from kvsidecar.errors import AttachRefused, ClientError, DaemonUnreachable, RequestDenied
from kvsidecar.protocol.paths import attach_path
from kvsidecar.protocol.wire import namespace_to_wire
from kvsidecar.types import TOKEN_METADATA, Namespace
from kvsidecar.v1 import sidecar_pb2 as pb
from kvsidecar.v1 import sidecar_pb2_grpc as pb_grpc


class OperatorCalls:
    """What operators ask, whatever carries it.

    Every call raises DaemonUnreachable without an answer, RequestDenied if it is for admins, or of another's namespace.
    """

    def status(self, *, everything: bool = False) -> pb.StatusReply:
        """What the daemon says of itself; what is the caller's own if it is no admin (``partial``).

        Of very many namespaces and ranks, only as many as one answer has room for: its `totals` count all.

        Args:
            everything: ask for the others, too, with as many questions as that takes.
        """
        request = pb.StatusRequest(page=pb.StatusPage()) if everything else pb.StatusRequest()
        reply: pb.StatusReply = self._call("Status", request)
        page = reply
        while page.more:
            if page.namespaces:
                request.page.after_namespace.CopyFrom(page.namespaces[-1].namespace)
            if page.ranks:
                request.page.after_session = page.ranks[-1].session
            page = self._call("Status", request)
            reply.namespaces.extend(page.namespaces)
            reply.ranks.extend(page.ranks)
        reply.more = False
        return reply

    def clear(self, namespace: Namespace | None = None) -> int:
        """Forget the blocks of a namespace, or of all. Returns how many can no longer be looked up."""
        request = (
            pb.ClearRequest(all=True) if namespace is None else pb.ClearRequest(namespace=namespace_to_wire(namespace))
        )
        reply: pb.ClearReply = self._call("Clear", request)
        return reply.blocks

    def drain(self) -> None:
        """Tell the daemon to take no new work."""
        self._call("Drain", pb.DrainRequest())

    def cancel_drain(self) -> bool:
        """Tell it to take new work again. False if it was not draining, or is shutting down."""
        reply: pb.CancelDrainReply = self._call("CancelDrain", pb.CancelDrainRequest())
        return reply.cancelled

    def _call(self, method: str, request: object) -> Any:
        raise NotImplementedError


class Operator(OperatorCalls):
    """Over the Unix socket, on connections of its own: it works whether or not anything is attached.

    Every call waits at most ``timeout`` seconds.
    """

    def __init__(self, socket: str, timeout: float, name: str = "") -> None:
        self._socket = socket
        self._timeout = timeout
        self._name = name
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._link: Link | None = None

    def close(self) -> None:
        with self._lock:
            self._drop_link()
            if self._channel is not None:
                self._channel.close()
                self._channel = None

    def _call(self, method: str, request: object) -> Any:
        deadline = time.monotonic() + self._timeout
        with self._lock:
            token = self._token()
            if self._channel is None:
                self._channel = open_channel(self._socket)
            stub = pb_grpc.SidecarStub(self._channel)
        metadata = ((TOKEN_METADATA, token),) if token else ()
        try:
            return getattr(stub, method)(request, timeout=max(0.001, deadline - time.monotonic()), metadata=metadata)
        except grpc.RpcError as error:
            raise operator_error(error, self._socket) from error

    def _token(self) -> bytes:
        """Who asks; empty if the daemon takes no connection more, and what it tells everybody must do."""
        if self._link is None or self._link.ended():
            self._drop_link()
            with suppress(AttachRefused):
                self._link = connect(attach_path(self._socket), fds=(), client=self._name, timeout=self._timeout)
        return b"" if self._link is None else self._link.token

    def _drop_link(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None


def operator_error(error: grpc.RpcError, where: str) -> ClientError:
    """What a refused or unanswered request of an operator raises."""
    text = error.details() or error.code().name
    match error.code():
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.DEADLINE_EXCEEDED | grpc.StatusCode.CANCELLED:
            return DaemonUnreachable(f"no kvsidecar answers at {where}: {text}")
        case grpc.StatusCode.PERMISSION_DENIED | grpc.StatusCode.UNAUTHENTICATED:
            return RequestDenied(text)
        case grpc.StatusCode.UNIMPLEMENTED:
            return ClientError(f"the daemon at {where} is of another release and does not know this request ({text})")
        case _:
            return ClientError(text)
