"""Who may connect, and what one connection may subscribe to."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvsidecar.errors import InvalidRequest
from kvsidecar.publisher import endpoint
from kvsidecar.publisher.endpoint import MAX_SUBSCRIPTION_BYTES, MAX_SUBSCRIPTIONS, Connection, Endpoint, frames
from kvsidecar.publisher.metrics import Metrics
from kvsidecar.support import peer
from tests.harness import eventually_in_loop


def test_subscriptions_of_one_connection_are_bounded_and_given_back() -> None:
    with socket.socket() as sock:
        one = Connection(sock, 0)
        for number in range(MAX_SUBSCRIPTIONS):
            one.subscribe(b"%d" % number)
        one.subscribe(b"0")  # again
        with pytest.raises(InvalidRequest):
            one.subscribe(b"more")
        other = Connection(sock, 0)
        for _ in range(1000):
            other.subscribe(bytes(MAX_SUBSCRIPTION_BYTES))
            other.unsubscribe(bytes(MAX_SUBSCRIPTION_BYTES))
        assert not other.wants(b"x")
        other.subscribe(b"kv@")
        assert other.wants(b"kv@n1@m")


def test_connections_of_one_user_are_bounded_and_given_back(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "MAX_CONNECTIONS_EACH", 3)

    async def serve(connection: Connection) -> None:
        await frames(connection, lambda _: None)

    async def check() -> None:
        served = Endpoint("bind", f"ipc://{short_dir}/x", b"XPUB", serve, Metrics())
        task = asyncio.ensure_future(served.run())
        socks = [socket.socket(socket.AF_UNIX) for _ in range(5)]
        for each in socks:
            each.connect(f"{short_dir}/x")
        await eventually_in_loop(lambda: len(served) == 3)
        for each in socks:
            each.close()
        await eventually_in_loop(lambda: len(served) == 0)
        task.cancel()
        await asyncio.wait([task])
        served.close()

    asyncio.run(check())
    assert not Path(short_dir, "x").exists()


def test_a_router_that_does_not_read_is_refused_for_it(short_dir: Path) -> None:
    metrics = Metrics()

    async def serve(connection: Connection) -> None:
        await connection.send([bytes(1 << 24)], 0.01)

    async def check() -> None:
        served = Endpoint("replay", f"ipc://{short_dir}/x", b"ROUTER", serve, metrics)
        task = asyncio.ensure_future(served.run())
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(f"{short_dir}/x")
            labels = {"endpoint": "replay", "reason": "unread"}
            name = "kvsidecar_publisher_refusals_total"
            await eventually_in_loop(lambda: metrics.registry.get_sample_value(name, labels) == 1)
            await eventually_in_loop(lambda: len(served) == 0)
        task.cancel()
        await asyncio.wait([task])
        served.close()

    asyncio.run(check())


def test_when_the_endpoint_is_full_whoever_has_most_loses_one_which_is_counted(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "MAX_CONNECTIONS", 2)
    monkeypatch.setattr(peer, "credentials", lambda sock: SimpleNamespace(uid=next(uids)))
    uids, metrics = iter([1, 1, 2]), Metrics()

    async def serve(connection: Connection) -> None:
        await frames(connection, lambda _: None)

    async def check() -> None:
        served = Endpoint("bind", f"ipc://{short_dir}/x", b"XPUB", serve, metrics)
        task = asyncio.ensure_future(served.run())
        socks = [socket.socket(socket.AF_UNIX) for _ in range(3)]
        for each in socks:
            each.connect(f"{short_dir}/x")
        labels = {"endpoint": "bind", "reason": "full"}
        name = "kvsidecar_publisher_refusals_total"
        await eventually_in_loop(lambda: metrics.registry.get_sample_value(name, labels) == 1)
        assert sorted(each.who for each in served._connections) == [1, 2]  # type: ignore[type-var]
        for each in socks:
            each.close()
        task.cancel()
        await asyncio.wait([task])
        served.close()

    asyncio.run(check())
