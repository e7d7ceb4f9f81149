"""The attach socket: what many connections cause at once is spread over the iterations of the event loop."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from kvsidecar.core.peer import Peer
from kvsidecar.core.sessions import Instances
from kvsidecar.errors import Refusal
from kvsidecar.protocol.framing import frame
from kvsidecar.server import attach_socket
from kvsidecar.server.attach_socket import AttachSocket
from kvsidecar.server.handler import Handler
from kvsidecar.server.local_protocol import LocalConnection, unread_replies
from kvsidecar.server.partial_messages import PartialMessages
from kvsidecar.server.socket_files import SocketFiles
from kvsidecar.support.loop_time import SECONDS, LoopTime
from kvsidecar.support.tasks import TaskSet
from kvsidecar.support.turns import Turns
from kvsidecar.types import PROTOCOL
from kvsidecar.v1 import sidecar_pb2 as pb
from tests import harness
from tests.harness import eventually_in_loop

CLIENTS = 60
STEPS = 4
"""In one iteration of the loop, with the clock of these tests."""


class Peers:
    """Instead of `Instances`."""

    def add_peer(self, *_: Any, **__: Any) -> Any:
        class Peer:
            token = b"token"

        return Peer()


def local(peer: Peer) -> LocalConnection:
    """For clients that ask for nothing."""
    return LocalConnection(cast(Handler, None), PartialMessages(), unread_replies(), peer)


class Bench:
    def __init__(self, directory: Path, local_connection: Callable[[Peer], LocalConnection] | None = None) -> None:
        ticks = itertools.count()
        # Each step takes a part of an iteration, however long it takes.
        self.turns = Turns(LoopTime(lambda: next(ticks) * SECONDS / STEPS))
        self.in_iteration: Counter[int] = Counter()
        """Refusals and ends, by the iteration of the loop."""
        self.iteration = 0
        self.refused: Counter[Refusal] = Counter()
        self.tasks = TaskSet(lambda name, error: None)
        self.socket = AttachSocket(
            SocketFiles(directory / "kvs.sock", mode=0o600, gid=None),
            epoch=1,
            instances=cast(Instances, Peers()),
            on_gone=lambda _: self.count(),
            local_connection=local_connection,
            refuse=self.refuse,
            tasks=self.tasks,
            turns=self.turns,
        )
        self.path = f"{directory}/kvs.sock.attach"
        self.socket.start()
        self._tick()

    def _tick(self) -> None:
        self.iteration += 1
        asyncio.get_running_loop().call_soon(self._tick)

    def count(self) -> None:
        self.in_iteration[self.iteration] += 1

    def refuse(self, reason: Refusal) -> None:
        self.refused[reason] += 1
        self.count()

    def connect(self, data: bytes) -> list[socket.socket]:
        clients = []
        for _ in range(CLIENTS):
            client = socket.socket(socket.AF_UNIX)
            client.connect(self.path)
            client.send(data)
            clients.append(client)
        return clients

    async def close(self) -> None:
        await self.socket.stop()
        await self.tasks.cancel()


async def until(condition: Callable[[], object]) -> None:
    await eventually_in_loop(condition)


async def test_hellos_that_are_late_at_once_are_refused_in_turns(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach_socket, "HELLO_SECONDS", 0.5)
    bench = Bench(short_dir)
    clients = bench.connect(b"\x01")
    await until(lambda: bench.refused[Refusal.UNFINISHED] == CLIENTS)
    assert max(bench.in_iteration.values()) <= STEPS, "several turns in one iteration of the loop"
    for client in clients:
        assert b"no Hello was complete" in client.recv(1000)
        client.close()
    await bench.close()


async def test_connections_that_end_at_once_are_cleaned_up_in_turns(short_dir: Path) -> None:
    bench = Bench(short_dir)
    clients = bench.connect(frame(pb.Hello(protocol=PROTOCOL).SerializeToString()))
    for client in clients:
        assert await asyncio.get_running_loop().run_in_executor(None, client.recv, 1000)
    for client in clients:
        client.close()
    await until(lambda: bench.in_iteration.total() == CLIENTS)
    assert not bench.refused
    assert max(bench.in_iteration.values()) <= STEPS, "several turns in one iteration of the loop"
    await bench.close()


async def test_clients_that_have_gone_before_their_welcome_are_cleaned_up_once_and_refused_nothing(
    short_dir: Path,
) -> None:
    bench = Bench(short_dir)
    for client in bench.connect(frame(pb.Hello(protocol=PROTOCOL).SerializeToString())):
        client.close()
    await until(lambda: bench.in_iteration.total() and not bench.socket.connections)
    assert bench.in_iteration.total() == CLIENTS
    assert not bench.refused
    await bench.close()


async def test_clients_whose_hello_is_refused_are_told_why_once_and_are_no_peers(short_dir: Path) -> None:
    bench = Bench(short_dir)
    clients = bench.connect(frame(pb.Hello(protocol=PROTOCOL + 1).SerializeToString()))
    await until(lambda: bench.refused.total() == CLIENTS and not bench.socket.connections)
    for client in clients:
        assert f"the client {PROTOCOL + 1}".encode() in client.recv(1000)
        assert not client.recv(1000)
        client.close()
    assert bench.in_iteration.total() == CLIENTS, "also told that a peer has gone"
    await bench.close()


async def test_a_daemon_that_stops_ends_each_connection_once(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach_socket, "HELLO_SECONDS", 600.0)
    bench = Bench(short_dir)
    silent = bench.connect(b"\x01")
    served = bench.connect(frame(pb.Hello(protocol=PROTOCOL).SerializeToString()))
    for client in served:
        assert await asyncio.get_running_loop().run_in_executor(None, client.recv, 1000)
    await until(lambda: len(bench.socket.connections) == 2 * CLIENTS)
    await bench.socket.stop()
    await until(lambda: not bench.socket.connections)
    assert dict(bench.refused) == {Refusal.INVALID_REQUEST: CLIENTS}
    assert bench.in_iteration.total() == 2 * CLIENTS
    for client in [*silent, *served]:
        client.close()
    await bench.close()


async def test_an_end_that_is_noticed_in_several_ways_is_one_end(short_dir: Path) -> None:
    """By the connection, the pidfd and the local protocol, also after it."""
    bench = Bench(short_dir)
    clients = bench.connect(frame(pb.Hello(protocol=PROTOCOL).SerializeToString()))
    for client in clients:
        assert await asyncio.get_running_loop().run_in_executor(None, client.recv, 1000)
    connections = tuple(bench.socket.connections)
    for connection in connections * 2:
        connection.gone()
    await until(lambda: not bench.socket.connections)
    for connection in connections:
        connection.gone()
    turn = asyncio.get_running_loop().create_future()
    bench.turns.take("after them", lambda: turn.set_result(None))
    await turn
    assert bench.in_iteration.total() == CLIENTS
    for client in clients:
        client.close()
    await bench.close()


async def test_a_connection_that_has_ended_is_closed_whoever_holds_its_other_end(short_dir: Path) -> None:
    bench = Bench(short_dir, local)
    clients = bench.connect(frame(pb.Hello(protocol=PROTOCOL).SerializeToString()))
    for client in clients:
        client.settimeout(harness.SECONDS)
        assert await asyncio.get_running_loop().run_in_executor(None, client.recv, 1000)
    for connection in tuple(bench.socket.connections):
        connection.gone()  # as when the pidfd of its process is readable
    for client in clients:
        assert not await asyncio.get_running_loop().run_in_executor(None, client.recv, 1000), "it is open"
        client.close()
    assert not bench.socket.connections
    await bench.close()
