"""The attach socket: identity, shared memory and liveness of clients.

gRPC carries no file descriptors and, in Python, no peer identity (grpc issue 28755). So each client connects here
first: the kernel says who it is (SO_PEERCRED), its memfds arrive as SCM_RIGHTS, and it gets a token for gRPC. The
connection stays open; the kernel closes it when the process dies, however it dies. After the Welcome it carries the
local protocol, unless that is off.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Iterable
from pathlib import Path

from kvsidecar.core.quota import Quota
from kvsidecar.core.sessions import Instances, Peer
from kvsidecar.errors import InvalidRequest, LimitExceeded, Refusal
from kvsidecar.protocol.framing import FrameReader, FrameTooLong, frame
from kvsidecar.server.local_protocol import LocalConnection
from kvsidecar.support import log
from kvsidecar.support import peer as peers
from kvsidecar.support.tasks import TaskSet
from kvsidecar.types import PROTOCOL
from kvsidecar.v1 import sidecar_pb2 as pb

MAX_HELLO_BYTES = 4096
MAX_FDS = 253
"""SCM_MAX_FD of the kernel: more cannot arrive in one message."""
MAX_CONNECTIONS = 1024
"""The limit for one user. An engine has three for each rank, and three for its scheduler."""
MAX_MEMFDS = 4096
"""The limit for one user, over all of its connections."""
HELLO_SECONDS = 5.0
"""A connection that says nothing for this long is closed: silent ones would hold descriptors."""

_log = log.get("attach")


class AttachSocket:
    """Serves the attach socket on the event loop.

    Args:
        on_gone: called with a peer whose connection has ended.
        local_connection: serves the local protocol to a peer; None if that is off.
        refuse: counts a refusal.
    """

    def __init__(
        self,
        path: Path,
        *,
        mode: int,
        gid: int | None,
        epoch: int,
        instances: Instances,
        on_gone: Callable[[Peer], None],
        local_connection: Callable[[Peer], LocalConnection] | None,
        refuse: Callable[[Refusal], None],
        tasks: TaskSet,
    ) -> None:
        self._path = path
        self._mode = mode
        self._gid = gid
        self._epoch = epoch
        self._instances = instances
        self._on_gone = on_gone
        self._local_connection = local_connection
        self._refuse = refuse
        self._tasks = tasks
        self._connections_of = Quota(MAX_CONNECTIONS, "connections to the attach socket")
        self._memfds_of = Quota(MAX_MEMFDS, "descriptors handed over")
        self._listener: socket.socket | None = None
        self._connections: dict[socket.socket, LocalConnection | None] = {}
        self._accepting: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Bind and accept. The path must be free: the daemon's lock has been taken before."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        old = os.umask(0o177)
        try:
            listener.bind(str(self._path))
        finally:
            os.umask(old)
        if self._gid is not None:
            os.chown(self._path, -1, self._gid)
        self._path.chmod(self._mode)
        listener.listen(1024)
        self._listener = listener
        self._accepting = self._tasks.spawn(self._accept(listener), name="attach-socket")

    async def stop(self) -> None:
        """Close the socket and every connection."""
        if self._accepting is not None:
            self._accepting.cancel()
        for connection, local in tuple(self._connections.items()):
            # The reader sees the end of the stream and cleans up as for a client that went away.
            if local is not None:
                local.shut_down()
                continue
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        if self._listener is not None:
            self._listener.close()
            self._path.unlink(missing_ok=True)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:
                # EMFILE and its kin pass when others close; a busy loop on them would starve the daemon.
                _log.warning("accept failed", error=str(error))
                await asyncio.sleep(0.1)
                continue
            connection.setblocking(False)
            who = peers.credentials(connection)
            try:
                self._connections_of.take(who.uid)
            except LimitExceeded as error:
                with connection:  # without a line of log each: nobody shall fill that with them
                    self._refuse(Refusal.LIMIT)
                    _send_at_once(connection, self._welcome_error(str(error)))
                continue
            self._connections[connection] = None
            self._tasks.spawn(self._serve(connection, who), name="attach-connection")

    def _reject(self, connection: socket.socket, reason: Refusal, text: str) -> None:
        self._refuse(reason)
        _log.warning("attach connection refused", error=text)
        _send_at_once(connection, self._welcome_error(text))

    def _welcome_error(self, text: str) -> pb.Welcome:
        return pb.Welcome(epoch=self._epoch, error=text)

    async def _serve(self, connection: socket.socket, who: peers.Credentials) -> None:
        peer: Peer | None = None
        memfds = 0
        try:
            try:
                hello, fds = await asyncio.wait_for(_receive_hello(connection), HELLO_SECONDS)
            except TimeoutError:
                self._reject(connection, Refusal.UNFINISHED, f"no Hello was complete within {HELLO_SECONDS:g} s")
                return
            except InvalidRequest as error:
                self._reject(connection, Refusal.INVALID_REQUEST, str(error))
                return
            if refused := self._hello_problem(hello, fds, who.uid):
                _close_all(fds)
                await _send(connection, self._welcome_error(refused))
                return
            memfds = len(fds)
            groups = peers.groups(connection)
            peer = self._instances.add_peer(**who._asdict(), client=hello.client, fds=fds, groups=groups)
            _log.debug("client connected", pid=who.pid, uid=who.uid, client=hello.client, fds=len(fds))
            local = self._local_connection(peer) if self._local_connection is not None else None
            welcome = pb.Welcome(token=peer.token, epoch=self._epoch, local_protocol=local is not None)
            await _send(connection, welcome)
            if local is not None:
                await self._serve_local_protocol(connection, local)
            else:
                await _wait_until_gone(connection, asyncio.ensure_future(_wait_until_closed(connection)))
        except OSError as error:
            _log.debug("attach connection broke", error=str(error))
        finally:
            self._connections.pop(connection)
            connection.close()
            self._connections_of.give_back(who.uid)
            self._memfds_of.give_back(who.uid, memfds)
            if peer is not None:
                self._on_gone(peer)

    def _hello_problem(self, hello: pb.Hello, fds: tuple[int, ...], uid: int) -> str:
        """Why this client is not taken; empty if it is. Then its descriptors count."""
        if hello.protocol != PROTOCOL:
            self._refuse(Refusal.REGISTER_REFUSED)
            return (
                f"the daemon speaks protocol {PROTOCOL}, the client {hello.protocol}: "
                "use the same kvsidecar release on both sides"
            )
        try:
            self._memfds_of.take(uid, len(fds))
        except LimitExceeded as error:
            self._refuse(Refusal.LIMIT)
            return str(error)
        return ""

    async def _serve_local_protocol(self, connection: socket.socket, local: LocalConnection) -> None:
        transport, _ = await asyncio.get_running_loop().connect_accepted_socket(lambda: local, connection)
        self._connections[connection] = local
        try:
            await _wait_until_gone(connection, local.closed)
        finally:
            transport.abort()


async def _wait_until_gone(connection: socket.socket, closed: asyncio.Future[None]) -> None:
    """Return when the process has gone: its connection is ``closed``, or its pidfd says so.

    Each alone has a gap: a forked child that outlives the engine keeps the connection open, and a pidfd of a process
    in a PID namespace that is not visible here cannot be had.
    """
    loop = asyncio.get_running_loop()
    ends = {closed}
    pidfd = peers.pidfd(connection)
    died = loop.create_future()
    if pidfd is not None:
        loop.add_reader(pidfd, _set, died)
        ends.add(died)
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for end in ends:
            end.cancel()
        if pidfd is not None:
            loop.remove_reader(pidfd)
            os.close(pidfd)


async def _wait_until_closed(connection: socket.socket) -> None:
    """A client says nothing more here; a read ends when every copy of its descriptor is closed."""
    with contextlib.suppress(OSError):
        while await asyncio.get_running_loop().sock_recv(connection, 1024):
            pass


async def _receive_hello(connection: socket.socket) -> tuple[pb.Hello, tuple[int, ...]]:
    """One Hello with its descriptors. Raises InvalidRequest, and closes what arrived, if they do not fit."""
    frames = FrameReader(MAX_HELLO_BYTES)
    fds: list[int] = []
    try:
        while (payload := frames.next()) is None:
            chunk, new_fds = await _recvmsg(connection, frames.missing)
            fds += new_fds
            if not chunk:
                raise InvalidRequest("the client closed the connection before its Hello was complete")
            frames.feed(chunk)
        try:
            hello = pb.Hello.FromString(payload)
        except Exception as error:  # protobuf's DecodeError is not part of its typed interface
            raise InvalidRequest(f"the Hello does not parse: {error}") from error
        if hello.num_fds != len(fds):
            raise InvalidRequest(f"the Hello announces {hello.num_fds} descriptors, but {len(fds)} arrived")
    except FrameTooLong as error:
        _close_all(fds)
        raise InvalidRequest(f"a Hello of {error.length} bytes is over the limit of {MAX_HELLO_BYTES}") from error
    except BaseException:
        _close_all(fds)
        raise
    return hello, tuple(fds)


async def _recvmsg(connection: socket.socket, nbytes: int) -> tuple[bytes, list[int]]:
    """recvmsg on the event loop (asyncio has no call that returns ancillary data)."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            data, ancillary, flags, _ = connection.recvmsg(
                nbytes, socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize), socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            readable = loop.create_future()
            loop.add_reader(connection.fileno(), _set, readable)
            try:
                await readable
            finally:
                loop.remove_reader(connection.fileno())
            continue
        fds = array.array("i")
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
        if flags & socket.MSG_CTRUNC:
            _close_all(fds)
            raise InvalidRequest(f"more than {MAX_FDS} descriptors in one message")
        return data, list(fds)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def _send_at_once(connection: socket.socket, message: pb.Welcome) -> None:
    """As far as that goes without waiting."""
    with contextlib.suppress(OSError):
        connection.send(frame(message.SerializeToString()))


async def _send(connection: socket.socket, message: pb.Welcome) -> None:
    await asyncio.get_running_loop().sock_sendall(connection, frame(message.SerializeToString()))
