"""The attach socket: identity, shared memory and liveness of clients.

gRPC transfers no file descriptors and, in Python, no peer identity (grpc issue 28755). So each client connects here
first: the kernel identifies it (SO_PEERCRED), its memfds arrive as SCM_RIGHTS, and it gets a token for gRPC. The
connection stays open; when the process dies in any way, the kernel closes it. After the Welcome, the connection carries
the local protocol, unless that is off.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Mapping

from kvsidecar.core.sessions import Instances, Peer
from kvsidecar.errors import InvalidRequest, KVSidecarError, LimitExceeded, Refusal, Unfinished
from kvsidecar.protocol.framing import FrameReader, FrameTooLong, frame
from kvsidecar.server.arrivals import Arrival, Arrivals, close_all
from kvsidecar.server.handler import REASONS, check_protocol
from kvsidecar.server.local_protocol import LocalConnection
from kvsidecar.server.path_listener import PathListener
from kvsidecar.server.socket_files import SocketFiles
from kvsidecar.support import fence, log
from kvsidecar.support import peer as peers
from kvsidecar.support.tasks import TaskSet
from kvsidecar.v1 import sidecar_pb2 as pb

MAX_HELLO_BYTES = 4096
HELLO_SECONDS = 5.0
"""Time limit for the Hello: silent connections would hold descriptors."""

_log = log.get("attach")
_caused = log.limited("attach")
"""For lines that clients cause."""


class AttachSocket:
    """Serves the attach socket on the event loop.

    Args:
        on_gone: called with a peer whose connection has ended.
        local_connection: serves the local protocol to a peer; None if the protocol is off.
        refuse: counts a refusal.
        pidfds: returns the copiers' processes and a pidfd of each. A client gets them and the daemon's own with its
            Welcome: its memory may be in use until all of these processes have ended.
    """

    def __init__(
        self,
        socket_files: SocketFiles,
        *,
        epoch: int,
        instances: Instances,
        on_gone: Callable[[Peer], None],
        local_connection: Callable[[Peer], LocalConnection] | None,
        refuse: Callable[[Refusal], None],
        tasks: TaskSet,
        pidfds: Callable[[], Mapping[int, int]] = dict,
    ) -> None:
        self._epoch = epoch
        self._instances = instances
        self._on_gone = on_gone
        self._local_connection = local_connection
        self._refuse = refuse
        self._tasks = tasks
        self._pidfds = pidfds
        self._arrivals = Arrivals()
        self._listener = PathListener(socket_files, socket_files.attach_path, self._accepted, tasks, _caused)
        self._connections: dict[socket.socket, LocalConnection | None] = {}

    def start(self) -> None:
        """See `PathListener.start`."""
        self._listener.start()

    async def start_again(self) -> None:
        """As `start`."""
        self.start()

    async def stop(self) -> None:
        self._listener.stop()
        for connection, local in tuple(self._connections.items()):
            # The reader sees the end of the stream and cleans up as for a client that has gone.
            if local is not None:
                local.shut_down()
                continue
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accepted(self, connection: socket.socket) -> None:
        who = peers.credentials(connection)
        try:
            arrival = self._arrivals.begin(connection, who.uid)
        except LimitExceeded as error:
            with connection:
                self._reject(connection, error)
            return
        self._connections[connection] = None
        self._tasks.spawn(self._serve(arrival, who), name="attach-connection")

    def _reject(self, connection: socket.socket, error: KVSidecarError) -> None:
        """Count a refusal and send the error, as far as the socket buffer takes it."""
        self._refuse(REASONS.get(type(error), Refusal.REGISTER_REFUSED))
        _caused.warning("attach connection refused", error=str(error))
        with contextlib.suppress(OSError):
            connection.send(frame(pb.Welcome(epoch=self._epoch, error=str(error)).SerializeToString()))

    async def _serve(self, arrival: Arrival, who: peers.Credentials) -> None:
        connection = arrival.connection
        peer: Peer | None = None
        try:
            try:
                hello = await asyncio.wait_for(_receive_hello(arrival, self._arrivals), HELLO_SECONDS)
                check_protocol(hello.protocol)
            except TimeoutError:
                self._reject(connection, Unfinished(f"no Hello was complete within {HELLO_SECONDS:g} s"))
                return
            except KVSidecarError as error:
                self._reject(connection, error)
                return
            groups = peers.groups(connection)
            pidfds = self._pidfds()
            shared = fence.create() if hello.fence else None
            peer = self._instances.add_peer(
                **who._asdict(),
                client=hello.client,
                fds=arrival.take_fds(),
                groups=groups,
                copiers=frozenset(pidfds),
                fence=shared,
            )
            _log.debug("client connected", pid=who.pid, uid=who.uid, client=hello.client, fds=hello.num_fds)
            local = self._local_connection(peer) if self._local_connection is not None else None
            welcome = pb.Welcome(
                token=peer.token,
                epoch=self._epoch,
                local_protocol=local is not None,
                num_pidfds=1 + len(pidfds),
                fence=hello.fence,
            )
            own = os.pidfd_open(os.getpid())
            try:
                # In one call, which never waits: nothing was sent on this connection before.
                sent = [own, *pidfds.values(), *(() if shared is None else (shared,))]
                socket.send_fds(connection, [frame(welcome.SerializeToString())], sent)
            finally:
                os.close(own)
            if local is not None:
                await self._serve_local_protocol(connection, local)
            else:
                await _wait_until_gone(connection, asyncio.ensure_future(_wait_until_closed(connection)))
        except OSError as error:
            _log.debug("attach connection broke", error=str(error))
        finally:
            self._connections.pop(connection)
            connection.close()
            self._arrivals.end(arrival)
            if peer is not None:
                self._on_gone(peer)

    async def _serve_local_protocol(self, connection: socket.socket, local: LocalConnection) -> None:
        transport, _ = await asyncio.get_running_loop().connect_accepted_socket(lambda: local, connection)
        self._connections[connection] = local
        try:
            await _wait_until_gone(connection, local.closed)
        finally:
            transport.abort()


async def _wait_until_gone(connection: socket.socket, closed: asyncio.Future[None]) -> None:
    """Wait until the process has gone: until the connection is ``closed`` or the pidfd reports its exit.

    Neither is enough alone: a forked child that outlives the engine keeps the connection open, and a process in a PID
    namespace that is not visible here may have no pidfd.
    """
    loop = asyncio.get_running_loop()
    events = {closed}
    pidfd = peers.pidfd(connection)
    if pidfd is not None:
        exited = loop.create_future()
        loop.add_reader(pidfd, _set, exited)
        events.add(exited)
    try:
        await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for event in events:
            event.cancel()
        if pidfd is not None:
            loop.remove_reader(pidfd)
            os.close(pidfd)


async def _wait_until_closed(connection: socket.socket) -> None:
    """Wait for the end of the stream: it comes when every copy of the client's descriptor is closed."""
    with contextlib.suppress(OSError):
        while await asyncio.get_running_loop().sock_recv(connection, 1024):
            pass


async def _receive_hello(arrival: Arrival, arrivals: Arrivals) -> pb.Hello:
    """One Hello; its descriptors are in ``arrival``.

    Raises:
        InvalidRequest: it does not parse, or they do not match.
        LimitExceeded: its user has too many.
    """
    frames = FrameReader(MAX_HELLO_BYTES)
    try:
        while (payload := frames.next()) is None:
            chunk, fds = await _recvmsg(arrival.connection, frames.missing)
            arrivals.received(arrival, fds)
            if not chunk:
                raise InvalidRequest("the client closed the connection before its Hello was complete")
            frames.feed(chunk)
    except FrameTooLong as error:
        raise InvalidRequest(f"a Hello of {error.length} bytes is over the limit of {MAX_HELLO_BYTES}") from error
    try:
        hello = pb.Hello.FromString(payload)
    except Exception as error:  # protobuf's DecodeError is not part of its typed interface
        raise InvalidRequest(f"the Hello does not parse: {error}") from error
    if hello.num_fds != len(arrival.fds):
        raise InvalidRequest(f"the Hello announces {hello.num_fds} descriptors, but {len(arrival.fds)} arrived")
    arrivals.complete(arrival)
    return hello


async def _recvmsg(connection: socket.socket, nbytes: int) -> tuple[bytes, list[int]]:
    """recvmsg on the event loop. (asyncio has no call that returns ancillary data.)"""
    loop = asyncio.get_running_loop()
    while True:
        try:
            data, fds, truncated = peers.recv_fds(connection, nbytes)
        except BlockingIOError:
            readable = loop.create_future()
            loop.add_reader(connection.fileno(), _set, readable)
            try:
                await readable
            finally:
                loop.remove_reader(connection.fileno())
            continue
        if truncated:
            close_all(fds)
            raise InvalidRequest(f"more than {peers.MAX_FDS} descriptors in one message")
        return data, fds


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
