"""The wire as a client of another make would use it, or misuse it: raw messages against a real daemon."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2

from kvsidecar.client import HostBuffer
from kvsidecar.protocol.framing import frame
from kvsidecar.protocol.wire import namespace_to_wire, pack_ids
from kvsidecar.types import PROTOCOL
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.e2e.leftovers import open_fds
from tests.e2e.wire import framed, hello, register, stub, welcome
from tests.harness import FIRST, NAMESPACE, SECONDS, DaemonProcess, Gate, Rank, done, eventually, hashes
from tests.marks import lent_daemon

pytestmark = lent_daemon


def refusal(daemon: DaemonProcess, *messages: pb.AttachRequest) -> tuple[grpc.StatusCode, str]:
    """How the daemon ends an Attach stream of these messages."""
    with stub(daemon) as sidecar, pytest.raises(grpc.RpcError) as caught:
        for _ in sidecar.Attach(iter(messages), timeout=SECONDS):
            pass
    return caught.value.code(), caught.value.details()


def test_the_first_message_must_register(daemon: DaemonProcess) -> None:
    code, text = refusal(daemon, pb.AttachRequest(flush=pb.Flush(flush=1)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "register" in text
    assert refusal(daemon)[0] is grpc.StatusCode.INVALID_ARGUMENT


def test_a_registration_without_a_live_attach_connection_is_refused(daemon: DaemonProcess) -> None:
    buffer = HostBuffer(1 << 20)
    code, text = refusal(daemon, pb.AttachRequest(register=register(b"guessed", buffer)))
    assert code is grpc.StatusCode.UNAUTHENTICATED
    assert "attach socket" in text


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        ({"protocol": 99}, grpc.StatusCode.FAILED_PRECONDITION, "protocol"),
        ({"instance": ""}, grpc.StatusCode.INVALID_ARGUMENT, "instance"),
        ({"rank": 3}, grpc.StatusCode.INVALID_ARGUMENT, "rank 3"),
        ({"device": "GPU-0"}, grpc.StatusCode.FAILED_PRECONDITION, "GPU-0"),
    ],
)
def test_a_registration_that_makes_no_sense_is_refused_in_words(
    daemon: DaemonProcess, changes: dict[str, object], code: grpc.StatusCode, text: str
) -> None:
    buffer = HostBuffer(1 << 20)
    with hello(daemon, framed(pb.Hello(protocol=PROTOCOL, num_fds=1)), [buffer.fd]) as connection:
        message = register(welcome(connection).token, buffer, **changes)
        refused = refusal(daemon, pb.AttachRequest(register=message))
    assert refused[0] is code
    assert text in refused[1]
    assert daemon.metric("kvsidecar_attached_ranks") == 0


def test_every_missing_namespace_field_is_refused_by_name(daemon: DaemonProcess) -> None:
    with stub(daemon) as sidecar:
        for field in pb.Namespace.DESCRIPTOR.fields:
            if field.name == "extra":
                continue
            namespace = namespace_to_wire(NAMESPACE)
            namespace.ClearField(field.name)  # type: ignore[arg-type]
            request = pb.LookupRequest(namespace=namespace, mode=pb.LookupRequest.MODE_PREFIX)
            with pytest.raises(grpc.RpcError) as caught:
                sidecar.Lookup(request, timeout=SECONDS)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert field.name in caught.value.details()


def test_a_memfd_that_could_be_truncated_is_refused(daemon: DaemonProcess) -> None:
    fd = os.memfd_create("unsealed")
    os.ftruncate(fd, 1 << 20)
    with hello(daemon, framed(pb.Hello(protocol=PROTOCOL, num_fds=1)), [fd]) as connection:
        message = pb.AttachRequest(register=register(welcome(connection).token, HostBuffer(1 << 20)))
        code, text = refusal(daemon, message)
    os.close(fd)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "F_SEAL_SHRINK" in text


def test_hashes_of_another_width_and_unknown_modes_are_refused(daemon: DaemonProcess) -> None:
    namespace = namespace_to_wire(NAMESPACE)
    group = pb.LookupGroup(group=0, hashes=b"x" * 33)
    with stub(daemon) as sidecar:
        for request, text in (
            (pb.LookupRequest(namespace=namespace, mode=pb.LookupRequest.MODE_PREFIX, groups=[group]), "width 32"),
            (pb.LookupRequest(namespace=namespace), "MODE_PREFIX"),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                sidecar.Lookup(request, timeout=SECONDS)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert text in caught.value.details()


def test_clear_must_say_what(daemon: DaemonProcess) -> None:
    with stub(daemon) as sidecar, pytest.raises(grpc.RpcError) as caught:
        sidecar.Clear(pb.ClearRequest(), timeout=SECONDS)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_job_number_in_use_ends_the_stream_and_no_block_is_lost(short_dir: Path, gate: Gate) -> None:
    with DaemonProcess(short_dir, KVSIDECAR_FAILPOINTS=f"store.in_flight@{FIRST}={gate}") as daemon:
        daemon.wait_ready()
        buffer = HostBuffer(1 << 20)
        with hello(daemon, framed(pb.Hello(protocol=PROTOCOL, num_fds=1)), [buffer.fd]) as connection:
            first = pb.AttachRequest(register=register(welcome(connection).token, buffer))
            store = pb.Store(job=7, blocks=[pb.Blocks(group=0, hashes=hashes("a")[0], block_ids=pack_ids([0]))])
            job = pb.AttachRequest(store=store)
            with ThreadPoolExecutor(1) as thread:
                refused = thread.submit(refusal, daemon, first, job, job)
                try:
                    eventually(lambda: daemon.refused("invalid_request") == 1)
                finally:
                    gate.let_pass()
                code, text = refused.result()
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "job 7" in text
        rank = Rank(daemon)
        assert rank.hits("a") == 1, "the store that had begun was not finished"
        rank.close()


def test_jobs_may_follow_the_registration_at_once_and_the_end_comes_behind_them(daemon: DaemonProcess) -> None:
    buffer = HostBuffer(1 << 20)
    with (
        hello(daemon, framed(pb.Hello(protocol=PROTOCOL, num_fds=1)), [buffer.fd]) as connection,
        stub(daemon) as sidecar,
    ):
        messages = [pb.AttachRequest(register=register(welcome(connection).token, buffer))]
        for job in range(3):
            blocks = [pb.Blocks(group=0, hashes=hashes(job)[0], block_ids=pack_ids([job]))]
            messages.append(pb.AttachRequest(store=pb.Store(job=job, blocks=blocks)))
        first, *replies = sidecar.Attach(iter(messages), timeout=SECONDS)
        assert first.registered.session
        assert [each.done.outcome for each in replies if each.HasField("done")] == [pb.JobDone.OUTCOME_DONE] * 3
        assert daemon.metric("kvsidecar_attached_ranks") == 0, "the end was told before the memory was unmapped"
    buffer.close()


@pytest.mark.parametrize("version", ["v1alpha", "v1"])
def test_reflection_lists_the_service_and_its_calls(daemon: DaemonProcess, version: str) -> None:
    """To a client that knows one version only, as each does at some time."""
    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        reflect = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            reflection_pb2.ServerReflectionRequest.SerializeToString,
            reflection_pb2.ServerReflectionResponse.FromString,
        )
        requests = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="kvsidecar.v1.Sidecar"),
        ]
        listed, described = reflect(iter(requests), timeout=SECONDS)
    assert "kvsidecar.v1.Sidecar" in [service.name for service in listed.list_services_response.service]
    (file,) = described.file_descriptor_response.file_descriptor_proto
    assert b"StoreRequest" in file


def test_an_attach_client_of_another_protocol_is_told_both_numbers(daemon: DaemonProcess) -> None:
    with hello(daemon, framed(pb.Hello(protocol=PROTOCOL + 1)), []) as connection:
        error = welcome(connection).error
    assert f"protocol {PROTOCOL}" in error
    assert str(PROTOCOL + 1) in error


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xff\xff\xff\xff",
        frame(b"\xff\xff\xff"),
        b"GET / HTTP/1.1\r\n\r\n",
        framed(pb.Hello(protocol=PROTOCOL, num_fds=9)),
    ],
    ids=["silent close", "huge length", "no protobuf", "http", "fds announced but not sent"],
)
def test_garbage_on_the_attach_socket_costs_nothing(daemon: DaemonProcess, message: bytes) -> None:
    buffer = HostBuffer(4096)
    daemon.get("/health")
    before = open_fds(daemon)
    with hello(daemon, message or b"\0", [buffer.fd]) as connection:
        connection.shutdown(socket.SHUT_WR)
        answer = welcome(connection)
        assert answer.error
        assert not answer.token
        with suppress(ConnectionResetError):  # what it had not read when it closed
            assert connection.recv(100) == b""
    eventually(lambda: open_fds(daemon) <= before, "a descriptor leaked")
    rank = Rank(daemon)
    done(rank.store("a"))
    rank.close()


def test_descriptors_are_closed_with_their_client(daemon: DaemonProcess) -> None:
    rank = Rank(daemon)
    rank.close()
    daemon.get("/health")
    before = open_fds(daemon)
    for _ in range(3):
        again = Rank(daemon)
        done(again.store("a"))
        again.close()
    eventually(lambda: open_fds(daemon) <= before, "a descriptor leaked")


def test_a_client_that_does_not_read_is_ended_and_others_go_on(daemon: DaemonProcess) -> None:
    buffer = HostBuffer(1 << 20)
    with (
        hello(daemon, framed(pb.Hello(protocol=PROTOCOL, num_fds=1)), [buffer.fd]) as connection,
        stub(daemon) as sidecar,
    ):
        first = pb.AttachRequest(register=register(welcome(connection).token, buffer))
        ended = threading.Event()

        def flood() -> Iterator[pb.AttachRequest]:
            yield first
            for job in range(1, 1_000_000):
                if ended.is_set():
                    return
                yield pb.AttachRequest(store=pb.Store(job=job, blocks=[pb.Blocks(group=99)]))

        # Thousands of messages: the time of the call must not be up before they are too many.
        replies = sidecar.Attach(flood(), timeout=4 * SECONDS)
        daemon.wait_log("rank detached", 4 * SECONDS)
        ended.set()
        with pytest.raises(grpc.RpcError) as caught:
            list(replies)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "read the Attach stream" in caught.value.details()
    rank = Rank(daemon)
    done(rank.store("a"))
    rank.close()
