"""Relays in front of gRPC leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from benchmarks.attacks.http2_client import END_HEADERS, HEADERS, PREFACE, SETTINGS, frame, request
from kvsidecar.errors import Refusal
from kvsidecar.server import grpc_front
from kvsidecar.server.grpc_front import GrpcFront
from kvsidecar.server.grpc_server import unix_listener
from kvsidecar.server.http2_frames import CANCEL, reset
from kvsidecar.server.http2_gate import CALLS_AT_ONCE, MESSAGE_SECONDS
from kvsidecar.server.socket_files import SocketFiles
from kvsidecar.support.tasks import TaskSet
from kvsidecar.support.turns import Turns
from tests.harness import eventually_in_loop

CLIENTS = 20
CALLS = 3 * CALLS_AT_ONCE
STREAMS = [2 * number + 1 for number in range(CALLS)]


@asynccontextmanager
async def served(directory: Path, refused: Callable[[Refusal], None] = lambda _: None) -> AsyncIterator[GrpcFront]:
    """Relays on ``kvs.sock`` in front of a server that accepts connections and reads nothing."""
    tasks, turns = TaskSet(lambda name, error: None), Turns()
    front = GrpcFront(grpc_front.LIMITS, refused, tasks, turns)
    unix = unix_listener(SocketFiles(directory / "kvs.sock", mode=0o600, gid=None), front, tasks, turns)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{directory}/server")
        server.listen(CLIENTS)
        front.start(f"{directory}/server")
        unix.start()
        yield front
    unix.stop()
    front.close()
    await tasks.cancel()


def begun(client: socket.socket, directory: Path, calls: Sequence[int] = ()) -> None:
    """Connect, and begin the calls of these streams."""
    client.connect(f"{directory}/kvs.sock")
    client.send(PREFACE + frame(SETTINGS) + b"".join(frame(HEADERS, each, request(), END_HEADERS) for each in calls))


async def test_a_connection_that_is_over_leaves_nothing_for_the_garbage_collector(short_dir: Path) -> None:
    """A collection holds up the event loop the longer, the more there is to collect."""
    async with served(short_dir) as front:
        gc.collect()
        gc.disable()
        try:
            clients = [socket.socket(socket.AF_UNIX) for _ in range(CLIENTS)]
            for client in clients:
                begun(client, short_dir)
            await eventually_in_loop(lambda: len(front.relays) == CLIENTS)
            for client in clients:
                client.close()
            await eventually_in_loop(lambda: not front.relays)
            await asyncio.sleep(0)
            left = [each for each in gc.get_objects() if isinstance(each, grpc_front._Relay | grpc_front.End)]
            assert not left
        finally:
            gc.enable()


async def test_the_calls_of_a_connection_that_closes_end_before_it_in_several_turns_of_the_loop(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC would end all of them in one."""
    turn, sent, loop = 0, list[tuple[int, bytes]](), asyncio.get_running_loop()
    send = grpc_front.End.send

    def tick() -> None:
        nonlocal turn
        turn += 1
        loop.call_soon(tick)

    def noted(end: grpc_front.End, data: bytes) -> None:
        sent.append((turn, data))
        send(end, data)

    async with served(short_dir) as front:
        with socket.socket(socket.AF_UNIX) as client:
            begun(client, short_dir, STREAMS)
            await eventually_in_loop(lambda: front.quotas.calls.held == CALLS)
            tick()
            monkeypatch.setattr(grpc_front.End, "send", noted)
        await eventually_in_loop(lambda: not front.relays)
        ends = [(turn, data) for turn, data in sent if data]
        assert front.quotas.calls.held == 0
        assert len(ends) == len({turn for turn, _ in ends}) == CALLS // CALLS_AT_ONCE - 1, "the last ones end with it"
        assert b"".join(data for _, data in ends) == b"".join(reset(each, CANCEL) for each in STREAMS[:-CALLS_AT_ONCE])


async def test_calls_that_are_late_end_a_few_at_a_time(short_dir: Path) -> None:
    refused: list[Refusal] = []
    async with served(short_dir, refused.append) as front:
        with socket.socket(socket.AF_UNIX) as client:
            begun(client, short_dir, STREAMS)
            await eventually_in_loop(lambda: front.quotas.calls.held == CALLS)
            (relay,) = front.relays
            for _ in range(MESSAGE_SECONDS + 1):
                relay.second()
            assert not refused
            assert [relay.end_late() for _ in range(4)] == [CALLS_AT_ONCE] * 3 + [0]
            assert (front.quotas.calls.held, refused) == (0, [Refusal.UNFINISHED] * CALLS)


@pytest.mark.parametrize("end", ["reset", "close"])
async def test_a_user_pays_for_calls_that_it_gives_up_on_whichever_of_its_connections(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """By time that it waits. Each connection alone keeps to its bound, and there are ever new ones."""
    paid: defaultdict[Hashable, float] = defaultdict(float)
    async with served(short_dir) as front:
        charge = front.turns.charge

        def noted(user: Hashable, seconds: float) -> None:
            paid[user] += seconds
            charge(user, seconds)

        monkeypatch.setattr(front.turns, "charge", noted)
        for number in range(1, 4):
            with socket.socket(socket.AF_UNIX) as client:
                begun(client, short_dir, STREAMS)
                await eventually_in_loop(lambda: front.quotas.calls.held == CALLS)
                if end == "reset":
                    client.send(b"".join(reset(each, CANCEL) for each in STREAMS))
                    await eventually_in_loop(lambda: front.quotas.calls.held == 0)
            await eventually_in_loop(lambda: not front.relays)
            least = number * (CALLS * grpc_front.GIVEN_UP_SECONDS + grpc_front.BEGIN_SECONDS)
            assert least <= paid[os.getuid()] < 2 * least


async def test_connections_whose_clients_have_gone_are_over_without_a_call_and_without_a_wait(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a flood held their descriptors for a minute after its end, each until its calls were paid for."""
    paid: list[float] = []
    over: list[object] = []
    async with served(short_dir) as front:
        ended = front.ended
        monkeypatch.setattr(front, "ended", lambda relay: (over.append(relay), ended(relay)))
        monkeypatch.setattr(front.turns, "charge", lambda _, seconds: paid.append(seconds))
        for _ in range(CLIENTS):
            with socket.socket(socket.AF_UNIX) as client:
                begun(client, short_dir, STREAMS)
        await eventually_in_loop(lambda: len(over) == CLIENTS)
        assert (front.relays, front.quotas.calls.held) == (set(), 0)
        assert max(paid) < grpc_front.BEGIN_SECONDS, "more than to accept a connection was paid"
