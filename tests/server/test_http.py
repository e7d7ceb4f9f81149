"""Long answers of the HTTP port: whole to who reads, not kept for who does not, and shared."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvsidecar.core.metrics import Metrics
from kvsidecar.core.readiness import DaemonReadiness
from kvsidecar.errors import Refusal
from kvsidecar.server import http, http_connection
from kvsidecar.server.http import Probes, Sources
from kvsidecar.server.renderings import Steps
from kvsidecar.support.addresses import at
from kvsidecar.support.tasks import TaskSet
from tests.harness import eventually_in_loop
from tests.open_files import open_files

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
        self.text = LONG
        self.begun = 0
        """How many answers were asked for."""

    def status(self) -> Steps:
        self.begun += 1
        yield
        return self.text

    async def ask(self, method: str = "GET") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(f"{method} /status HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        return reader, writer

    def keep_little(self) -> None:
        """Of what the next clients do not read, in the kernel."""
        for listener in self.probes._server._listener._listeners:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

    async def unread(self, request: bytes) -> socket.socket:
        """A connection whose client reads nothing, also not what would wait in its own memory."""
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", self.port))
        client.send(request)
        return client

    async def is_cut(self, client: socket.socket, nbytes: int) -> bool:
        """Whether it ends before so many bytes."""
        received = 0
        try:
            while received < nbytes and (data := await asyncio.get_running_loop().sock_recv(client, 1 << 20)):
                received += len(data)
        except ConnectionResetError:
            pass
        return received < nbytes


def sockets() -> int:
    """How many are open in this process, of clients and of the server."""
    return sum(each.startswith("socket:") for each in open_files(os.getpid()).values())


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
        writer.write({"GET": b"HEAD", "HEAD": b"GET"}[method] + b" /status HTTP/1.1\r\nHost: localhost\r\n\r\n")
    writer.close()


async def test_who_does_not_read_a_long_answer_is_ended(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "CLIENT_SECONDS", 0.2)
    before = sockets()
    hanging = [await served.ask() for _ in range(10)]
    await eventually_in_loop(lambda: served.metrics.refusal_counts().get(Refusal.UNFINISHED.value) == len(hanging))
    await eventually_in_loop(lambda: sockets() == before + len(hanging))
    for reader, writer in hanging:
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await reader.readexactly(len(LONG))
        writer.close()


async def test_who_does_not_read_the_last_answer_is_ended_although_all_is_said(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what is sent last, the rest is kept by the transport, which waits for its client to read before it closes."""
    monkeypatch.setattr(http_connection, "CLIENT_SECONDS", 0.2)
    monkeypatch.setattr(served, "text", LONG[:60_000])
    served.keep_little()
    before = sockets()
    hanging = [await served.unread(b"GET /status HTTP/1.0\r\n\r\n") for _ in range(10)]
    await eventually_in_loop(lambda: served.metrics.refusal_counts().get(Refusal.UNFINISHED.value) == len(hanging))
    await eventually_in_loop(lambda: sockets() == before + len(hanging))
    for client in hanging:
        client.close()


async def test_of_clients_that_do_not_read_no_more_are_kept_than_may_be(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connection, "MAX_CONNECTIONS", 8)
    for module in (http, http_connection):
        monkeypatch.setattr(module, "CLIENT_SECONDS", 600.0)
    hanging, before = [], sockets()
    for number in range(1, 25):
        hanging.append(await served.unread(b"GET /status HTTP/1.1\r\nHost: localhost\r\n\r\n"))
        await eventually_in_loop(lambda begun=number: served.begun == begun)
    assert served.metrics.refusal_counts() == {Refusal.LIMIT.value: 16}
    await eventually_in_loop(lambda: sockets() == before + len(hanging) + 8)
    for number, client in enumerate(hanging):
        assert await served.is_cut(client, len(LONG)) == (number < 16), number
        client.close()


async def test_its_end_ends_who_does_not_read(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (http, http_connection):  # a daemon that stops does not wait for as long
        monkeypatch.setattr(module, "CLIENT_SECONDS", 600.0)
    hanging = [await served.ask() for _ in range(10)]
    await asyncio.wait_for(served.probes.stop(), 60)
    for _, writer in hanging:
        writer.close()


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:9", 200), ("[::1]:9", 200), ("localhost", 200), ("x.localhost:9", 200), ("10.1.2.3", 200),
        (socket.gethostname(), 200), (None, 200), ("rebound.example:9", 421), ("localhost.example", 421),
    ],
)  # fmt: skip
async def test_at_a_loopback_address_only_this_machine_is_asked(served: Served, host: str | None, status: int) -> None:
    """A page may have a browser ask for a name of its own, which leads here."""
    served.text = b"{}"
    client = await served.unread(b"GET /status HTTP/1.0\r\n" + (f"Host: {host}\r\n" if host else "").encode() + b"\r\n")
    assert (await asyncio.get_running_loop().sock_recv(client, 4096)).startswith(f"HTTP/1.0 {status} ".encode())
    client.close()


def test_an_address_of_ipv6_has_brackets_in_a_url() -> None:
    assert [at(host, 80) for host in ("::1", "127.0.0.1", "here")] == ["[::1]:80", "127.0.0.1:80", "here:80"]


async def test_the_page_stays_when_the_package_is_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("index.html", "page.css", "page.js"):
        (tmp_path / name).write_text(f"the first {name}")
    monkeypatch.setattr(http, "PAGE", tmp_path)
    probes = Probes(DaemonReadiness(0), TaskSet(lambda *_: None), page=True)
    port = await probes.start("127.0.0.1", 0)
    for name in ("index.html", "page.css", "page.js"):
        (tmp_path / name).unlink()
    for path, name in (("/", "index.html"), ("/page.css", "page.css"), ("/page.js", "page.js")):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        answer = (await reader.read()).decode()
        assert answer.startswith("HTTP/1.1 200 "), path
        assert answer.endswith(f"the first {name}")
        writer.close()
    await probes.stop()
