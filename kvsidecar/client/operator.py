"""What operators ask, on connections of its own."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Any, Self

import grpc

from kvsidecar.client.grpc_transport import open_channel
from kvsidecar.client.link import Link, connect
from kvsidecar.errors import AttachRefused, ClientError, DaemonUnreachable, RequestDenied
from kvsidecar.protocol.paths import attach_path
from kvsidecar.protocol.wire import namespace_to_wire
from kvsidecar.types import TOKEN_METADATA, Namespace
from kvsidecar.v1 import sidecar_pb2 as pb
from kvsidecar.v1 import sidecar_pb2_grpc as pb_grpc


class OperatorCalls(ABC):
    """What operators ask, whatever carries it, and the end of a client.

    Each call of an operator raises DaemonUnreachable if no daemon answers, and RequestDenied if this user may not make
    it: it is for admins, or names another user's namespace.
    """

    def status(self, *, everything: bool = False) -> pb.StatusReply:
        """The state of the daemon. A user who is no admin sees only what is its own (``partial``).

        Args:
            everything: list all namespaces and ranks, with as many requests as that takes. By default the reply lists
                as many as fit into one answer; its `totals` count all.
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
        """Discard the blocks of a namespace, or of all. Returns how many can no longer be looked up."""
        request = (
            pb.ClearRequest(all=True) if namespace is None else pb.ClearRequest(namespace=namespace_to_wire(namespace))
        )
        reply: pb.ClearReply = self._call("Clear", request)
        return reply.blocks

    def drain(self) -> None:
        """Tell the daemon to accept no new work."""
        self._call("Drain", pb.DrainRequest())

    def cancel_drain(self) -> bool:
        """Undo `drain`. False if the daemon was not draining, or is shutting down."""
        reply: pb.CancelDrainReply = self._call("CancelDrain", pb.CancelDrainRequest())
        return reply.cancelled

    @abstractmethod
    def _call(self, method: str, request: object) -> Any:
        """Make an RPC. Returns its reply."""

    @abstractmethod
    def close(self, timeout: float | None = None) -> bool:
        """Close the connections. Returns whether everything of this client is over at the daemon."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Operator:
    """Makes these calls over the Unix socket, on connections of its own: whether or not anything is attached.

    Each call waits at most ``timeout`` seconds.
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

    def call(self, method: str, request: object) -> Any:
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
