"""The operator calls of a client on the daemon's host."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any

import grpc

from kvsidecar.client.connection import Connection, connect
from kvsidecar.client.grpc_transport import open_channel
from kvsidecar.client.operator import operator_error
from kvsidecar.errors import AttachRefused
from kvsidecar.protocol.paths import attach_path
from kvsidecar.types import TOKEN_METADATA
from kvsidecar.v1 import sidecar_pb2_grpc as pb_grpc


class Operator:
    """Makes the calls over the Unix socket, on connections of its own: they work whether or not a rank is attached.

    Args:
        timeout: time limit of each call, in seconds.
    """

    def __init__(self, socket: str, timeout: float, name: str = "") -> None:
        self._socket = socket
        self._timeout = timeout
        self._name = name
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._connection: Connection | None = None

    def close(self) -> None:
        with self._lock:
            self._disconnect()
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
        """Identifies the caller. Empty if the daemon refuses the connection: it then answers as for anyone."""
        if self._connection is None or self._connection.ended():
            self._disconnect()
            with suppress(AttachRefused):
                self._connection = connect(attach_path(self._socket), fds=(), client=self._name, timeout=self._timeout)
        return b"" if self._connection is None else self._connection.token

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
