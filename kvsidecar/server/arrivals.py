"""Clients that attach, and the descriptors that they cost the daemon, from the moment they have them.

A user with many unfinished Hellos would otherwise fill the descriptor table, which everybody needs.
"""

from __future__ import annotations

import contextlib
import socket
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvsidecar.core.quota import Quota
from kvsidecar.errors import InvalidRequest, KVSidecarError, LimitExceeded
from kvsidecar.support.kernel_calls import descriptor_limit
from kvsidecar.support.peer import close_all
from kvsidecar.types import MAX_DESCRIPTORS

MAX_CONNECTIONS = 1024
"""Limit per user of connections to the attach socket, and of streams over gRPC alone. An engine has three for each
rank, and three for its scheduler."""
MAX_SHARED_FDS = MAX_DESCRIPTORS
"""Limit per user of the descriptors handed over and still open, on all of its connections: as many as a rank may have.
Those of GPU memory are closed as soon as it is mapped, so that the next rank's have room."""
CONNECTION_FDS = 3
"""Descriptors of a connection itself: the socket, the client's pidfd, its fence. (Over gRPC alone it is the pidfd.)"""
TABLE_SHARE = 0.75
"""Share of the descriptor table for all connections together. The rest is for the other sockets, files and copiers."""


@dataclass(eq=False, slots=True)
class Arrival:
    """One client's connection, and what it holds. Made by `Arrivals.begin`."""

    connection: socket.socket
    uid: int
    fds: list[int] = field(default_factory=list)
    """Descriptors received, and not taken over yet."""
    held: int = 0
    """How many descriptors are counted for it beside `CONNECTION_FDS`."""
    refused: str = ""
    """Why its Hello is not waited for any more. Not the error itself: once raised, it refers to this object by its
    traceback, and only the garbage collector would free both."""
    ended: bool = False
    waits: bool = False
    """A Hello has come, perhaps a whole one, and is going to be read when it is its user's turn."""

    def take_fds(self) -> tuple[int, ...]:
        """The descriptors, which the caller closes from now on. They are counted until `Arrivals.end`."""
        fds, self.fds = tuple(self.fds), []
        return fds


class Arrivals:
    """Admits connections and their descriptors.

    A user that is over a limit loses its oldest connection without a Hello first, so that its unfinished Hellos keep
    out neither others nor its own engines, whose Hello arrives whole: one that waits for its turn is not closed.

    All users together may have `TABLE_SHARE` of the table, and one user no more of that than it leaves free: so there
    is room for the next user, no matter how many came before.

    Args:
        table: size of the descriptor table; None: the process's limit.
    """

    def __init__(self, table: int | None = None) -> None:
        self._room = int(TABLE_SHARE * (descriptor_limit() if table is None else table))
        self._connections = Quota(MAX_CONNECTIONS, "connections to the attach socket and streams without one")
        self._shared_fds = Quota(MAX_SHARED_FDS, "descriptors handed over")
        self._held: Counter[int] = Counter()
        """Descriptors by user."""
        self._unfinished: dict[int, dict[Arrival, None]] = {}
        """Connections without a Hello by user, the oldest first."""

    def begin(self, connection: socket.socket, uid: int) -> Arrival:
        """Admit a connection. Raises LimitExceeded."""
        arrival = Arrival(connection, uid)
        self._take(arrival, self._connections, 1, CONNECTION_FDS)
        self._unfinished.setdefault(uid, {})[arrival] = None
        return arrival

    def received(self, arrival: Arrival, fds: Iterable[int]) -> None:
        """Count descriptors that have arrived with a part of its Hello, and keep them.

        Raises:
            InvalidRequest, LimitExceeded: there are too many; they are closed.
        """
        fds = tuple(fds)
        try:
            if arrival.refused:
                raise LimitExceeded(arrival.refused)
            if len(arrival.fds) + len(fds) > MAX_DESCRIPTORS:
                raise InvalidRequest(f"more than {MAX_DESCRIPTORS} descriptors with one Hello")
            self._take(arrival, self._shared_fds, len(fds), len(fds))
        except KVSidecarError:
            close_all(fds)
            raise
        arrival.fds += fds
        arrival.held += len(fds)

    def complete(self, arrival: Arrival) -> None:
        """Note that its Hello is complete, or that it ends without one."""
        if (unfinished := self._unfinished.get(arrival.uid)) is not None:
            unfinished.pop(arrival, None)
            if not unfinished:
                del self._unfinished[arrival.uid]

    def end(self, arrival: Arrival) -> None:
        """Give back all that the connection has. The caller closes the connection itself."""
        if arrival.ended:
            return
        arrival.ended = True
        self.complete(arrival)
        close_all(arrival.fds)
        arrival.fds = []
        self._connections.give_back(arrival.uid)
        self._give_back(arrival, arrival.held)
        self._held[arrival.uid] -= CONNECTION_FDS
        if not self._held[arrival.uid]:
            del self._held[arrival.uid]

    def closed(self, arrival: Arrival, count: int) -> None:
        """Count descriptors that it handed over and that are closed before its end."""
        if not arrival.ended:
            self._give_back(arrival, count)

    def _give_back(self, arrival: Arrival, count: int) -> None:
        self._shared_fds.give_back(arrival.uid, count)
        arrival.held -= count
        self._held[arrival.uid] -= count

    def _take(self, arrival: Arrival, quota: Quota, count: int, fds: int) -> None:
        uid = arrival.uid
        while True:
            try:
                has, free = self._held[uid], self._room - self._held.total()
                if has + fds > free - fds:
                    raise LimitExceeded(
                        f"one user may hold no more descriptors than it leaves free: it holds {has}, and {free} of "
                        f"{self._room} are free"
                    )
                quota.take(uid, count)
                break
            except LimitExceeded as error:
                others = self._unfinished.get(uid, ())
                oldest = next((each for each in others if each is not arrival and not each.waits), None)
                if oldest is None:
                    raise
                self._give_up(oldest, error)
        self._held[uid] += fds

    def _give_up(self, arrival: Arrival, why: LimitExceeded) -> None:
        arrival.refused = f"{why}: the oldest without a complete Hello is closed"
        with contextlib.suppress(OSError):
            arrival.connection.shutdown(socket.SHUT_RD)  # wakes whoever waits for the Hello
        self.end(arrival)
