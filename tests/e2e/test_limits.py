"""What one user may have at once: one more is refused in words, counted, and costs nobody else anything."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from statistics import median

import grpc
import pytest

from kvsidecar.client import Blocks, Client, ClientError, HostBuffer
from kvsidecar.core.layout_checks import MAX_REGIONS, MAX_ROWS
from kvsidecar.core.registration import MAX_GROUPS
from kvsidecar.protocol.wire import namespace_to_wire
from kvsidecar.server import arrivals
from kvsidecar.server.convert import MAX_PARTS
from kvsidecar.types import PROTOCOL
from kvsidecar.v1 import sidecar_pb2 as pb
from kvsidecar.v1 import sidecar_pb2_grpc as pb_grpc
from tests.e2e.leftovers import open_fds
from tests.e2e.wire import crowd, framed, hello, register, stub, welcome
from tests.harness import NAMESPACE, SECONDS, DaemonProcess, Rank, done, eventually, hashes
from tests.marks import daemon_may_open, lent_daemon, promise

pytestmark = lent_daemon

HELLO = framed(pb.Hello(protocol=PROTOCOL))


@promise("refused at a stated bound and counted; other users are served")
@daemon_may_open(9000)  # one user's share of them is less than half
def test_connections_of_one_user_are_limited_and_given_back(daemon: DaemonProcess) -> None:
    rank = Rank(daemon)
    held = arrivals.MAX_CONNECTIONS - 8
    with crowd(daemon, held, HELLO), ExitStack() as stack:
        while held <= arrivals.MAX_CONNECTIONS:
            connection = stack.enter_context(hello(daemon, HELLO, []))
            reply = welcome(connection)
            if reply.error:
                break
            held += 1
        assert "one user may have 1024 connections" in reply.error
        assert arrivals.MAX_CONNECTIONS - 8 < held <= arrivals.MAX_CONNECTIONS
        assert daemon.refused("limit") == 1
        done(rank.store("a"))
        with daemon.client() as client:  # the operator of the same user is not locked out
            assert client.status().pool.blocks == 1
    rank.close()
    eventually(lambda: daemon.refused("limit") and _attaches(daemon))


_INHERITED = """
import os, socket, sys
path, count, message = sys.argv[1], int(sys.argv[2]), bytes.fromhex(sys.argv[3])
connections = [socket.socket(socket.AF_UNIX) for _ in range(count)]
for each in connections:
    each.connect(path)
    each.sendall(message)
    assert each.recv(1 << 16)
if os.fork():
    os._exit(0)
assert not any(each.recv(1) for each in connections)
print("all are closed", flush=True)
"""


def test_connections_that_outlive_their_process_are_closed(daemon: DaemonProcess) -> None:
    """A child has inherited them. They count for nobody any more, and no change of the policy would reach them."""
    command = [sys.executable, "-c", _INHERITED, daemon.socket + ".attach", "64", HELLO.hex()]
    out = subprocess.run(command, stdout=subprocess.PIPE, timeout=SECONDS, check=True).stdout
    assert out == b"all are closed\n"


def _attaches(daemon: DaemonProcess) -> bool:
    try:
        Rank(daemon).close()
    except ClientError:
        return False
    return True


@daemon_may_open(12_000)
def test_descriptors_handed_over_by_one_user_are_limited(daemon: DaemonProcess) -> None:
    message = framed(pb.Hello(protocol=PROTOCOL, num_fds=253))
    with ExitStack() as stack:
        null = os.open("/dev/null", os.O_RDONLY)
        stack.callback(os.close, null)
        replies = [
            welcome(stack.enter_context(hello(daemon, message, [null] * 253)))
            for _ in range(arrivals.MAX_SHARED_FDS // 253 + 1)
        ]
    assert ["4096 descriptors" in reply.error for reply in replies] == [False] * 16 + [True]
    assert daemon.refused("limit") == 1


@daemon_may_open(3000)
def test_ranks_of_one_user_are_limited_and_given_back(daemon: DaemonProcess) -> None:
    buffer = HostBuffer(1 << 20)
    with stub(daemon) as sidecar, ExitStack() as stack:
        streams = []
        for _ in range(256):
            connection = stack.enter_context(hello(daemon, framed(pb.Hello(protocol=PROTOCOL, num_fds=1)), [buffer.fd]))
            over = threading.Event()
            stack.callback(over.set)
            request = pb.AttachRequest(register=register(welcome(connection).token, buffer))
            replies = sidecar.Attach(_held_open(request, over), timeout=10 * SECONDS)
            assert next(replies).registered.session
            streams.append(replies)
        with pytest.raises(ClientError, match="one user may have 256 ranks"):
            Rank(daemon)
        assert daemon.refused("limit") == 1
    eventually(lambda: _attaches(daemon))
    buffer.close()


def _held_open(request: pb.AttachRequest, over: threading.Event) -> Iterator[pb.AttachRequest]:
    yield request
    over.wait()


def test_a_rank_of_too_many_regions_is_refused_before_they_are_looked_at(daemon: DaemonProcess) -> None:
    buffer = HostBuffer(1 << 20)
    with (
        hello(daemon, framed(pb.Hello(protocol=PROTOCOL, num_fds=1)), [buffer.fd]) as connection,
        stub(daemon) as sidecar,
    ):
        message = register(welcome(connection).token, buffer)
        for field, what, limit in (("groups", "groups", MAX_GROUPS), ("allocations", "allocations", 4096)):
            big = pb.Register()
            big.CopyFrom(message)
            many = getattr(big, field)
            many.extend([many[0]] * limit)
            with pytest.raises(grpc.RpcError, match=f"{what} is over the limit of {limit}") as caught:
                list(sidecar.Attach(iter([pb.AttachRequest(register=big)]), timeout=SECONDS))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
        message.groups[0].regions.extend([pb.Region()] * MAX_REGIONS)
        with pytest.raises(grpc.RpcError, match=f"{MAX_REGIONS + 1} regions is over the limit of {MAX_REGIONS}"):
            list(sidecar.Attach(iter([pb.AttachRequest(register=message)]), timeout=SECONDS))
    buffer.close()


def test_an_attach_stream_that_says_nothing_is_ended(daemon: DaemonProcess) -> None:
    silent = threading.Event()

    def nothing() -> Iterator[pb.AttachRequest]:
        silent.wait()
        yield pb.AttachRequest()

    with stub(daemon) as sidecar:
        with pytest.raises(grpc.RpcError, match="no message arrived within 5 s") as caught:
            list(sidecar.Attach(nothing(), timeout=SECONDS))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
        silent.set()
    assert daemon.refused("limit") == 1


@daemon_may_open(9000)
def test_a_connection_that_is_turned_away_leaves_no_descriptor(daemon: DaemonProcess) -> None:
    assert daemon.refused("limit") == 0  # libuv opens one, for good, at its first stream
    before = open_fds(daemon)
    with crowd(daemon, arrivals.MAX_CONNECTIONS + 50):
        eventually(lambda: daemon.refused("limit") == 50)
        assert open_fds(daemon) <= before + arrivals.MAX_CONNECTIONS + 5
    eventually(lambda: open_fds(daemon) <= before)


def test_lookups_and_jobs_of_too_many_parts_are_refused_before_they_are_looked_at(daemon: DaemonProcess) -> None:
    """An empty part is two bytes on the wire, and costs the daemon some microseconds."""
    namespace, prefix = namespace_to_wire(NAMESPACE), pb.LookupRequest.MODE_PREFIX
    with stub(daemon) as sidecar:
        most = pb.LookupRequest(namespace=namespace, mode=prefix, groups=[pb.LookupGroup()] * MAX_GROUPS)
        assert len(sidecar.Lookup(most, timeout=SECONDS).groups) == MAX_GROUPS
        too_many = pb.LookupRequest(namespace=namespace, mode=prefix, groups=[pb.LookupGroup()] * 1_900_000)
        with pytest.raises(grpc.RpcError, match=f"1900000 groups is over the limit of {MAX_GROUPS}") as caught:
            sidecar.Lookup(too_many, timeout=SECONDS)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
    rank = Rank(daemon)
    for start in (rank.client.store, rank.client.load):
        declined = rank.finish(start([Blocks(0, b"", [])] * (MAX_PARTS + 1)))
        assert declined.reason == "invalid_request"
        assert f"{MAX_PARTS + 1} parts is over the limit of {MAX_PARTS}" in declined.error
    done(rank.store("a"))
    rank.close()


@pytest.mark.alone
def test_the_largest_registration_does_not_hold_up_lookups(daemon: DaemonProcess) -> None:
    """The longest round trip of a lookup while a rank registers is a small part of the registration."""
    buffer = HostBuffer(1 << 20)
    row = pb.Region(row_stride=8 * MAX_REGIONS, block_stride=2 * MAX_REGIONS, row_bytes=1)
    row.num_rows = MAX_ROWS // MAX_REGIONS

    def share_of_longest_lookup(client: Client, sidecar: pb_grpc.SidecarStub) -> float:
        with hello(daemon, framed(pb.Hello(protocol=PROTOCOL, num_fds=1)), [buffer.fd]) as connection:
            message = register(welcome(connection).token, buffer)
            (group,) = message.groups
            group.num_blocks = 4
            del group.regions[:]
            for number in range(MAX_REGIONS):
                group.regions.add().CopyFrom(row)
                group.regions[-1].offset = 2 * number
            over = threading.Event()
            replies = sidecar.Attach(_held_open(pb.AttachRequest(register=message), over), timeout=SECONDS)
            registered: list[pb.AttachReply] = []
            waiting = threading.Thread(target=lambda: registered.append(next(replies)))
            began = time.perf_counter()
            waiting.start()
            longest = 0.0
            while waiting.is_alive():
                started = time.perf_counter()
                assert client.lookup(NAMESPACE, {0: hashes("a")}).ready
                longest = max(longest, time.perf_counter() - started)
            waiting.join()
            took = time.perf_counter() - began
            over.set()
            assert registered[0].registered.session
            assert not list(replies)
        return longest / took

    with daemon.client() as client, stub(daemon) as sidecar:
        assert client.lookup(NAMESPACE, {0: hashes("a")}).ready
        shares = [share_of_longest_lookup(client, sidecar) for _ in range(9)]
    assert median(shares) < 1 / 3, shares
    buffer.close()
