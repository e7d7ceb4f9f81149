"""Clients with the generated stubs alone: none of them ever connects to the attach socket."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvsidecar.client import HostBuffer
from kvsidecar.protocol.wire import namespace_to_wire, pack_ids
from kvsidecar.types import TOKEN_METADATA
from kvsidecar.v1 import sidecar_pb2 as pb
from kvsidecar.v1 import sidecar_pb2_grpc as pb_grpc
from tests.e2e.leftovers import nothing_is_left_of, open_fds
from tests.e2e.wire import raw_client, register, stub
from tests.harness import NAMESPACE, ROW_BYTES, SECONDS, DaemonProcess, eventually, hashes
from tests.marks import lent_daemon, promise

pytestmark = lent_daemon


def own(buffer: HostBuffer, number: int | None = None, token: bytes = b"") -> pb.Register:
    """The registration of a memfd by its number in this process."""
    message = register(token, buffer)
    message.allocations[0].own_fd = buffer.fd if number is None else number
    return message


class StubRank:
    """A rank whose whole code is the generated stub."""

    def __init__(self, sidecar: pb_grpc.SidecarStub) -> None:
        self.sidecar, self.buffer = sidecar, HostBuffer(1 << 20)
        self._requests: queue.SimpleQueue[pb.AttachRequest | None] = queue.SimpleQueue()
        self._requests.put(pb.AttachRequest(register=own(self.buffer)))
        requests: Iterator[pb.AttachRequest] = iter(self._requests.get, None)
        self.call = sidecar.Attach(requests, timeout=SECONDS)
        self.registered = self._next("registered").registered
        self.metadata = ((TOKEN_METADATA, self.registered.token),)

    def _next(self, kind: str) -> pb.AttachReply:
        return next(reply for reply in self.call if reply.WhichOneof("message") == kind)

    def ask(self, **message: Any) -> pb.JobDone:
        """Send a job, and return how it has ended."""
        self._requests.put(pb.AttachRequest(**message))
        return self._next("done").done

    def hits(self, *names: object, lease_ms: int = 0) -> pb.LookupReply:
        group = pb.LookupGroup(group=0, hashes=b"".join(hashes(*names)))
        request = pb.LookupRequest(
            namespace=namespace_to_wire(NAMESPACE),
            groups=[group],
            mode=pb.LookupRequest.MODE_PREFIX,
            lease_ms=lease_ms,
            token=self.registered.token if lease_ms else b"",
        )
        return self.sidecar.Lookup(request, timeout=SECONDS, metadata=self.metadata)

    def half_close(self) -> None:
        self._requests.put(None)


@contextmanager
def stub_rank(daemon: DaemonProcess) -> Iterator[StubRank]:
    with stub(daemon) as sidecar:
        rank = StubRank(sidecar)
        yield rank
        rank.half_close()
        rank.buffer.close()


def blocks(name: object, block: int) -> list[pb.Blocks]:
    return [pb.Blocks(group=0, hashes=hashes(name)[0], block_ids=pack_ids([block]))]


def refusal(daemon: DaemonProcess, first: pb.Register) -> tuple[grpc.StatusCode, str]:
    with stub(daemon) as sidecar, pytest.raises(grpc.RpcError) as caught:
        list(sidecar.Attach(iter([pb.AttachRequest(register=first)]), timeout=SECONDS))
    return caught.value.code(), caught.value.details()


@promise("serves store, load and lookup requests over gRPC")
def test_a_client_with_the_stubs_alone_stores_looks_up_and_loads_every_byte(daemon: DaemonProcess) -> None:
    with stub_rank(daemon) as rank:
        rank.buffer.memory[:ROW_BYTES] = os.urandom(ROW_BYTES)
        wanted = bytes(rank.buffer.memory[:ROW_BYTES])
        assert rank.ask(store=pb.Store(job=1, blocks=blocks("a", 0))).outcome == pb.JobDone.OUTCOME_DONE
        found = rank.hits("a", "b", lease_ms=60_000)
        assert (found.ready, found.groups[0].hits) == (True, 1)
        load = pb.Load(job=2, lease=found.lease, blocks=blocks("a", 5))
        assert rank.ask(load=load).outcome == pb.JobDone.OUTCOME_DONE
        assert bytes(rank.buffer.memory[5 * ROW_BYTES : 6 * ROW_BYTES]) == wanted
        assert rank.sidecar.Release(pb.ReleaseRequest(lease=found.lease), metadata=rank.metadata).released


def test_the_end_of_the_stream_ends_the_rank_its_lease_and_its_descriptors(daemon: DaemonProcess) -> None:
    with stub_rank(daemon) as rank:
        rank.ask(store=pb.Store(job=1, blocks=blocks("a", 0)))
        assert rank.hits("a", lease_ms=600_000).lease
        before = open_fds(daemon)
        rank.half_close()
        assert [reply for reply in rank.call if reply.HasField("done")] == []
        assert daemon.metric("kvsidecar_attached_ranks") == 0, "the end was told before the memory was unmapped"
        eventually(lambda: daemon.metric("kvsidecar_leases") == 0, "the lease outlived its client")
        eventually(lambda: open_fds(daemon) <= before - 2, "its pidfd and its memfd stay open")
        status = rank.sidecar.Status(pb.StatusRequest(session=rank.registered.session), timeout=SECONDS)
        assert status.session_ended
        with pytest.raises(grpc.RpcError) as caught:
            rank.hits("a", lease_ms=1)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_cancelled_stream_leaves_nothing_behind(daemon: DaemonProcess) -> None:
    with stub_rank(daemon) as rank:
        rank.call.cancel()
        eventually(lambda: daemon.metric("kvsidecar_attached_ranks") == 0)
        eventually(lambda: daemon.mapped_buffers() == 0)
    nothing_is_left_of(daemon)


ENGINE = """
import os, sys
from benchmarks.attacks.http2_client import DATA, END_HEADERS, HEADERS, PREFACE, SETTINGS, frame, message, request
from kvsidecar.client import HostBuffer
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.e2e.test_grpc_alone import own
import socket
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
first = pb.AttachRequest(register=own(HostBuffer(1 << 20))).SerializeToString()
connection.sendall(PREFACE + frame(SETTINGS))
connection.sendall(frame(HEADERS, 1, request("/kvsidecar.v1.Sidecar/Attach"), END_HEADERS))
connection.sendall(frame(DATA, 1, message(first)))
if os.fork() == 0:  # a child of the engine that outlives it, and has its connection
    sys.stdin.read()
    os._exit(0)
print("sent", flush=True)
sys.stdin.read()
"""


def test_the_end_of_the_process_ends_the_rank_though_a_child_has_the_connection(daemon: DaemonProcess) -> None:
    command = [sys.executable, "-c", ENGINE, daemon.socket]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "sent\n"
        eventually(lambda: daemon.metric("kvsidecar_attached_ranks") == 1)
        process.kill()
        eventually(lambda: daemon.metric("kvsidecar_attached_ranks") == 0, "it lives as long as the child")
        process.stdin.close()  # the child ends
    nothing_is_left_of(daemon)


def test_a_descriptor_is_held_to_the_same_rules_as_one_that_was_sent(daemon: DaemonProcess, tmp_path: Path) -> None:
    buffer = HostBuffer(1 << 20)
    before = open_fds(daemon)
    unsealed = os.memfd_create("unsealed")
    os.ftruncate(unsealed, 1 << 20)
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, 1 << 20)
    read_only = os.open(f"/proc/self/fd/{buffer.fd}", os.O_RDONLY)
    left, right = socket.socketpair()
    with left, right:
        for number, text in (
            (unsealed, "F_SEAL_SHRINK"),
            (file, "is not a memfd"),
            (read_only, "descriptor that can be written to"),
            (left.fileno(), "is not a memfd"),
            (1 << 20, "own_fd 1048576 is not open"),
            ((1 << 32) - 1, "own_fd 4294967295 is not open"),
        ):
            code, said = refusal(daemon, own(buffer, number))
            assert code is grpc.StatusCode.INVALID_ARGUMENT, said
            assert text in said
    short = own(buffer)
    short.allocations[0].size = 2 << 20
    assert refusal(daemon, short)[0] is grpc.StatusCode.INVALID_ARGUMENT
    for fd in (unsealed, file, read_only):
        os.close(fd)
    assert daemon.metric("kvsidecar_attached_ranks") == 0
    eventually(lambda: open_fds(daemon) <= before, "a descriptor leaked")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a memfd to another user")
def test_what_belongs_to_another_user_cannot_be_named(daemon: DaemonProcess) -> None:
    """As where the process has become that user's by a set-user-ID program."""
    buffer = HostBuffer(1 << 20)
    os.fchown(buffer.fd, 41001, -1)
    code, said = refusal(daemon, own(buffer))
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert "does not belong to the user" in said


def test_a_token_of_the_attach_socket_takes_no_numbers_of_descriptors(daemon: DaemonProcess) -> None:
    buffer = HostBuffer(1 << 20)
    with raw_client(daemon, buffer) as raw:
        code, said = refusal(daemon, own(buffer, token=raw.welcome.token))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "own_fd" in said


def test_a_watcher_needs_no_token(daemon: DaemonProcess) -> None:
    with stub(daemon) as sidecar:
        watch = pb.Watch(protocol=register(b"", HostBuffer(4096)).protocol, namespace=namespace_to_wire(NAMESPACE))
        call = sidecar.Attach(iter([pb.AttachRequest(watch=watch)]), timeout=SECONDS)
        assert next(call).registered.token
