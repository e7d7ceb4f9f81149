"""At which addresses a TCP port is listened, and whose connections are accepted."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from kvsidecar.server.tcp_listener import SocketOptions, TcpListener
from kvsidecar.server.tcp_turns import TcpTurns
from kvsidecar.support import log
from kvsidecar.support.tasks import TaskSet
from tests.harness import SECONDS


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return socket.has_dualstack_ipv6()
    except OSError:
        return False


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
@pytest.mark.parametrize("both", [True, False])
async def test_a_wildcard_means_both_families_where_it_should(host: str, *, both: bool) -> None:
    if not _has_ipv6():
        pytest.skip("there is no IPv6")
    arrived: asyncio.Queue[str] = asyncio.Queue()
    errors: list[BaseException] = []
    tasks = TaskSet(lambda _, error: errors.append(error))

    async def accepted(connection: socket.socket, address: Any) -> None:
        connection.close()
        arrived.put_nowait(address[0])

    options = SocketOptions(receive_bytes=65536, send_bytes=65536, both_families=both)
    listener = TcpListener(accepted, options, TcpTurns(), tasks, log.limited("test"))
    port = await listener.start(host, 0)
    reached = set()
    for client in ("127.0.0.1", "::1"):
        try:
            _, writer = await asyncio.open_connection(client, port)
        except ConnectionRefusedError:
            continue
        assert (await arrived.get()).endswith(client)
        reached.add(client)
        writer.close()
    assert reached == ({"127.0.0.1", "::1"} if both else {"127.0.0.1" if host == "0.0.0.0" else "::1"})
    await listener.close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
    await tasks.cancel()
    assert not errors


async def test_a_connection_whose_callee_fails_is_closed_and_others_are_accepted() -> None:
    tasks = TaskSet(lambda _, error: None)
    connections: list[socket.socket] = []
    two = asyncio.Event()

    async def accepted(connection: socket.socket, _address: Any) -> None:
        connections.append(connection)
        if len(connections) == 1:
            raise ConnectionResetError
        two.set()

    listener = TcpListener(accepted, SocketOptions(65536), TcpTurns(), tasks, log.limited("test"))
    port = await listener.start("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    assert await reader.read() == b""
    _, second = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(SECONDS):
        await two.wait()
    assert connections[0].fileno() == -1
    for each in (writer, second):
        each.close()
    connections[1].close()
    await listener.close()
    await tasks.cancel()
