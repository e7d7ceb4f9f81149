"""The attach socket, message by message."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import grpc

from kvsidecar.client import HostBuffer
from kvsidecar.protocol.framing import frame
from kvsidecar.protocol.wire import layout_to_wire, namespace_to_wire
from kvsidecar.types import PROTOCOL
from kvsidecar.v1 import sidecar_pb2 as pb
from kvsidecar.v1 import sidecar_pb2_grpc as pb_grpc
from tests.frames import receive
from tests.harness import NAMESPACE, SECONDS, DaemonProcess, layout


@contextmanager
def stub(daemon: DaemonProcess) -> Iterator[pb_grpc.SidecarStub]:
    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        yield pb_grpc.SidecarStub(channel)


@contextmanager
def hello(daemon: DaemonProcess, message: bytes, fds: list[int]) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(SECONDS)
        connection.connect(daemon.socket + ".attach")
        with suppress(BrokenPipeError):  # refused before it is heard: the answer is there to be read all the same
            socket.send_fds(connection, [message], fds)
        yield connection


def framed(message: pb.Hello) -> bytes:
    return frame(message.SerializeToString())


def welcome(connection: socket.socket) -> pb.Welcome:
    return pb.Welcome.FromString(receive(connection))


def register(token: bytes, buffer: HostBuffer, **changes: object) -> pb.Register:
    message = pb.Register(
        protocol=PROTOCOL,
        token=token,
        instance="raw",
        namespace=namespace_to_wire(NAMESPACE),
        rank=0,
        world_size=1,
        device="host",
        allocations=[pb.Allocation(fd_index=0, size=buffer.nbytes)],
        groups=[layout_to_wire(layout())],
    )
    for name, value in changes.items():
        setattr(message, name, value)
    return message
