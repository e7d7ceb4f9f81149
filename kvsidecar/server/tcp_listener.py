"""Accepts the connections of a TCP port in turns. (asyncio's own server accepts all that wait in one iteration.)"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvsidecar.server.tcp_turns import TcpTurns
from kvsidecar.support.accepting import accept
from kvsidecar.support.log import Limited
from kvsidecar.support.tasks import TaskSet

BACKLOG = 1024
_WILDCARDS = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class SocketOptions:
    receive_bytes: int
    """SO_RCVBUF: the kernel keeps at most twice as much for a client that is not read from."""
    send_bytes: int
    """SO_SNDBUF: the kernel keeps at most twice as much for a client that does not read."""
    both_families: bool = False
    """A wildcard address means IPv4 and IPv6."""


class TcpListener:
    """Listens on all addresses of a host.

    Args:
        accepted: called with each connection, which does not block and is then the callee's unless it raises, and the
            address of its other end.
    """

    def __init__(
        self,
        accepted: Callable[[socket.socket, Any], Awaitable[object]],
        options: SocketOptions,
        turns: TcpTurns,
        tasks: TaskSet,
        caused: Limited,
    ) -> None:
        self._accepted, self._options, self._turns = accepted, options, turns
        self._tasks, self._caused = tasks, caused
        self._listeners: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []

    async def start(self, host: str, port: int) -> int:
        """Returns the port, which is the same for all addresses. Raises OSError."""
        both = self._options.both_families and host in _WILDCARDS and socket.has_dualstack_ipv6()
        found = await asyncio.get_running_loop().getaddrinfo(
            "::" if both else host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        try:
            for family, kind, protocol, _, address in dict.fromkeys(found):
                listener = socket.socket(family, kind, protocol)
                self._listeners.append(listener)
                self._bind(listener, (address[0], port, *address[2:]), only_v6=not both)
                port = listener.getsockname()[1]
        except OSError:
            await self.close()
            raise
        self._accepting = [self._tasks.keep(partial(self._accept, each), name="tcp-accept") for each in self._listeners]
        return port

    async def close(self) -> None:
        """Listen no more."""
        for task in self._accepting:
            task.cancel()
        if self._accepting:  # they have registered the sockets' descriptors, which others may get next
            await asyncio.wait(self._accepting)
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            connection, address = await accept(listener, self._caused)
            try:
                await self._turns.wait(connection=True)
                await self._accepted(connection, address)
            except BaseException as error:
                connection.close()
                if not isinstance(error, OSError):
                    raise

    def _bind(self, listener: socket.socket, address: object, *, only_v6: bool) -> None:
        options = self._options
        listener.setblocking(False)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, options.receive_bytes)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, options.send_bytes)
        if listener.family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(only_v6))
        listener.bind(address)  # type: ignore[arg-type]
        listener.listen(BACKLOG)
