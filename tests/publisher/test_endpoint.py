"""Who may connect, and what one connection may subscribe to."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from kvsidecar.errors import InvalidRequest
from kvsidecar.publisher import endpoint
from kvsidecar.publisher.endpoint import MAX_SUBSCRIPTION_BYTES, MAX_SUBSCRIPTIONS, Connection, Endpoint, frames
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
        served = Endpoint("bind", f"ipc://{short_dir}/x", b"XPUB", serve)
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
