"""The attach socket, message by message."""

from __future__ import annotations

import socket
import subprocess
import sys
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


_CROWD = """
import socket, sys
path, count, message = sys.argv[1], int(sys.argv[2]), bytes.fromhex(sys.argv[3])
connections = [socket.socket(socket.AF_UNIX) for _ in range(count)]
for each in connections:
    each.connect(path)
    if message:
        each.sendall(message)
        assert each.recv(1 << 16)
print("all are here", flush=True)
sys.stdin.read()
"""


@contextmanager
def crowd(daemon: DaemonProcess, count: int, message: bytes = b"") -> Iterator[None]:
    """So many connections of another process, which may have more open than the tests should; each has sent the
    message, if there is one, and been answered."""
    command = [sys.executable, "-c", _CROWD, daemon.socket + ".attach", str(count), message.hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline()
        yield
        process.stdin.close()


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
