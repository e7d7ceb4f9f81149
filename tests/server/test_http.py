"""Long answers of the HTTP port: whole to who reads, not kept for who does not, and shared."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvsidecar.core.metrics import Metrics
from kvsidecar.core.readiness import DaemonReadiness
from kvsidecar.errors import Refusal
from kvsidecar.server import http, http_connection
from kvsidecar.server.http import Probes, Sources
from kvsidecar.server.renderings import Steps
from kvsidecar.support.tasks import TaskSet
from tests.harness import eventually_in_loop

LONG = b"0123456789abcdef" * (1 << 20)
"""More than sockets take."""


class Served:
    """A server whose /status is `LONG`."""

    def __init__(self) -> None:
        self.metrics = Metrics("host")
        self.errors: list[BaseException] = []
        self.probes = Probes(DaemonReadiness(0), TaskSet(lambda _, error: self.errors.append(error)))
        self.probes.answer_from(Sources(self.metrics, lambda: None, self.status, dict))
        self.port = 0

    def status(self) -> Steps:
        yield
        return LONG

    async def ask(self, method: str = "GET") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(f"{method} /status HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        return reader, writer


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    found = Served()
    found.port = await found.probes.start("127.0.0.1", 0)
    yield found
    await found.probes.stop()
    assert not found.errors


async def test_a_long_answer_is_whole_and_its_head_alone(served: Served) -> None:
    reader, writer = await served.ask()
    for method in ("GET", "HEAD", "GET"):
        head = await reader.readuntil(b"\r\n\r\n")
        assert f"Content-Length: {len(LONG)}\r\n".encode() in head
        assert b"nosniff" in head
        if method == "GET":
            assert await reader.readexactly(len(LONG)) == LONG
        writer.write({"GET": b"HEAD", "HEAD": b"GET"}[method] + b" /status HTTP/1.1\r\nHost: x\r\n\r\n")
    writer.close()


async def test_who_does_not_read_a_long_answer_is_ended(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "CLIENT_SECONDS", 0.2)
    hanging = [await served.ask() for _ in range(10)]
    await eventually_in_loop(lambda: served.metrics.refusal_counts().get(Refusal.UNFINISHED.value) == len(hanging))
    for reader, writer in hanging:
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await reader.readexactly(len(LONG))
        writer.close()


async def test_its_end_ends_who_does_not_read(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (http, http_connection):  # a daemon that stops does not wait for as long
        monkeypatch.setattr(module, "CLIENT_SECONDS", 600.0)
    hanging = [await served.ask() for _ in range(10)]
    await asyncio.wait_for(served.probes.stop(), 60)
    for _, writer in hanging:
        writer.close()
