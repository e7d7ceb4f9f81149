"""Who knows the contract alone can use the daemon: this client has the .proto, its messages and gRPC, no code of the
package, and takes each number from the .proto's text."""

from __future__ import annotations

import fcntl
import os
import queue
import re
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from kvsidecar import types
from kvsidecar.v1 import sidecar_pb2 as pb
from kvsidecar.v1 import sidecar_pb2_grpc as pb_grpc
from tests.harness import SECONDS, DaemonProcess
from tests.marks import lent_daemon, promise

pytestmark = lent_daemon

ROOT = Path(__file__).parents[2]
CONTRACT = ROOT / "proto" / "kvsidecar" / "v1" / "sidecar.proto"
NUMBERED = ("Hello", "Register", "Watch")
"""Messages that say which protocol their sender speaks."""
HASH = bytes(range(32))
BLOCK = 4096
NAMESPACE = pb.Namespace(
    model="m", dtype="bf16", kv_layout="LBNHC", block_size=16, tp_size=1, pp_size=1, hash_algorithm="sha256",
    hash_bytes=len(HASH),
)  # fmt: skip


def number(message: str) -> int:
    """What the contract says that a client has to send in this message's `protocol`."""
    (body,) = re.findall(rf"^message {message} {{\n(.*?)^}}", CONTRACT.read_text(), re.MULTILINE | re.DOTALL)
    (found,) = re.findall(r"uint32 protocol = 1; +// version of the protocol: (\d+)$", body, re.MULTILINE)
    return int(found)


@contextmanager
def welcomed(daemon: DaemonProcess, fds: list[int]) -> Iterator[bytes]:
    """The token of a connection to the attach socket, which stays open meanwhile."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(SECONDS)
        connection.connect(f"{daemon.socket}.attach")
        hello = pb.Hello(protocol=number("Hello"), num_fds=len(fds), client="another").SerializeToString()
        socket.send_fds(connection, [struct.pack("<I", len(hello)) + hello], fds)
        data, pidfds, _, _ = socket.recv_fds(connection, 4, 64)
        (length,) = struct.unpack("<I", data)
        welcome = pb.Welcome.FromString(connection.recv(length, socket.MSG_WAITALL))
        assert (welcome.error, len(pidfds)) == ("", welcome.num_pidfds)
        try:
            yield welcome.token
        finally:
            for fd in pidfds:
                os.close(fd)


@contextmanager
def stream(
    daemon: DaemonProcess, *messages: pb.AttachRequest
) -> Iterator[tuple[queue.Queue[pb.AttachRequest | None], Iterator[pb.AttachReply]]]:
    """Attach, over gRPC: what is put into the queue is sent, None ends it."""
    sent: queue.Queue[pb.AttachRequest | None] = queue.Queue()
    for message in messages:
        sent.put(message)
    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        yield sent, pb_grpc.SidecarStub(channel).Attach(iter(sent.get, None), timeout=SECONDS)


def done(replies: Iterator[pb.AttachReply]) -> pb.JobDone:
    return next(reply.done for reply in replies if reply.HasField("done"))


@promise("any through the client")
def test_a_client_that_obeys_the_contract_attaches_stores_and_loads(daemon: DaemonProcess) -> None:
    memory = os.memfd_create("another", os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(memory, 0, 2 * BLOCK)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        os.pwrite(memory, b"hello!", 0)
        region = pb.Region(row_stride=BLOCK, block_stride=BLOCK, row_bytes=BLOCK, num_rows=1)
        with welcomed(daemon, [memory]) as token:
            register = pb.Register(
                protocol=number("Register"), token=token, instance="another", namespace=NAMESPACE, world_size=1,
                device="host", allocations=[pb.Allocation(fd_index=0, size=2 * BLOCK)],
                groups=[pb.Group(num_blocks=2, num_shards=1, regions=[region])],
            )  # fmt: skip
            with stream(daemon, pb.AttachRequest(register=register)) as (sent, replies):
                assert next(replies).registered.session
                for kind, block in (("store", 0), ("load", 1)):
                    blocks = [pb.Blocks(hashes=HASH, block_ids=struct.pack("<q", block))]
                    job = getattr(pb, kind.title())(job=block + 1, blocks=blocks)
                    sent.put(pb.AttachRequest(**{kind: job}))
                    assert done(replies).outcome == pb.JobDone.OUTCOME_DONE
                sent.put(None)
                assert [reply for reply in replies if reply.HasField("done")] == []
        assert os.pread(memory, 6, BLOCK) == b"hello!"
    finally:
        os.close(memory)


def test_a_client_that_obeys_the_contract_watches(daemon: DaemonProcess) -> None:
    with welcomed(daemon, []) as token:
        watch = pb.Watch(protocol=number("Watch"), token=token, namespace=NAMESPACE)
        with stream(daemon, pb.AttachRequest(watch=watch)) as (sent, replies):
            assert next(replies).registered.epoch
            assert any(reply.residency.complete for reply in replies)
            sent.put(None)


@pytest.mark.parametrize("path", ["proto/kvsidecar/v1/sidecar.proto", "docs/wire.md", "docs/messages.md"])
def test_every_text_that_names_the_protocols_version_names_the_daemons(path: str) -> None:
    text = " ".join((ROOT / path).read_text().split())
    said = re.findall(r"(?:wire protocol, version|version of the protocol:|protocol version is) (\d+)", text)
    assert set(map(int, said)) == {types.PROTOCOL}


def test_every_message_that_has_the_protocols_version_says_which() -> None:
    having = {name for name, each in pb.DESCRIPTOR.message_types_by_name.items() if "protocol" in each.fields_by_name}
    assert having == set(NUMBERED)
    assert {number(message) for message in NUMBERED} == {types.PROTOCOL}
