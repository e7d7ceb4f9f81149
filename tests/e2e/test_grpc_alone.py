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
from tests.harness import FIRST, NAMESPACE, ROW_BYTES, SECONDS, DaemonProcess, Gate, eventually, hashes
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

    def begin_store(self, job: int, name: object, block: int) -> Any:
        store = pb.Store(job=job, blocks=blocks(name, block))
        request = pb.StoreRequest(session=self.registered.session, store=store)
        return self.sidecar.Store.future(request, timeout=SECONDS, metadata=self.metadata)  # type: ignore[attr-defined]

    def store(self, job: int, name: object, block: int) -> pb.JobDone:
        """The same, and wait for its end."""
        ended: pb.JobDone = self.begin_store(job, name, block).result()
        return ended

    def pending(self, *jobs: int) -> list[int]:
        """Which of these the daemon has, and has not ended."""
        flush = pb.Flush(flush=1, jobs=jobs, mode=pb.Flush.MODE_FINISH)
        self._requests.put(pb.AttachRequest(flush=flush))
        return list(self._next("flushed").flushed.pending)

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


@promise("serves store, load and lookup over gRPC")
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


def test_calls_store_and_load_without_a_word_on_the_stream_but_the_registration(daemon: DaemonProcess) -> None:
    with stub_rank(daemon) as rank, stub(daemon) as another_channel:
        rank.buffer.memory[:ROW_BYTES] = os.urandom(ROW_BYTES)
        wanted = bytes(rank.buffer.memory[:ROW_BYTES])
        stored = rank.store(1, "a", 0)
        assert (stored.job, stored.outcome, stored.copied_blocks) == (1, pb.JobDone.OUTCOME_DONE, 1)
        assert rank.store(1, "a", 0).skipped_blocks == 1, "the number is free again"
        lease = rank.hits("a", lease_ms=600_000).lease
        load = pb.LoadRequest(session=rank.registered.session, load=pb.Load(job=2, lease=lease, blocks=blocks("a", 5)))
        loaded = another_channel.Load(load, timeout=SECONDS, metadata=rank.metadata)
        assert (loaded.job, loaded.outcome) == (2, pb.JobDone.OUTCOME_DONE)
        assert bytes(rank.buffer.memory[5 * ROW_BYTES : 6 * ROW_BYTES]) == wanted
        declined = rank.store(3, "b", 8)
        assert (declined.outcome, declined.reason) == (pb.JobDone.OUTCOME_DECLINED, "invalid_request")


def test_a_call_for_the_rank_of_another_client_is_refused(daemon: DaemonProcess) -> None:
    """Also of the same user: it would write into memory that this client has not registered."""
    with stub_rank(daemon) as rank, stub_rank(daemon) as other:
        rank.store(1, "a", 0)
        request = pb.LoadRequest(session=rank.registered.session, load=pb.Load(job=2, blocks=blocks("a", 1)))
        for metadata in (other.metadata, None, ((TOKEN_METADATA, b"guessed"),)):
            with pytest.raises(grpc.RpcError) as caught:
                rank.sidecar.Load(request, timeout=SECONDS, metadata=metadata)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        session = rank.registered.session
        rank.half_close()
        assert [reply for reply in rank.call if reply.HasField("done")] == []
        with pytest.raises(grpc.RpcError) as caught:
            rank.store(3, "b", 0)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.RpcError, match=f"session {session}"):
            other.sidecar.Load(request, timeout=SECONDS, metadata=other.metadata)
        assert other.store(1, "b", 0).outcome == pb.JobDone.OUTCOME_DONE


def test_a_call_after_the_end_of_its_stream_is_refused_though_its_client_is_there(daemon: DaemonProcess) -> None:
    buffer = HostBuffer(1 << 20)
    with raw_client(daemon, buffer) as raw, stub(daemon) as sidecar:
        token = raw.welcome.token
        first = pb.AttachRequest(register=register(token, buffer))
        registered, *_ = sidecar.Attach(iter([first]), timeout=SECONDS)
        assert registered.registered.token == token
        request = pb.StoreRequest(session=registered.registered.session, store=pb.Store(job=1, blocks=blocks("a", 0)))
        with pytest.raises(grpc.RpcError, match="its stream has ended"):
            sidecar.Store(request, timeout=SECONDS, metadata=((TOKEN_METADATA, token),))


def test_a_call_that_is_given_up_before_its_copy_starts_leaves_no_reservation(short_dir: Path, gate: Gate) -> None:
    with DaemonProcess(short_dir, KVSIDECAR_FAILPOINTS=f"store.in_flight@{FIRST}={gate}") as daemon:
        daemon.wait_ready()
        with stub_rank(daemon) as rank:
            running, waiting = (rank.begin_store(number, number, number) for number in (1, 2))
            eventually(lambda: rank.pending(1, 2) == [1, 2])
            with pytest.raises(grpc.RpcError, match="job 1 is still running"):
                rank.store(1, "c", 3)
            reserved = daemon.metric("kvsidecar_pool_reserved_bytes")
            waiting.cancel()
            eventually(lambda: rank.pending(1, 2) == [1], "it still runs")
            assert 0 < daemon.metric("kvsidecar_pool_reserved_bytes") < reserved
            running.cancel()  # too late: a copy that has started is finished
            gate.let_pass()
            eventually(lambda: rank.pending(1, 2) == [])
            assert [rank.hits(number).groups[0].hits for number in (1, 2)] == [1, 0]
            assert daemon.metric("kvsidecar_pool_reserved_bytes") == 0
            assert daemon.refused("cancelled") == 1
            assert rank.store(2, 2, 2).copied_blocks == 1, "its number is free again"


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
