"""Serves an aiohttp application on a port, with the limits of `HttpConnection`."""

from __future__ import annotations

from collections.abc import Callable

from kvsidecar.errors import Refusal
from kvsidecar.server.aiohttp_server import web
from kvsidecar.server.http_connection import Connections, HttpConnection, before_response, take_turn
from kvsidecar.server.http_listener import HttpListener
from kvsidecar.server.turns import Turns
from kvsidecar.support.addresses import cannot_listen
from kvsidecar.support.tasks import TaskSet


class HttpServer:
    """
    Args:
        application: its routes.
        refuse: counts a refusal.
        tasks: own what runs until `stop`.
    """

    def __init__(self, application: web.Application, refuse: Callable[[Refusal], None], tasks: TaskSet) -> None:
        application.middlewares.append(take_turn)
        application.on_response_prepare.append(before_response)
        self._runner = web.AppRunner(application, access_log=None, handle_signals=False)
        self._turns, self._tasks = Turns(), tasks
        self._connections = Connections(refuse, self._turns)
        self._listener: HttpListener | None = None

    async def start(self, host: str, port: int, option: str) -> int:
        """Listen. Returns the port, chosen by the system if ``port`` is 0.

        Args:
            option: that sets the address, for texts.

        Raises:
            AddressUnavailable, ConfigError: the address cannot be bound, now or ever.
        """
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        try:
            self._listener = HttpListener(lambda: HttpConnection(server, self._connections), self._turns, self._tasks)
            return await self._listener.start(host, port)
        except OSError as error:
            raise cannot_listen("HTTP", f"{host}:{port}", option, error) from error

    async def stop(self) -> None:
        await self._tasks.cancel()
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()
