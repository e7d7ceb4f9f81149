"""Serves an aiohttp application on a port, with the limits of `HttpConnection`."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from kvsidecar.errors import Refusal
from kvsidecar.server.aiohttp_server import web
from kvsidecar.server.http_connection import Connections, HttpConnection, before_response, take_turn
from kvsidecar.server.tcp_listener import SocketOptions, TcpListener
from kvsidecar.server.tcp_turns import TcpTurns
from kvsidecar.support import log
from kvsidecar.support.addresses import at, cannot_listen
from kvsidecar.support.tasks import TaskSet

RECEIVE_BYTES = 16 * 1024
"""SO_RCVBUF: at most twice as much is read from a client at a time, and kept until its turn comes."""
SEND_BYTES = 128 * 1024
"""SO_SNDBUF: otherwise the kernel would keep megabytes that a client does not read."""
STOP_SECONDS = 1.0
"""How long `HttpServer.stop` waits for clients that do not read their responses, and again for their ends."""

_caused = log.limited("http")


class HttpServer:
    def __init__(self, application: web.Application, refuse: Callable[[Refusal], None], tasks: TaskSet) -> None:
        application.middlewares.append(take_turn)
        application.on_response_prepare.append(before_response)
        self._runner = web.AppRunner(application, access_log=None, handle_signals=False, shutdown_timeout=STOP_SECONDS)
        self._tasks, turns = tasks, TcpTurns()
        self._connections = Connections(refuse, turns)
        self._listener = TcpListener(self._accepted, SocketOptions(RECEIVE_BYTES, SEND_BYTES), turns, tasks, _caused)

    async def start(self, host: str, port: int, option: str) -> int:
        """Listen. Returns the port, chosen by the system if ``port`` is 0.

        Args:
            option: the option that sets the address, for texts.

        Raises:
            AddressUnavailable, ConfigError: the address cannot be bound, now or ever.
        """
        await self._runner.setup()
        try:
            return await self._listener.start(host, port)
        except OSError as error:
            raise cannot_listen("HTTP", at(host, port), option, error) from error

    async def stop(self) -> None:
        await self._tasks.cancel()
        await self._listener.close()
        await self._runner.cleanup()

    async def _accepted(self, connection: socket.socket, _address: Any) -> None:
        server = self._runner.server
        assert server is not None
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: HttpConnection(server, self._connections), connection)
