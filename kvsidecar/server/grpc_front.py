"""What accepts on the gRPC socket: knows each client by its user, and passes what the gate lets through on to gRPC.

gRPC in Python tells neither who connects nor how many connections a user has. Here the kernel says it (SO_PEERCRED), as
on the attach socket. Each connection is relayed to gRPC's own server, at a socket that only this process can reach.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

from kvsidecar.core.quota import Quota
from kvsidecar.errors import KVSidecarError, LimitExceeded, Refusal
from kvsidecar.protocol.framing import MAX_MESSAGE_BYTES
from kvsidecar.server import http2_frames
from kvsidecar.server.handler import REASONS
from kvsidecar.server.http2_gate import CallQuotas, Gate, Passed
from kvsidecar.server.path_listener import PathListener
from kvsidecar.server.socket_files import SocketFiles
from kvsidecar.support import free_memory, log
from kvsidecar.support.peer import Credentials
from kvsidecar.support.tasks import TaskSet
from kvsidecar.support.turns import Turns

MAX_CONNECTIONS, MAX_ALL_CONNECTIONS = 512, 1024
"""Limit per user, and of all users together. An engine has one for each rank, and one for its scheduler."""
MAX_CALLS, MAX_ALL_CALLS = 512, 2048
"""The same of open calls. The Attach stream of a rank is one, where the local protocol is off."""
MAX_MESSAGES_BYTES, MAX_ALL_MESSAGES_BYTES = 16 * MAX_MESSAGE_BYTES, 32 * MAX_MESSAGE_BYTES
"""The same of messages that have not arrived as a whole, or whose call has not been answered."""
READ_BYTES = 64 * 1024
"""The most that is read of a connection before others have their turn, and kept for an end that takes no more."""
MAX_UNSENT_BYTES = READ_BYTES + 24 * 1024
"""From this on nothing more is read of a client that does not read its answers and the gate's."""

CONNECTION_BYTES = 192 * 1024
"""The most memory of a connection without calls: what was read and not passed on, in both directions, and 20 KiB of
gRPC's own (measured)."""
CALL_BYTES = 160 * 1024
"""The most of a call without the messages above: 40 KiB of gRPC's own with the largest headers that pass (measured),
64 KiB that it reads ahead, and an answer that is not read."""
MESSAGE_COPIES = 2
"""Of a message: as it arrived, and parsed."""
USER_BYTES = (
    MAX_CONNECTIONS * CONNECTION_BYTES + MAX_CALLS * CALL_BYTES + MAX_MESSAGES_BYTES * MESSAGE_COPIES
)  # 304 MiB
"""The most memory that one user's gRPC takes, however many connections and calls it tries."""
ALL_BYTES = (
    MAX_ALL_CONNECTIONS * CONNECTION_BYTES + MAX_ALL_CALLS * CALL_BYTES + MAX_ALL_MESSAGES_BYTES * MESSAGE_COPIES
)  # 768 MiB
"""The same of all users together."""
LINGER_SECONDS = 5
"""Time for a client whose connection is over to read why."""

_caused = log.limited("rpc")
"""For lines that clients cause."""


class GrpcFront:
    """Used from the event loop.

    Args:
        refuse: counts a refusal.
        turns: of the users, for all that is relayed.
    """

    def __init__(
        self, socket_files: SocketFiles, refuse: Callable[[Refusal], None], tasks: TaskSet, turns: Turns
    ) -> None:
        self._refuse, self._tasks = refuse, tasks
        self.server = ""
        """Path at which gRPC's own server can be connected to."""
        self._connections_of = Quota(MAX_CONNECTIONS, "gRPC connections", MAX_ALL_CONNECTIONS)
        self.quotas = CallQuotas(
            Quota(MAX_CALLS, "open gRPC calls", MAX_ALL_CALLS),
            Quota(
                MAX_MESSAGES_BYTES, "bytes of gRPC messages that are unfinished or unanswered", MAX_ALL_MESSAGES_BYTES
            ),
        )
        self.turns = turns
        self._relays: set[_Relay] = set()
        # Accepted apart from what is relayed: so much of it may wait that other users would wait to be accepted.
        self._listener = PathListener(
            socket_files, socket_files.grpc_path, self._accepted, tasks, _caused, turns, "grpc-accept"
        )
        self._seconds: asyncio.Task[None] | None = None
        self._peak = free_memory.Peak()

    def start(self, server: str) -> None:
        """Bind and accept. The caller holds the daemon's lock.

        Args:
            server: path at which gRPC's own server can be connected to.

        Raises:
            SocketInUse: it cannot be bound.
        """
        self.server = server
        self.listen()
        self._seconds = self._tasks.spawn(self._each_second(), name="grpc-seconds")

    def listen(self) -> None:
        """See `PathListener.start`."""
        self._listener.start()

    def stop_listening(self) -> None:
        """Take no more connections; those that there are go on."""
        self._listener.stop()

    def close(self) -> None:
        """End all connections."""
        if self._seconds is not None:
            self._seconds.cancel()
        for relay in tuple(self._relays):
            relay.close()

    def _accepted(self, connection: socket.socket, who: Credentials) -> None:
        uid = who.uid
        try:
            self._connections_of.take(uid)
        except LimitExceeded as error:
            self.refused(uid, error)
            with connection, contextlib.suppress(OSError):
                connection.send(http2_frames.turned_away(error))
            return
        self._relays.add(_Relay(self, connection, uid))

    def refused(self, uid: int, error: KVSidecarError) -> None:
        """Count a refusal, and log it if none was logged just now."""
        self._refuse(REASONS[type(error)])
        _caused.warning("gRPC refused", uid=uid, reason=str(error))

    def ended(self, relay: _Relay) -> None:
        self._relays.discard(relay)
        self._connections_of.give_back(relay.uid)

    async def _each_second(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            for relay in tuple(self._relays):
                relay.second()
            calls, nbytes = self.quotas.calls.held, self.quotas.nbytes.held
            # At the bounds above.
            await self._peak.used(len(self._relays) * CONNECTION_BYTES + calls * CALL_BYTES + nbytes)


class _Relay:
    """One connection: from the client through the gate to gRPC's server, and back.

    Each direction holds what one read has brought, and reads no more until it has been taken.
    """

    def __init__(self, front: GrpcFront, client: socket.socket, uid: int) -> None:
        self.uid = uid
        self._front = front
        self._gate = Gate(uid, front.quotas)
        self._client = _End(client, self._client_readable, self._update)
        self._server: _End | None = None
        """None until the client has begun as it must."""
        self._over = 0
        """Since how many seconds the connection only waits until the client has taken what it was sent."""
        self._closed = False
        self._update()

    def _update(self) -> None:
        """Listen to what may be read, and for room where something waits to be sent."""
        if self._closed:
            return
        client, server = self._client, self._server
        if self._over:
            if not client.unsent:
                self.close()
            else:
                client.listen(read=False)
            return
        # Replies that the client does not read hold up the server alone, but for what the gate adds to them.
        full = (server is not None and server.unsent) or len(client.unsent) + self._gate.injected > MAX_UNSENT_BYTES
        client.listen(read=not full and not client.waits and not self._gate.is_more)
        if self._gate.is_more and not full and not client.waits:
            client.waits = True
            self._front.turns.take(self.uid, self._read_client)
        if server is not None:
            server.listen(read=not client.unsent and not server.waits)

    def _client_readable(self) -> None:
        self._client.waits = True
        self._front.turns.take(self.uid, self._read_client)
        self._update()

    def _read_client(self) -> None:
        self._client.waits = False
        if self._closed or self._over:
            return
        data = b"" if self._gate.is_more else self._client.receive()
        if data is None:
            self.close()
            return
        self._pass(self._gate.from_client(data))
        self._update()

    def _pass(self, passed: Passed) -> None:
        for error in passed.refused:
            self._front.refused(self.uid, error)
        self._client.send(passed.to_client)
        if passed.to_server and not self._gate.over:
            try:
                self._to_server(passed)
            except OSError as error:
                busy = LimitExceeded(f"gRPC takes no more connections at this moment ({error.strerror})")
                self._front.refused(self.uid, busy)
                self._client.send(http2_frames.turned_away(busy))
                self._gate.close()
        if self._gate.over:
            self._end()

    def _to_server(self, passed: Passed) -> None:
        if self._server is None:
            server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            try:
                server.connect(self._front.server)
            except OSError:
                server.close()
                raise
            self._server = _End(server, self._server_readable, self._update)
        self._server.send(passed.to_server)
        if passed.calls:
            self._front.turns.end()  # gRPC is going to hand them over in one of the loop's next turns

    def _server_readable(self) -> None:
        if self._server is not None:
            self._server.waits = True
            self._front.turns.take(self.uid, self._read_server)
            self._update()

    def _read_server(self) -> None:
        server = self._server
        if self._closed or server is None:
            return
        server.waits = False
        if (data := server.receive()) is None:
            self._gate.close()
            self._end()
        else:
            self._client.send(self._gate.from_server(data))
        self._update()

    def _end(self) -> None:
        """Pass nothing any more; close when the client has taken what it was sent."""
        self._over = self._over or 1
        if self._server is not None:
            self._server.close()
            self._server = None

    def second(self) -> None:
        """A second has passed."""
        if self._over:
            self._over += 1
            if self._over > LINGER_SECONDS:
                self.close()
            return
        self._pass(self._gate.second())
        self._update()

    def close(self) -> None:
        if not self._closed:
            self._end()
            self._closed = True
            self._client.close()
            self._gate.close()
            self._front.ended(self)


class _End:
    """One end of a relay. Used without a transport: a transport reads without being asked, up to 256 KiB.

    Args:
        on_readable: called while there is something to read and `listen` has asked for it.
        on_sent: called when something was sent that had to wait for room.
    """

    def __init__(self, connection: socket.socket, on_readable: Callable[[], None], on_sent: Callable[[], None]) -> None:
        self._connection, self._on_readable, self._on_sent = connection, on_readable, on_sent
        self._loop = asyncio.get_running_loop()
        self._listens = self._wants_room = False
        self.waits = False
        """Whether its next read waits for its turn."""
        self.unsent = b""

    def listen(self, *, read: bool) -> None:
        if read != self._listens:
            self._listens = read
            if read:
                self._loop.add_reader(self._connection.fileno(), self._on_readable)
            else:
                self._loop.remove_reader(self._connection.fileno())
        if bool(self.unsent) != self._wants_room:
            self._wants_room = not self._wants_room
            if self._wants_room:
                self._loop.add_writer(self._connection.fileno(), self._has_room)
            else:
                self._loop.remove_writer(self._connection.fileno())

    def receive(self) -> bytes | None:
        """What has arrived, perhaps nothing; None at the end of the connection."""
        try:
            return self._connection.recv(READ_BYTES) or None
        except BlockingIOError:
            return b""
        except OSError:
            return None

    def send(self, data: bytes) -> None:
        """Send, and keep what has no room. What cannot be sent any more is dropped; the end is seen when reading."""
        if not self.unsent:
            self.unsent = data
            self._flush()
        elif data:
            self.unsent += data

    def _flush(self) -> None:
        try:
            while self.unsent:
                self.unsent = self.unsent[self._connection.send(self.unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self.unsent = b""

    def _has_room(self) -> None:
        self._flush()
        self._on_sent()

    def close(self) -> None:
        self.unsent = b""
        self.listen(read=False)
        self._connection.close()
