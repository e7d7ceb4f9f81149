"""Who attaches over gRPC alone where the kernel does not say everything, and what is left of one that is refused."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvsidecar.errors import ImportRefused, KVSidecarError, LimitExceeded, UnknownPeer
from kvsidecar.server.arrivals import CONNECTION_FDS, TABLE_SHARE, Arrivals
from kvsidecar.server.grpc_front import GrpcClient, OpenedConnection
from kvsidecar.server.stream_clients import StreamClients
from kvsidecar.support import peer as peers
from kvsidecar.support.loop_time import LoopTime
from kvsidecar.support.peer import Credentials
from kvsidecar.support.steps import Steps
from kvsidecar.support.turns import Turns
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.harness import eventually_in_loop


@pytest.fixture
def connection() -> Iterator[socket.socket]:
    near, far = socket.socketpair()
    with near, far:
        yield near


@pytest.fixture
def old_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without SO_PEERPIDFD."""
    monkeypatch.setattr(peers, "kernel_pidfd", lambda _: None)


class Bench:
    """A daemon whose clients attach with this connection."""

    def __init__(self, connection: socket.socket, *, pid: int | None = None, at: float | None = None) -> None:
        at = time.clock_gettime(time.CLOCK_BOOTTIME) if at is None else at
        who = Credentials(os.getpid() if pid is None else pid, os.getuid(), os.getgid())
        self.arrivals, self.gone = Arrivals(400), list[Any]()
        add_peer = lambda who, name, fds, **_: SimpleNamespace(token=b"token", pid=who.pid, uid=who.uid, fds=fds)  # noqa: E731
        handler: Any = SimpleNamespace(
            steps=Steps(LoopTime()), instances=SimpleNamespace(add_peer=add_peer), peer_gone=self.gone.append
        )
        client = GrpcClient(who.uid, {}, "name", OpenedConnection(connection, who, at))
        self.clients = StreamClients(
            handler, self.arrivals, Turns(), lambda name: client if name == "unix-abstract:name" else None
        )

    async def refused(self, first: pb.Register) -> KVSidecarError:
        before = set(os.listdir("/proc/self/fd"))
        with pytest.raises(KVSidecarError) as caught:
            await self.clients.admit("unix-abstract:name", first)
        assert set(os.listdir("/proc/self/fd")) <= before, "a descriptor is left"
        assert first.token == b""
        return caught.value


def memfds(*numbers: int) -> pb.Register:
    return pb.Register(allocations=[pb.Allocation(own_fd=number, size=1) for number in numbers])


async def test_a_connection_that_has_ended_meanwhile_admits_nobody(connection: socket.socket) -> None:
    bench = Bench(connection)
    with pytest.raises(UnknownPeer):
        await bench.clients.admit("unix-abstract:another", pb.Register())
    connection.close()
    assert isinstance(await bench.refused(pb.Register()), UnknownPeer)


@pytest.mark.usefixtures("old_kernel")
async def test_another_process_that_has_the_number_by_now_is_not_taken_for_the_client(
    connection: socket.socket,
) -> None:
    """This process began long after a connection that was accepted at the boot."""
    assert "has ended" in str(await Bench(connection, at=0.0).refused(pb.Register()))
    nobody = 1 << 22
    assert "has ended" in str(await Bench(connection, pid=nobody).refused(pb.Register()))
    client = await Bench(connection).clients.admit("unix-abstract:name", pb.Register())
    client.end()


@pytest.mark.usefixtures("old_kernel")
async def test_no_descriptor_is_taken_of_a_process_that_only_its_number_names(connection: socket.socket) -> None:
    error = await Bench(connection).refused(memfds(connection.fileno()))
    assert isinstance(error, ImportRefused)
    assert "Linux 6.5" in str(error)


@pytest.mark.usefixtures("old_kernel")
async def test_a_client_without_a_number_here_is_admitted_and_its_connection_tells_its_end(
    connection: socket.socket,
) -> None:
    bench = Bench(connection, pid=0)
    (await bench.clients.admit("unix-abstract:name", pb.Register())).end()
    assert len(bench.gone) == 1


async def test_a_client_whose_process_ends_has_gone_though_its_stream_goes_on(
    connection: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a child of it has the connection."""
    pidfd = os.eventfd(0)  # becomes readable when the test says so
    monkeypatch.setattr(peers, "kernel_pidfd", lambda _: os.dup(pidfd))
    bench = Bench(connection)
    client = await bench.clients.admit("unix-abstract:name", pb.Register())
    await asyncio.sleep(0)
    assert not bench.gone
    os.eventfd_write(pidfd, 1)
    await eventually_in_loop(lambda: bench.gone)
    client.end()
    os.close(pidfd)


async def test_clients_count_as_those_of_the_attach_socket_do_and_give_all_back(connection: socket.socket) -> None:
    bench = Bench(connection)
    room = int(TABLE_SHARE * 400 / CONNECTION_FDS / 2)
    clients = [await bench.clients.admit("unix-abstract:name", pb.Register()) for _ in range(room)]
    assert isinstance(await bench.refused(pb.Register()), LimitExceeded)
    for each in clients:
        each.end()
    assert len(bench.gone) == room
    for _ in range(room):
        await bench.refused(memfds(1 << 20))
    assert [await bench.clients.admit("unix-abstract:name", pb.Register()) for _ in range(room)]


async def test_descriptors_beyond_the_limit_are_refused_before_they_fill_the_table(connection: socket.socket) -> None:
    numbers = [os.memfd_create("one") for _ in range(150)]
    bench = Bench(connection)
    assert isinstance(await bench.refused(memfds(*numbers)), LimitExceeded)
    first = memfds(*numbers[:2], *numbers[:2] * 100)
    client = await bench.clients.admit("unix-abstract:name", first)
    assert [each.fd_index for each in first.allocations] == [0, 1, *[0, 1] * 100], "one is taken once"
    client.end()
    for each in numbers:
        os.close(each)
