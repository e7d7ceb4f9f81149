"""Relays in front of gRPC leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvsidecar.server import grpc_front
from kvsidecar.server.grpc_front import GrpcFront
from kvsidecar.server.socket_files import SocketFiles
from kvsidecar.server.unix_front import UnixFront
from kvsidecar.support.tasks import TaskSet
from kvsidecar.support.turns import Turns
from tests.attacks.http2_client import PREFACE, SETTINGS, frame
from tests.harness import eventually_in_loop

CLIENTS = 20
MANY = 4 * grpc_front.SECOND_STEP


@asynccontextmanager
async def front_of(directory: Path, clients: int) -> AsyncIterator[tuple[GrpcFront, list[socket.socket]]]:
    """With so many connections, which have begun."""
    tasks = TaskSet(lambda name, error: None)
    turns = Turns()
    front = GrpcFront(grpc_front.LIMITS, lambda _: None, tasks, turns)
    unix = UnixFront(SocketFiles(directory / "kvs.sock", mode=0o600, group=None), front, tasks, turns)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{directory}/server")
        server.listen(clients)
        front.start(f"{directory}/server")
        unix.listen()
        connections = [socket.socket(socket.AF_UNIX) for _ in range(clients)]
        for client in connections:
            client.connect(f"{directory}/kvs.sock")
            client.send(PREFACE + frame(SETTINGS))
        await eventually_in_loop(lambda: len(front._relays) == clients)
        yield front, connections
        for client in connections:
            client.close()
        unix.stop_listening()
        front.close()
        await tasks.cancel()


async def test_a_connection_that_is_over_leaves_nothing_for_the_garbage_collector(short_dir: Path) -> None:
    """A collection holds up the event loop the longer, the more there is to collect."""
    gc.collect()
    gc.disable()
    try:
        async with front_of(short_dir, CLIENTS) as (front, clients):
            for client in clients:
                client.close()
            await eventually_in_loop(lambda: not front._relays)
            await asyncio.sleep(0)
            left = [each for each in gc.get_objects() if isinstance(each, grpc_front._Relay | grpc_front.End)]
            assert not left
    finally:
        gc.enable()


async def test_the_time_limits_of_many_connections_are_looked_at_in_many_turns_of_the_loop(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lookup would wait for all of them."""
    turn, looked_at = 0, Counter[int]()
    second, loop = grpc_front._Relay.second, asyncio.get_running_loop()

    def next_turn() -> None:
        nonlocal turn
        turn += 1
        if looked_at.total() < MANY:
            loop.call_soon(next_turn)

    def counted(relay: grpc_front._Relay) -> None:
        if not looked_at:
            next_turn()
        looked_at[turn] += looked_at.total() < MANY
        second(relay)

    monkeypatch.setattr(grpc_front._Relay, "second", counted)
    async with front_of(short_dir, MANY):
        await eventually_in_loop(lambda: looked_at.total() >= MANY)
    assert max(looked_at.values()) <= grpc_front.SECOND_STEP
