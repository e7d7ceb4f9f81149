"""A client that says what it likes over the local protocol."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from kvsidecar.client import HostBuffer
from kvsidecar.protocol.framing import frame
from kvsidecar.protocol.wire import layout_to_wire, namespace_to_wire
from kvsidecar.types import PROTOCOL
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.frames import receive
from tests.harness import (
    NAMESPACE,
    SECONDS,
    DaemonProcess,
    layout,
)


class RawClient:
    """A connection of the attach socket in the test's hands."""

    def __init__(self, daemon: DaemonProcess, buffer: HostBuffer | None = None) -> None:
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.settimeout(SECONDS)
        self.connection.connect(daemon.socket + ".attach")
        fds = [buffer.fd] if buffer else []
        hello = pb.Hello(protocol=PROTOCOL, num_fds=len(fds), client="raw").SerializeToString()
        socket.send_fds(self.connection, [frame(hello)], fds)
        self.welcome = pb.Welcome.FromString(receive(self.connection))

    def send(self, **message: Any) -> None:
        self.connection.sendall(frame(pb.LocalRequest(**message).SerializeToString()))

    def receive(self) -> pb.LocalReply:
        return pb.LocalReply.FromString(receive(self.connection))

    def attach(self, kind: str) -> Any:
        """The next reply, which is one of the Attach stream and of this kind."""
        reply = self.receive()
        assert reply.WhichOneof("message") == "attach", reply
        assert reply.attach.WhichOneof("message") == kind, reply
        return getattr(reply.attach, kind)

    def error(self, call: int) -> tuple[grpc.StatusCode, str]:
        """The next reply, which is an error for this call."""
        reply = self.receive()
        assert (reply.WhichOneof("message"), reply.call) == ("error", call), reply
        return status(reply.error)

    def ended(self) -> tuple[grpc.StatusCode, str]:
        """The next reply, which is the end of the stream."""
        reply = self.receive()
        assert reply.WhichOneof("message") == "ended", reply
        return status(reply.ended.error)

    def closed(self) -> bool:
        return self.connection.recv(1) == b""

    def register(self, buffer: HostBuffer, token: bytes | None = None) -> pb.AttachRequest:
        register = pb.Register(
            protocol=PROTOCOL,
            token=self.welcome.token if token is None else token,
            instance="raw",
            namespace=namespace_to_wire(NAMESPACE),
            world_size=1,
            device="host",
            allocations=[pb.Allocation(fd_index=0, size=buffer.nbytes)],
            groups=[layout_to_wire(layout())],
        )
        return pb.AttachRequest(register=register)


def status(error: pb.LocalError) -> tuple[grpc.StatusCode, str]:
    return next(code for code in grpc.StatusCode if code.value[0] == error.code), error.text


@pytest.fixture
def buffer() -> Iterator[HostBuffer]:
    buffer = HostBuffer(1 << 20)
    yield buffer
    buffer.close()


@contextmanager
def raw_client(daemon: DaemonProcess, buffer: HostBuffer | None = None) -> Iterator[RawClient]:
    raw = RawClient(daemon, buffer)
    yield raw
    raw.connection.close()


@pytest.fixture
def raw(daemon: DaemonProcess, buffer: HostBuffer) -> Iterator[RawClient]:
    with raw_client(daemon, buffer) as raw:
        yield raw
