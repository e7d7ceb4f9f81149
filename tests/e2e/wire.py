"""The wire, message by message: a client, and a rank, that say what they like."""

from __future__ import annotations

import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any

import grpc
import pytest

from kvsidecar.client import HostBuffer
from kvsidecar.protocol.framing import frame
from kvsidecar.protocol.wire import layout_to_wire, namespace_to_wire, pack_ids
from kvsidecar.types import PROTOCOL
from kvsidecar.v1 import sidecar_pb2 as pb
from kvsidecar.v1 import sidecar_pb2_grpc as pb_grpc
from tests.frames import frames, receive
from tests.harness import NAMESPACE, SECONDS, DaemonProcess, hashes, layout

MINUTES = 600_000
"""Milliseconds: a time that is not up within a test."""


NO_JOB = 4711


@contextmanager
def stub(daemon: DaemonProcess) -> Iterator[pb_grpc.SidecarStub]:
    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        yield pb_grpc.SidecarStub(channel)


def connect(daemon: DaemonProcess, message: bytes, fds: list[int]) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(SECONDS)
    connection.connect(daemon.socket + ".attach")
    with suppress(BrokenPipeError):  # refused before it is heard: the answer is there to be read all the same
        socket.send_fds(connection, [message], fds)
    return connection


@contextmanager
def hello(daemon: DaemonProcess, message: bytes, fds: list[int]) -> Iterator[socket.socket]:
    with connect(daemon, message, fds) as connection:
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


class RawClient:
    """A connection of the attach socket in the test's hands."""

    def __init__(self, daemon: DaemonProcess, buffer: HostBuffer | None = None) -> None:
        fds = [buffer.fd] if buffer else []
        message = pb.Hello(protocol=PROTOCOL, num_fds=len(fds), client="raw")
        self.connection = connect(daemon, framed(message), fds)
        self.welcome = welcome(self.connection)

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
        return pb.AttachRequest(register=register(self.welcome.token if token is None else token, buffer))


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


class RawRank:
    """An Attach stream in the test's hands."""

    def __init__(self, daemon: DaemonProcess, channel: grpc.Channel, events: list[bytes]) -> None:
        self.buffer = HostBuffer(1 << 20)
        self.link = connect(daemon, framed(pb.Hello(protocol=PROTOCOL, num_fds=1)), [self.buffer.fd])
        hello = welcome(self.link)
        self._requests: queue.SimpleQueue[pb.AttachRequest | None] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[pb.AttachReply] = queue.SimpleQueue()
        self._kept: list[pb.AttachReply] = []
        first = register(hello.token, self.buffer)
        first.event_handles.extend(events)
        self._requests.put(pb.AttachRequest(register=first))
        requests: Iterator[pb.AttachRequest] = iter(self._requests.get, None)
        if daemon.local:
            assert hello.local_protocol
            threading.Thread(target=self._write_local, args=(requests,), daemon=True).start()
            replies = self._read_local()
        else:
            replies = pb_grpc.SidecarStub(channel).Attach(requests, timeout=SECONDS)
        self._reader = threading.Thread(target=self._read, args=(replies,))
        self._reader.start()
        self.registered = self.next("registered").registered

    def _read(self, replies: Iterator[pb.AttachReply]) -> None:
        for reply in replies:
            self._replies.put(reply)

    def _write_local(self, requests: Iterator[pb.AttachRequest]) -> None:
        for message in chain(
            (pb.LocalRequest(attach=each) for each in requests), [pb.LocalRequest(detach=pb.Detach())]
        ):
            self.link.sendall(frame(message.SerializeToString()))

    def _read_local(self) -> Iterator[pb.AttachReply]:
        for payload in frames(self.link):
            reply = pb.LocalReply.FromString(payload)
            if reply.HasField("ended"):
                assert not reply.ended.HasField("error"), reply
                return
            yield reply.attach
        pytest.fail("the daemon closed the connection")

    def send(self, request: pb.AttachRequest) -> None:
        self._requests.put(request)

    def store(self, job: int, *, deadline_ms: int = 0, event: int = 0) -> None:
        """Block ``job`` under the hash of ``job``."""
        blocks = [pb.Blocks(group=0, hashes=hashes(job)[0], block_ids=pack_ids([job]))]
        self.send(pb.AttachRequest(store=pb.Store(job=job, blocks=blocks, deadline_ms=deadline_ms, event=event)))

    def flush(self, *jobs: int, mode: pb.Flush.Mode, timeout_ms: int = MINUTES) -> pb.Flushed:
        self.ask_flush(*jobs, mode=mode, timeout_ms=timeout_ms)
        return self.next("flushed").flushed

    def ask_flush(self, *jobs: int, mode: pb.Flush.Mode, timeout_ms: int = MINUTES) -> None:
        self.send(pb.AttachRequest(flush=pb.Flush(flush=1, jobs=jobs, timeout_ms=timeout_ms, mode=mode)))

    def until_taken(self) -> None:
        """Until the daemon has taken everything that was sent: it takes in order, and refuses this at once."""
        self.send(pb.AttachRequest(store=pb.Store(job=NO_JOB, blocks=[pb.Blocks(group=99)])))
        assert self.next("done").done.job == NO_JOB

    def next(self, kind: str) -> pb.AttachReply:
        """The next reply of this kind; others are kept."""
        for reply in self._kept:
            if reply.WhichOneof("message") == kind:
                self._kept.remove(reply)
                return reply
        while (reply := self._replies.get(timeout=SECONDS)).WhichOneof("message") != kind:
            self._kept.append(reply)
        return reply

    def silent(self) -> bool:
        """Whether nothing has come for a moment."""
        try:
            self._kept.append(self._replies.get(timeout=0.05))
        except queue.Empty:
            return True
        return False

    def ended(self, count: int) -> list[tuple[int, str]]:
        """Job and reason ("" if it was done) of the next ends, in their order."""
        ends = [self.next("done").done for _ in range(count)]
        return [(end.job, end.reason) for end in ends]

    def close(self) -> None:
        self._requests.put(None)
        self._reader.join(SECONDS)
        self.link.close()


@contextmanager
def raw_rank(daemon: DaemonProcess, events: list[bytes] | None = None) -> Iterator[RawRank]:
    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        rank = RawRank(daemon, channel, events or [])
        yield rank
        rank.close()
