"""What operators ask: on a channel of its own, so it works whether or not anything is attached."""

from __future__ import annotations

import threading
from typing import Any

import grpc

from kvsidecar.client.connection import open_channel
from kvsidecar.errors import ClientError, DaemonUnreachable
from kvsidecar.types import Namespace
from kvsidecar.v1 import sidecar_pb2 as pb
from kvsidecar.v1 import sidecar_pb2_grpc as pb_grpc
from kvsidecar.wire import namespace_to_wire


class Operator:
    """Every call waits at most ``timeout`` seconds and raises DaemonUnreachable without an answer."""

    def __init__(self, socket: str, timeout: float) -> None:
        self._socket = socket
        self._timeout = timeout
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None

    def status(self) -> pb.StatusReply:
        reply: pb.StatusReply = self._call("Status", pb.StatusRequest())
        return reply

    def clear(self, namespace: Namespace | None) -> int:
        request = (
            pb.ClearRequest(all=True) if namespace is None else pb.ClearRequest(namespace=namespace_to_wire(namespace))
        )
        reply: pb.ClearReply = self._call("Clear", request)
        return reply.blocks

    def drain(self) -> None:
        self._call("Drain", pb.DrainRequest())

    def close(self) -> None:
        with self._lock:
            if self._channel is not None:
                self._channel.close()
                self._channel = None

    def _call(self, method: str, request: object) -> Any:
        with self._lock:
            if self._channel is None:
                self._channel = open_channel(self._socket)
            stub = pb_grpc.SidecarStub(self._channel)
        try:
            return getattr(stub, method)(request, timeout=self._timeout)
        except grpc.RpcError as error:
            text = error.details() or error.code().name
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise DaemonUnreachable(f"no kvsidecar answers at {self._socket}: {text}") from error
            raise ClientError(text) from error
