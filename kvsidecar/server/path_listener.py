"""Listens at the path of one of the daemon's sockets, and at another socket there after it was removed."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

from kvsidecar.server.socket_files import SocketFiles
from kvsidecar.support.accepting import accept
from kvsidecar.support.log import Limited
from kvsidecar.support.tasks import TaskSet


class PathListener:
    """Used from the event loop.

    Args:
        accepted: called with each connection, which does not block and is then the callee's.
        tasks: own the accepting.
        caused: logs what fails.
    """

    def __init__(
        self,
        socket_files: SocketFiles,
        path: Path,
        accepted: Callable[[socket.socket], None],
        tasks: TaskSet,
        caused: Limited,
    ) -> None:
        self._socket_files, self._path = socket_files, path
        self._accepted, self._tasks, self._caused = accepted, tasks, caused
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Bind and accept. The caller holds the daemon's lock. Called again, because the socket was removed, it binds
        another one; the connections that there are stay.

        Raises:
            SocketInUse: it cannot be bound.
        """
        listener = self._socket_files.listen(self._path)
        self._close()
        self._listener = listener
        self._accepting = self._tasks.spawn(self._accept(listener), name=f"accept-{self._path.name}")

    def stop(self) -> None:
        """Take no more connections; those that there are go on."""
        self._close()
        self._socket_files.withdraw(self._path)

    def _close(self) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
        if self._listener is not None:
            self._listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            connection, _ = await accept(listener, self._caused)
            self._accepted(connection)
