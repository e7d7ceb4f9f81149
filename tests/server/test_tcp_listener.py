"""At which addresses a TCP port is listened, whose connections are accepted, and whose turn it is."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from kvsidecar.server.tcp_listener import SocketOptions, TcpListener
from kvsidecar.server.tcp_turns import BURST, CONNECTION_EVERY, RATE, TcpTurns
from kvsidecar.support import log
from kvsidecar.support import tasks as task_sets
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

    listener = TcpListener(accepted, SocketOptions(65536, 65536), TcpTurns(), tasks, log.limited("test"))
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


async def test_each_has_an_iteration_of_its_own() -> None:
    turns, iterations, found = TcpTurns(), 0, []
    for number in range(BURST // 2):
        turns.take(lambda number=number: found.append((number, iterations)))  # type: ignore[misc]
    while len(found) < BURST // 2:
        iterations += 1
        await asyncio.sleep(0)
    assert [number for number, _ in found] == list(range(BURST // 2)), "not in order"
    assert len({iteration for _, iteration in found}) == BURST // 2, "several in one iteration"


async def test_a_flood_is_spread_over_time() -> None:
    turns, loop = TcpTurns(), asyncio.get_running_loop()
    count = BURST + 100
    began = loop.time()
    for _ in range(count - 1):
        turns.take(lambda: None)
    await turns.wait()
    assert loop.time() - began >= 0.9 * (count - BURST) / RATE


async def test_new_connections_are_not_kept_out() -> None:
    turns, found = TcpTurns(), []
    for _ in range(40):
        turns.take(lambda: found.append("request"))
    for _ in range(3):
        turns.take(lambda: found.append("connection"), connection=True)
    await turns.wait()
    assert [index for index, what in enumerate(found, 1) if what == "connection"] == [
        CONNECTION_EVERY * each for each in (1, 2, 3)
    ]


async def test_who_does_not_wait_any_more_is_passed_over() -> None:
    turns = TcpTurns()
    gone = asyncio.ensure_future(turns.wait())
    await asyncio.sleep(0)
    gone.cancel()
    await turns.wait()


async def test_what_fails_keeps_nobody_from_a_turn() -> None:
    turns, errors = TcpTurns(), []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))
    turns.take(lambda: 1 // 0)
    await turns.wait()
    assert [type(error) for error in errors] == [ZeroDivisionError]


async def test_an_error_that_nobody_expects_ends_one_connection_and_not_the_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(task_sets, "AGAIN_SECONDS", 0.0)
    errors: list[str] = []
    tasks = TaskSet(lambda name, error: errors.append(f"{name}: {error}"))
    taken = asyncio.Event()

    async def accepted(connection: socket.socket, _address: Any) -> None:
        if not errors:
            raise ValueError("planned")
        connection.close()
        taken.set()

    listener = TcpListener(accepted, SocketOptions(65536, 65536), TcpTurns(), tasks, log.limited("test"))
    port = await listener.start("127.0.0.1", 0)
    for _ in range(2):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await asyncio.wait_for(reader.read(), SECONDS) == b""
        writer.close()
    await asyncio.wait_for(taken.wait(), SECONDS)
    assert errors == ["tcp-accept: planned"]
    await listener.close()
    await tasks.cancel()
