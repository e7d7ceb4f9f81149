"""Clients that attach over gRPC alone: the kernel identifies them, and the stream is their liveness.

Such a client has no connection to the attach socket, and so neither a token of it nor descriptors that came with a
Hello. It counts towards the same limits as one that has.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Generator
from typing import Final

from kvsidecar.core.layout_checks import STEP
from kvsidecar.core.peer import Peer
from kvsidecar.errors import AccessDenied, ImportRefused, InvalidRequest, LimitExceeded, UnknownPeer
from kvsidecar.server.arrivals import Arrival, Arrivals
from kvsidecar.server.attach_socket import TURNS
from kvsidecar.server.grpc_front import GrpcClient, OpenedConnection
from kvsidecar.server.handler import Handler
from kvsidecar.support import log
from kvsidecar.support import peer as peers
from kvsidecar.support.poll_set import READABLE, PollSet
from kvsidecar.support.process_ids import process_id
from kvsidecar.support.turns import Turns
from kvsidecar.v1 import sidecar_pb2 as pb

_CLOCK_TICKS: Final = os.sysconf("SC_CLK_TCK")
_ENDED: Final = "the process that has opened this gRPC connection has ended"
_log = log.get("attach")


class StreamClients:
    """Used from the event loop.

    Args:
        arrivals: counts them with the clients of the attach socket.
        turns: the users' turns, for the end of a client: all those of a process end at once.
        client_at: see `GrpcFront.client_at`.
    """

    def __init__(
        self, handler: Handler, arrivals: Arrivals, turns: Turns, client_at: Callable[[str], GrpcClient | None]
    ) -> None:
        self.handler, self.arrivals, self.turns = handler, arrivals, turns
        self.poll_set = PollSet()
        self._client_at = client_at

    async def admit(self, name: str, first: pb.Register | pb.Watch) -> StreamClient:
        """Make the first message of an Attach stream without a token that of a new client, whose token it has from then
        on.

        Args:
            name: gRPC's name for the other end of the connection.

        Raises:
            KVSidecarError: the client is refused.
        """
        found = self._client_at(name)
        if found is None or found.opened is None:
            raise UnknownPeer("the connection has ended")
        opened = found.opened
        arrival = self.arrivals.begin(opened.connection, opened.who.uid)
        self.arrivals.complete(arrival)  # it has no Hello to wait for
        pidfd: int | None = None
        try:
            kernels = peers.kernel_pidfd(opened.connection)
            pidfd = _pidfd_by_number(opened) if kernels is None else kernels
            if isinstance(first, pb.Register):
                await self.handler.steps.loop_time.run(self._taking(first, kernels, arrival))
            if opened.connection.fileno() < 0:
                raise UnknownPeer("the connection has ended")
            peer = self.handler.instances.add_peer(
                opened.who,
                "gRPC alone",
                arrival.take_fds(),
                groups=peers.groups(opened.connection),
                copiers=None,
                on_closed=lambda count: self.arrivals.closed(arrival, count),
            )
        except BaseException:
            self.arrivals.end(arrival)
            if pidfd is not None:
                os.close(pidfd)
            raise
        first.token = peer.token
        _log.debug("client connected over gRPC alone", pid=peer.pid, uid=peer.uid, fds=len(peer.fds))
        return StreamClient(self, arrival, peer, pidfd)

    def _taking(self, message: pb.Register, pidfd: int | None, arrival: Arrival) -> Generator[None, None, None]:
        """Take duplicates of the descriptors that it names by their numbers in its own process, in small steps. From
        then on it names them as if they had come with a Hello.

        Raises:
            InvalidRequest, ImportRefused, AccessDenied, LimitExceeded, UnknownPeer
        """
        indexes: dict[int, int] = {}
        for index, allocation in enumerate(message.allocations):
            if index % STEP == STEP - 1:
                yield
            if allocation.WhichOneof("source") != "own_fd":
                continue
            number = allocation.own_fd
            if number not in indexes:
                indexes[number] = len(arrival.fds)
                self.arrivals.received(arrival, [_take(pidfd, arrival.uid, number)])
            allocation.fd_index = indexes[number]


class StreamClient:
    """One client, from its admission until its stream is over. Made by `StreamClients.admit`."""

    def __init__(self, owner: StreamClients, arrival: Arrival, peer: Peer, pidfd: int | None) -> None:
        self._owner, self._arrival, self._peer = owner, arrival, peer
        self._pidfd = pidfd
        if pidfd is not None:  # a child that outlives the process may keep the connection, and so the stream, open
            owner.poll_set.watch(pidfd, READABLE, self._process_ended)

    def _process_ended(self, _events: int) -> None:
        self._stop_watching()
        self._owner.turns.take((TURNS, self._peer.uid), lambda: self._owner.handler.peer_gone(self._peer))

    def _stop_watching(self) -> None:
        if self._pidfd is not None:
            self._owner.poll_set.watch(self._pidfd, 0, lambda _: None)
            os.close(self._pidfd)
            self._pidfd = None

    def end(self) -> None:
        """End the client: its stream is over."""
        self._stop_watching()
        self._owner.arrivals.end(self._arrival)
        self._owner.handler.peer_gone(self._peer)


def _pidfd_by_number(opened: OpenedConnection) -> int | None:
    """A pidfd of the process that has opened a connection, before Linux 6.5; None if it has no number here.

    Another process may have the number by now: one that began after the connection was accepted.

    Raises:
        UnknownPeer: the process has ended.
    """
    if not opened.who.pid:
        return None
    try:
        pidfd = os.pidfd_open(opened.who.pid)
    except OSError as error:
        raise UnknownPeer(_ENDED) from error
    # Looked at once the descriptor holds the process: until then the number could change its owner.
    found = process_id(opened.who.pid)
    if found is None or found.start_time / _CLOCK_TICKS > opened.at:
        os.close(pidfd)
        raise UnknownPeer(_ENDED)
    return pidfd


def _take(pidfd: int | None, owner: int, number: int) -> int:
    """A duplicate of a descriptor of the client's process.

    Args:
        pidfd: from the kernel, which never means another process; None: there is none.
        owner: the client's user.
    """
    if pidfd is None:
        raise ImportRefused("own_fd needs Linux 6.5 or newer (SO_PEERPIDFD): send the memfd over the attach socket")
    try:
        fd = peers.take_fd(pidfd, number)
    except OSError as error:
        match error.errno:
            case errno.EBADF:
                raise InvalidRequest(f"own_fd {number} is not open in the process that attaches") from error
            case errno.ESRCH:
                raise UnknownPeer(_ENDED) from error
            case errno.EMFILE | errno.ENFILE:
                raise LimitExceeded("the daemon has no room for more descriptors (ulimit -n, LimitNOFILE=)") from error
        raise ImportRefused(
            f"the kernel does not let the daemon take own_fd {number} ({error.strerror}): pidfd_getfd(2) asks for the "
            "client's user or CAP_SYS_PTRACE, and may be forbidden by seccomp or kernel.yama.ptrace_scope. Send the "
            "memfd over the attach socket"
        ) from error
    # The process may have become another user's since it connected, by a set-user-ID program: whoever still has the
    # connection could name what that program has open.
    if os.fstat(fd).st_uid != owner:
        os.close(fd)
        raise AccessDenied(f"own_fd {number} does not belong to the user who has opened the connection")
    return fd
