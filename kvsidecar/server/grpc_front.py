"""Relays each connection of a gRPC client through the gate to gRPC's own server, and limits what a user's may cost.

gRPC in Python reveals neither the peer nor how many connections a user has. `grpc_server` and `tls_front` accept, and
know the user; gRPC's own server listens at a socket that only this process can reach.
"""

from __future__ import annotations

import asyncio
import secrets
import select
import socket
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from enum import Enum

from kvsidecar.core.quota import Quota
from kvsidecar.errors import KVSidecarError, LimitExceeded, Refusal
from kvsidecar.protocol.framing import MAX_MESSAGE_BYTES
from kvsidecar.server.handler import REASONS
from kvsidecar.server.http2_gate import CALLS_AT_ONCE, CallQuotas, Gate, GateResult
from kvsidecar.support import free_memory, log
from kvsidecar.support.peer import Credentials
from kvsidecar.support.poll_set import READABLE, WRITABLE, PollSet
from kvsidecar.support.tasks import TaskSet
from kvsidecar.support.turns import Turns

MAX_CONNECTIONS, MAX_ALL_CONNECTIONS = 512, 1024
"""Connections per user and in total. An engine has one for each rank, and one for its scheduler."""
MAX_CALLS, MAX_ALL_CALLS = 512, 2048
"""Open calls per user and in total. Without the local protocol, a rank's Attach stream is one of them."""
MAX_MESSAGES_BYTES, MAX_ALL_MESSAGES_BYTES = 16 * MAX_MESSAGE_BYTES, 32 * MAX_MESSAGE_BYTES
"""Bytes, per user and in total, of messages that are incomplete or whose call has not been answered."""
READ_BYTES = 64 * 1024
"""The most that is read from a connection before others have their turn, and kept for an end that takes no more."""
MAX_UNSENT_BYTES = READ_BYTES + 24 * 1024
"""From this many unsent bytes on, nothing more is read from a client that does not read its answers and the gate's."""

CONNECTION_BYTES = 192 * 1024
"""The most memory of a connection without calls: bytes read and not passed on, in both directions, and 20 KiB of gRPC's
own (measured)."""
CALL_BYTES = 160 * 1024
"""The most memory of a call without the messages above: 40 KiB of gRPC's own with the largest headers that pass
(measured), 64 KiB that it reads ahead, and an answer that is not read."""
MESSAGE_COPIES = 2
"""Copies of a message in memory: as it arrived, and parsed."""
CALL_SECONDS = 25e-6
"""Time that gRPC and the loop take for a call that begins, or ends, without its answer (measured)."""
GIVEN_UP_SECONDS = 0.001
"""Time that a user pays besides for a call that it resets, or leaves open when it closes a connection: 300 such calls a
second. Some are begun by gRPC only to be ended, in iterations that take as long as all that have come."""
BEGIN_SECONDS = 0.0005
"""Time that gRPC takes for a connection."""
PAUSE_SECONDS = 0.002
"""Time between batches of `CALLS_AT_ONCE` late calls that are ended. gRPC ends in one iteration what came in
several."""
RELAYS_AT_ONCE = 16
"""Connections whose second is counted in one iteration of the loop."""
LINGER_SECONDS = 5
"""Time for a client whose connection is over to read why."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits for one user, or for all users together."""

    connections: int
    calls: int
    messages_bytes: int

    def memory(self, connection_bytes: int) -> int:
        """The most memory that this allows, in bytes."""
        return self.connections * connection_bytes + self.calls * CALL_BYTES + self.messages_bytes * MESSAGE_COPIES


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the connections that come in over one listener."""

    user: Bounds
    everyone: Bounds
    connection_bytes: int = CONNECTION_BYTES


LIMITS = Limits(
    Bounds(MAX_CONNECTIONS, MAX_CALLS, MAX_MESSAGES_BYTES),
    Bounds(MAX_ALL_CONNECTIONS, MAX_ALL_CALLS, MAX_ALL_MESSAGES_BYTES),
)
"""Limits of the Unix socket."""
USER_BYTES = LIMITS.user.memory(CONNECTION_BYTES)  # 304 MiB
"""The most memory that one user's gRPC takes, however many connections and calls it tries."""
ALL_BYTES = LIMITS.everyone.memory(CONNECTION_BYTES)  # 768 MiB
"""The most memory that all users' gRPC takes."""


@dataclass(frozen=True, slots=True)
class OpenedConnection:
    """A connection of the Unix socket."""

    connection: socket.socket
    """Closed once the client's end is."""
    who: Credentials
    at: float
    """When it was accepted, on the clock of the boot (CLOCK_BOOTTIME)."""


@dataclass(frozen=True, slots=True)
class GrpcClient:
    """The client at the other end of a connection."""

    user: Hashable
    """The user that the limits count it for."""
    shown: Mapping[str, object]
    """The user as the log shows it."""
    name: str = ""
    """Abstract name at which gRPC's server sees the connection; empty: it sees none."""
    opened: OpenedConnection | None = None
    """On the Unix socket: the connection, and the process that has opened it."""


_ABSTRACT = "unix-abstract:"
"""Prefix of a connection's name where gRPC names it."""


def new_name() -> str:
    """A new name for one connection: nobody else can have bound it before."""
    return f"kvsidecar-{secrets.token_hex(16)}"


MakeEnd = Callable[[PollSet, Callable[[], None], Callable[[], None]], "End"]
"""Makes the client's end of a connection; see `End`."""


class GrpcFront:
    """The connections that come in over one listener. Used from the event loop.

    Args:
        refuse: counts a refusal.
        turns: the users' turns, for all that is relayed.
    """

    def __init__(self, limits: Limits, refuse: Callable[[Refusal], None], tasks: TaskSet, turns: Turns) -> None:
        self.refuse = refuse
        self._limits, self._tasks = limits, tasks
        self._server = ""
        user, everyone = limits.user, limits.everyone
        self._connections_of = Quota(user.connections, "gRPC connections", everyone.connections)
        self.quotas = CallQuotas(
            Quota(user.calls, "open gRPC calls", everyone.calls),
            Quota(
                user.messages_bytes,
                "bytes of gRPC messages that are unfinished or unanswered",
                everyone.messages_bytes,
            ),
        )
        self.turns, self.poll_set = turns, PollSet()
        self.relays: set[_Relay] = set()
        """The open connections."""
        self._clients: dict[str, GrpcClient] = {}
        """Clients by the name at which gRPC's server sees their connection."""
        self._seconds: asyncio.Task[None] | None = None
        self._caused = log.limited("rpc")
        """Logger for lines that clients cause."""
        self._peak = free_memory.Peak()

    def start(self, server: str) -> None:
        """Take connections.

        Args:
            server: path at which gRPC's own server can be connected to.
        """
        self._server = server
        self._seconds = self._tasks.keep(self._each_second, name="grpc-seconds")

    def close(self) -> None:
        """End all connections."""
        if self._seconds is not None:
            self._seconds.cancel()
        for relay in tuple(self.relays):
            relay.close(at_once=True)
        self.poll_set.close()

    def admit(self, client: GrpcClient, make_end: MakeEnd) -> None:
        """Serve a connection, or close it silently: a gRPC client that has received the server's settings starts over
        at once, again and again, and its calls wait; one that has not waits longer each time, and they fail."""
        try:
            self._connections_of.take(client.user)
        except LimitExceeded as error:
            self.refused(client.shown, error)
            make_end(self.poll_set, _nothing, _nothing).close()
            return
        if client.name:
            self._clients[client.name] = client
        relay = _Relay(self, client, make_end)
        self.relays.add(relay)
        relay.client_readable()  # what TLS has read already, the socket does not announce

    def client_at(self, peer: str) -> GrpcClient | None:
        """The client of the connection whose peer gRPC's server names like this; None once it has ended."""
        return self._clients.get(peer.removeprefix(_ABSTRACT))

    def connect(self, client: GrpcClient) -> socket.socket:
        """A connection to gRPC's server. Raises OSError."""
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            if client.name:
                server.bind("\0" + client.name)
            server.connect(self._server)
        except OSError:
            server.close()
            raise
        return server

    def refused(self, shown: Mapping[str, object], error: KVSidecarError) -> None:
        """Count a refusal, and log it if none was logged just now.

        Args:
            shown: its user, for the log.
        """
        self.refuse(REASONS[type(error)])
        self._caused.warning("gRPC refused", **shown, reason=str(error))

    def ended(self, relay: _Relay) -> None:
        if relay in self.relays:
            self.relays.discard(relay)
            self._clients.pop(relay.client.name, None)
            self._connections_of.give_back(relay.client.user)

    async def _each_second(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            ended = 0
            for number, relay in enumerate(tuple(self.relays), 1):
                relay.second()
                while late := relay.end_late():
                    ended += late
                    if ended >= CALLS_AT_ONCE:
                        ended = 0
                        await asyncio.sleep(PAUSE_SECONDS)
                if number % RELAYS_AT_ONCE == 0:
                    await self.turns.loop_time.turn()
            connections, calls, nbytes = self._connections_of, self.quotas.calls, self.quotas.nbytes
            most = self._memory(connections.peak(), calls.peak(), nbytes.peak())
            await self._peak.used(self._memory(connections.held, calls.held, nbytes.held), most)

    def _memory(self, connections: int, calls: int, nbytes: int) -> int:
        """The most memory of these connections, calls and bytes, by the bounds above."""
        return connections * self._limits.connection_bytes + calls * CALL_BYTES + nbytes


def _nothing() -> None:
    pass


class _RelayState(Enum):  # each follows the one before it
    PASSING = "passing"
    LINGERING = "lingering"
    """Nothing passes any more; the client has yet to read what it was sent."""
    CLOSED = "closed"
    """The client's end is closed. The server's closes with the last calls, see `_Relay._end_calls`."""


class _Relay:
    """One connection: from the client through the gate to gRPC's server, and back.

    Each direction holds what one read has brought, and reads no more until it has been taken.
    """

    def __init__(self, front: GrpcFront, client: GrpcClient, make_end: MakeEnd) -> None:
        self.client = client
        self._front = front
        self._gate = Gate(client.user, front.quotas)
        self._client = make_end(front.poll_set, self.client_readable, self._update)
        self._server: End | None = None
        """None until the client's preface and settings have arrived."""
        self._state = _RelayState.PASSING
        self._lingered = 0
        """How many seconds ago the last bytes passed."""

    def _update(self) -> None:
        """Listen to what may be read, and for room where something waits to be sent."""
        client, server = self._client, self._server
        if self._state is not _RelayState.PASSING:
            if client.unsent:
                client.listen(read=False)
            elif self._state is _RelayState.LINGERING:
                self.close()
            return
        # Replies that the client does not read hold up the server alone, but for what the gate adds to them.
        full = (server is not None and server.unsent) or len(client.unsent) + self._gate.injected > MAX_UNSENT_BYTES
        client.listen(read=not full and not client.waits and not self._gate.is_more)
        if self._gate.is_more and not full and not client.waits:
            client.waits = True
            self._front.turns.take(self.client.user, self._read_client)
        if server is not None:
            server.listen(read=not client.unsent and not server.waits)

    def client_readable(self) -> None:
        self._client.waits = True
        self._front.turns.take(self.client.user, self._read_client)
        self._update()

    def _read_client(self) -> None:
        self._client.waits = False
        if self._state is not _RelayState.PASSING:
            return
        if self._client.has_hung_up():
            self.close()  # at no cost: thousands of such connections would hold their descriptors for a minute
            return
        data = b"" if self._gate.is_more else self._client.receive()
        if data is None:
            self.close()
            return
        self._pass(self._gate.from_client(data))
        self._update()

    def _pass(self, passed: GateResult) -> None:
        for error in passed.refused:
            self._front.refused(self.client.shown, error)
        self._client.send(passed.to_client)
        if passed.to_server and not self._gate.over:
            try:
                self._to_server(passed)
            except OSError as error:
                busy = LimitExceeded(f"gRPC takes no more connections at this moment ({error.strerror})")
                self._front.refused(self.client.shown, busy)
                self._gate.close()
        if self._gate.over:
            self._end()

    def _to_server(self, passed: GateResult) -> None:
        front = self._front
        if self._server is None:
            self._server = End(front.connect(self.client), front.poll_set, self._server_readable, self._update)
            front.turns.charge(self.client.user, BEGIN_SECONDS)
        self._server.send(passed.to_server)
        if passed.calls:
            seconds = passed.calls * CALL_SECONDS + passed.given_up * GIVEN_UP_SECONDS
            front.turns.charge(self.client.user, seconds)

    def _server_readable(self) -> None:
        if self._server is not None:
            self._server.waits = True
            self._front.turns.take(self.client.user, self._read_server)
            self._update()

    def _read_server(self) -> None:
        server = self._server
        if self._state is not _RelayState.PASSING or server is None:
            return
        server.waits = False
        if (data := server.receive()) is None:
            self._gate.end_calls(self._gate.calls)
            self._end()
        else:
            self._client.send(self._gate.from_server(data))
        self._update()

    def _end(self) -> None:
        """Pass nothing any more; close when the client has read what it was sent."""
        self._state = _RelayState.LINGERING
        self._gate.close()
        self._end_calls()

    def _end_calls(self) -> None:
        """gRPC ends all calls of a connection that closes in one iteration of the loop. So they are ended before, a few
        in each iteration, and the connection with the last ones."""
        server = self._server
        if server is not None and self._gate.calls > CALLS_AT_ONCE:
            server.listen(read=False)
            server.send(self._gate.end_calls())
            self._front.turns.charge(self.client.user, CALLS_AT_ONCE * (CALL_SECONDS + GIVEN_UP_SECONDS))
            self._front.turns.take(self.client.user, self._end_calls)
            return
        if self._gate.calls:
            self._front.turns.charge(self.client.user, self._gate.calls * (CALL_SECONDS + GIVEN_UP_SECONDS))
        self._gate.end_calls()
        if server is not None:
            server.close()
            self._server = None
        if self._state is _RelayState.CLOSED:
            self._front.ended(self)

    def second(self) -> None:
        """Count a second."""
        if self._state is _RelayState.PASSING:
            self._pass(self._gate.second())
            self._update()
        elif self._state is _RelayState.LINGERING:
            self._lingered += 1
            if self._lingered >= LINGER_SECONDS:
                self.close()

    def end_late(self) -> int:
        """End some of the calls that are late. Returns how many."""
        if self._state is not _RelayState.PASSING:
            return 0
        passed = self._gate.end_late()
        self._pass(passed)
        self._update()
        return passed.calls

    def close(self, *, at_once: bool = False) -> None:
        """Close the client's end. The calls end at once, or a few in each iteration."""
        was, self._state = self._state, _RelayState.CLOSED
        self._client.close()
        self._gate.close()
        if at_once:
            self._gate.end_calls(self._gate.calls)
        if at_once or was is _RelayState.PASSING or self._server is None:  # else they are ending already
            self._end_calls()


class End:
    """One end of a relay. Used without a transport: a transport reads without being asked, up to 256 KiB.

    Args:
        poll_set: watches the connection.
        on_readable: called while there is something to read and `listen` has asked for it.
        on_sent: called when something was sent that had to wait for room.
    """

    read_bytes = READ_BYTES
    """The most that is read at a time."""

    def __init__(
        self, connection: socket.socket, poll_set: PollSet, on_readable: Callable[[], None], on_sent: Callable[[], None]
    ) -> None:
        self._connection, self._poll_set = connection, poll_set
        self._on_readable, self._on_sent = on_readable, on_sent
        self._watched = 0
        """Events of the poll set."""
        self.waits = False
        """Its next read waits for its turn."""
        self.unsent = b""

    def listen(self, *, read: bool) -> None:
        events = (READABLE if read else 0) | (WRITABLE if self.unsent else 0)
        if events != self._watched:
            self._watched = events
            self._poll_set.watch(self._connection.fileno(), events, self._happened)

    def _happened(self, events: int) -> None:
        # The end of the connection is news of both kinds.
        if events & ~READABLE and self._watched & WRITABLE:
            self._flush()
            self._on_sent()
        if events & ~WRITABLE and self._watched & READABLE:
            self._on_readable()

    def has_hung_up(self) -> bool:
        """Whether the other side is closed altogether: nobody reads replies, whatever was asked before."""
        look = select.poll()
        look.register(self._connection, 0)
        return bool(look.poll(0))

    def receive(self) -> bytes | None:
        """What has arrived, perhaps nothing; None at the end of the connection."""
        try:
            return self._connection.recv(self.read_bytes) or None
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

    def close(self) -> None:
        self.unsent = b""
        self.listen(read=False)
        self._connection.close()
        # Of the relay, which has this end: otherwise both stay until the collector of cycles comes by.
        self._on_readable = self._on_sent = _nothing
