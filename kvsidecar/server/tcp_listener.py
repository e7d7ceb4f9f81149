"""Accepts the connections of the HTTP port in turns. (asyncio's own server accepts all that wait in one iteration.)"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from kvsidecar.server.turns import Turns
from kvsidecar.support import log
from kvsidecar.support.accepting import accept
from kvsidecar.support.tasks import TaskSet

BACKLOG = 1024
RECEIVE_BYTES = 16 * 1024
"""SO_RCVBUF: at most twice as much is read of a client at a time, and kept while its turn has not come."""

_caused = log.limited("http")


class HttpListener:
    """Listens on all addresses of a host.

    Args:
        make: the protocol of a connection.
        tasks: own the accepting.
    """

    def __init__(self, make: Callable[[], asyncio.Protocol], turns: Turns, tasks: TaskSet) -> None:
        self._make, self._turns, self._tasks = make, turns, tasks
        self._listeners: list[socket.socket] = []

    async def start(self, host: str, port: int) -> int:
        """Returns the port, of the first address. Raises OSError."""
        found = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        try:
            for family, kind, protocol, _, address in dict.fromkeys(found):
                self._listeners.append(_bound(socket.socket(family, kind, protocol), address))
        except OSError:
            self.close()
            raise
        for listener in self._listeners:
            self._tasks.spawn(self._accept(listener), name="http-accept")
        return int(self._listeners[0].getsockname()[1])

    def close(self) -> None:
        """Listen no more. The owner of the tasks cancels the accepting first."""
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await accept(listener, _caused)
            try:
                await self._turns.wait(connection=True)
                await loop.connect_accepted_socket(self._make, connection)
            except BaseException as error:
                connection.close()
                if not isinstance(error, OSError):
                    raise


def _bound(listener: socket.socket, address: object) -> socket.socket:
    try:
        listener.setblocking(False)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        if listener.family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)  # type: ignore[arg-type]
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener
