"""Who may connect, and what one connection may subscribe to."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvsidecar.errors import InvalidRequest
from kvsidecar.publisher import endpoint
from kvsidecar.publisher.endpoint import (
    MAX_SUBSCRIPTION_BYTES,
    MAX_SUBSCRIPTIONS,
    Endpoint,
    Handler,
    RouterConnection,
    frames,
)
from kvsidecar.publisher.metrics import PublisherMetrics
from kvsidecar.support import peer
from tests.harness import eventually_in_loop


async def until_it_is_gone(connection: RouterConnection) -> None:
    await frames(connection, lambda _: None)


@asynccontextmanager
async def serving(directory: Path, option: str, handler: Handler, metrics: PublisherMetrics) -> AsyncIterator[Endpoint]:
    served = Endpoint(option, f"ipc://{directory}/x", b"ROUTER" if option == "replay" else b"XPUB", handler, metrics)
    task = asyncio.ensure_future(served.run())
    yield served
    task.cancel()
    await asyncio.wait([task])
    served.close()


def connect(directory: Path, count: int) -> list[socket.socket]:
    socks = [socket.socket(socket.AF_UNIX) for _ in range(count)]
    for each in socks:
        each.connect(f"{directory}/x")
    return socks


async def wait_refused(metrics: PublisherMetrics, endpoint: str, reason: str) -> None:
    labels, name = {"endpoint": endpoint, "reason": reason}, "kvsidecar_publisher_refusals_total"
    await eventually_in_loop(lambda: metrics.registry.get_sample_value(name, labels) == 1)


def test_subscriptions_of_one_connection_are_bounded_and_given_back() -> None:
    with socket.socket() as sock:
        one = RouterConnection(sock, 0)
        for number in range(MAX_SUBSCRIPTIONS):
            one.subscribe(b"%d" % number)
        one.subscribe(b"0")  # again
        with pytest.raises(InvalidRequest):
            one.subscribe(b"more")
        other = RouterConnection(sock, 0)
        for _ in range(1000):
            other.subscribe(bytes(MAX_SUBSCRIPTION_BYTES))
            other.unsubscribe(bytes(MAX_SUBSCRIPTION_BYTES))
        assert not other.wants(b"x")
        other.subscribe(b"kv@")
        assert other.wants(b"kv@n1@m")


async def test_connections_of_one_user_are_bounded_and_given_back(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "MAX_CONNECTIONS_EACH", 3)
    async with serving(short_dir, "bind", until_it_is_gone, PublisherMetrics()) as served:
        socks = connect(short_dir, 5)
        await eventually_in_loop(lambda: len(served) == 3)
        for each in socks:
            each.close()
        await eventually_in_loop(lambda: len(served) == 0)
    assert "x" not in os.listdir(short_dir)


async def test_a_router_that_does_not_read_is_refused_for_it(short_dir: Path) -> None:
    async def serve(connection: RouterConnection) -> None:
        await connection.send([bytes(1 << 24)], 0.01)

    metrics = PublisherMetrics()
    async with serving(short_dir, "replay", serve, metrics) as served:
        (sock,) = connect(short_dir, 1)
        with sock:
            await wait_refused(metrics, "replay", "unread")
            await eventually_in_loop(lambda: len(served) == 0)


async def test_when_the_endpoint_is_full_whoever_has_most_loses_one_which_is_counted(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "MAX_CONNECTIONS", 2)
    monkeypatch.setattr(peer, "credentials", lambda sock: SimpleNamespace(uid=next(uids)))
    uids, metrics = iter([1, 1, 2]), PublisherMetrics()
    async with serving(short_dir, "bind", until_it_is_gone, metrics) as served:
        socks = connect(short_dir, 3)
        await wait_refused(metrics, "bind", "full")
        assert sorted(each.who for each in served._connections) == [1, 2]  # type: ignore[type-var]
        for each in socks:
            each.close()
