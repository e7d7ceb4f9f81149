"""Listens at the path of one of the daemon's sockets, and at another socket there after it was removed."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from kvsidecar.server.socket_files import SocketFiles
from kvsidecar.support import peer as peers
from kvsidecar.support.accepting import accept
from kvsidecar.support.log import Limited
from kvsidecar.support.peer import Credentials
from kvsidecar.support.tasks import TaskSet
from kvsidecar.support.turns import Turns

ACCEPT_SECONDS: Final = 0.0001
"""Approximate time for accepting a connection, without serving it."""
MAX_WAITING: Final = 64
"""Connections that were accepted to identify their user, and whose turn has not come. The next ones stay in the
kernel's queue."""


class PathListener:
    """Used from the event loop.

    Args:
        accepted: called with each connection, which does not block and is then the callee's, and its client.
        what: with the user id, the user in `Turns` for accepting: later steps in the same turns slow down accepting.
    """

    def __init__(
        self,
        socket_files: SocketFiles,
        path: Path,
        accepted: Callable[[socket.socket, Credentials], None],
        tasks: TaskSet,
        caused: Limited,
        turns: Turns,
        what: str,
    ) -> None:
        self._socket_files, self._path = socket_files, path
        self._accepted, self._tasks, self._caused, self._turns = accepted, tasks, caused, turns
        self._what = what
        self._room = asyncio.Semaphore(MAX_WAITING)
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Bind and accept. The caller holds the daemon's lock. Called again, because the socket was removed, it binds
        another one; present connections stay.

        Raises:
            SocketInUse: it cannot be bound.
        """
        listener = self._socket_files.listen(self._path)
        self._close()
        self._listener = listener
        self._accepting = self._tasks.keep(partial(self._accept, listener), name=f"accept-{self._path.name}")

    def stop(self) -> None:
        """Take no more connections; present ones continue."""
        self._close()
        self._socket_files.withdraw(self._path)

    def _close(self) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
        if self._listener is not None:
            self._listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            await self._room.acquire()
            try:
                connection, _ = await accept(listener, self._caused)
            except BaseException:
                self._room.release()
                raise
            try:
                who = peers.credentials(connection)
                self._turns.take((self._what, who.uid), partial(self._begin, connection, who))
            except BaseException:
                self._room.release()
                connection.close()
                raise

    def _begin(self, connection: socket.socket, who: Credentials) -> None:
        self._room.release()
        self._turns.charge((self._what, who.uid), ACCEPT_SECONDS)
        self._accepted(connection, who)
