"""The attach socket: identity, shared memory and liveness of clients.

gRPC transfers no file descriptors and, in Python, no peer identity (grpc issue 28755). So clients connect here first,
or attach over gRPC alone, with fewer kinds of memory (`stream_clients`). The kernel identifies a client (SO_PEERCRED),
its descriptors arrive as SCM_RIGHTS, and it gets a token for gRPC. The connection stays open; when the process dies in
any way, the kernel closes it. After the Welcome, the connection carries the local protocol, unless that is off.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum

from kvsidecar.core.peer import Peer
from kvsidecar.core.sessions import Instances
from kvsidecar.errors import InvalidRequest, KVSidecarError, LimitExceeded, Refusal, Unfinished
from kvsidecar.protocol.framing import FrameReader, FrameTooLong, frame
from kvsidecar.server.arrivals import Arrival, Arrivals
from kvsidecar.server.handler import REASONS, check_protocol
from kvsidecar.server.local_protocol import LocalConnection
from kvsidecar.server.path_listener import PathListener
from kvsidecar.server.socket_files import SocketFiles
from kvsidecar.support import fence, log
from kvsidecar.support import peer as peers
from kvsidecar.support.poll_set import READABLE, PollSet
from kvsidecar.support.tasks import TaskSet
from kvsidecar.support.turns import Turns
from kvsidecar.v1 import sidecar_pb2 as pb

MAX_HELLO_BYTES = 4096
HELLO_SECONDS = 5.0
"""Time limit for the Hello: silent connections would hold descriptors."""
TURNS = "attach"
"""Names, with a user id, the user in `Turns` for the steps of the connections."""

_log = log.get("attach")
_caused = log.limited("attach")


@dataclass(eq=False)
class AttachSocket:
    """Serves the attach socket on the event loop.

    Args:
        on_gone: called with a peer whose connection has ended.
        local_connection: serves the local protocol to a peer; None if the protocol is off.
        turns: the users' turns, for the steps of their connections until the Welcome, and for the last one. The steps
            between them are `local_connection`'s.
        arrivals: admits the connections, with those of other carriers.
        pidfds: returns the copiers' processes and a pidfd of each. A client gets them and the daemon's own with its
            Welcome: its memory may be in use until all of these processes have ended.
    """

    socket_files: SocketFiles
    _: KW_ONLY
    epoch: int
    instances: Instances
    on_gone: Callable[[Peer], None]
    local_connection: Callable[[Peer], LocalConnection] | None
    refuse: Callable[[Refusal], None]
    tasks: TaskSet
    turns: Turns
    arrivals: Arrivals = field(default_factory=Arrivals)
    pidfds: Callable[[], Mapping[int, int]] = dict

    def __post_init__(self) -> None:
        self.poll_set = PollSet()
        # In turn with what follows: else connections would come faster than their Hellos are read.
        self._listener = PathListener(
            self.socket_files, self.socket_files.attach_path, self._accepted, self.tasks, _caused, self.turns, TURNS
        )
        self.connections: set[_Connection] = set()
        """The open connections."""

    def start(self) -> None:
        """See `PathListener.start`."""
        self._listener.start()

    async def stop(self) -> None:
        self._listener.stop()
        for connection in tuple(self.connections):
            connection.shut_down()

    def _accepted(self, connection: socket.socket, who: peers.Credentials) -> None:
        try:
            arrival = self.arrivals.begin(connection, who.uid)
        except LimitExceeded as error:
            with connection:
                self.reject(connection, error)
            return
        self.connections.add(_Connection(self, arrival, who))

    def reject(self, connection: socket.socket, error: KVSidecarError) -> None:
        """Count a refusal and send the error, as far as the socket buffer takes it."""
        self.refuse(REASONS.get(type(error), Refusal.REGISTER_REFUSED))
        _caused.warning("attach connection refused", error=str(error))
        with contextlib.suppress(OSError):
            connection.send(frame(pb.Welcome(epoch=self.epoch, error=str(error)).SerializeToString()))

    def welcome(self, arrival: Arrival, who: peers.Credentials, hello: pb.Hello) -> tuple[Peer, LocalConnection | None]:
        """Add the client and answer its Hello. Returns what serves the rest of its connection, if the local protocol is
        on.

        Raises:
            OSError: the connection is broken, or the process has no descriptors.
        """
        pidfds = self.pidfds()
        shared = fence.create() if hello.fence else None
        peer = self.instances.add_peer(
            who,
            hello.client,
            arrival.take_fds(),
            on_closed=lambda count: self.arrivals.closed(arrival, count),
            groups=peers.groups(arrival.connection),
            copiers=frozenset(pidfds),
            fence=shared,
        )
        _log.debug("client connected", pid=who.pid, uid=who.uid, client=hello.client, fds=hello.num_fds)
        local = self.local_connection(peer) if self.local_connection is not None else None
        welcome = pb.Welcome(
            token=peer.token,
            epoch=self.epoch,
            local_protocol=local is not None,
            num_pidfds=1 + len(pidfds),
            fence=hello.fence,
        )
        try:
            own = os.pidfd_open(os.getpid())
            try:
                # In one call, which never waits: nothing was sent on this connection before.
                sent = [own, *pidfds.values(), *(() if shared is None else (shared,))]
                socket.send_fds(arrival.connection, [frame(welcome.SerializeToString())], sent)
            finally:
                os.close(own)
        except OSError:
            self.on_gone(peer)
            raise
        return peer, local

    def ended(self, connection: _Connection, arrival: Arrival, peer: Peer | None) -> None:
        self.connections.discard(connection)
        self.arrivals.end(arrival)
        if peer is not None:
            self.on_gone(peer)


class _ConnectionState(Enum):
    """::

    HELLO --welcome--> SERVED --gone--> LEAVING --its turn--> ENDED
      '----refused, broken-----'--broken------------------------^
    """

    HELLO = "hello"
    """Not all of its Hello has been read."""
    SERVED = "served"
    LEAVING = "leaving"
    """Its client has gone; cleaning up waits for its turn."""
    ENDED = "ended"


_NEXT = {
    _ConnectionState.HELLO: (_ConnectionState.SERVED, _ConnectionState.ENDED),
    _ConnectionState.SERVED: (_ConnectionState.LEAVING, _ConnectionState.ENDED),
    _ConnectionState.LEAVING: (_ConnectionState.ENDED,),
    _ConnectionState.ENDED: (),
}


class _Connection:
    """One connection, from its acceptance to its end.

    What it does before its client is welcome, and at its end, are steps in its user's turns: a client may begin as many
    connections as it can, and all those of a process end at once.
    """

    def __init__(self, owner: AttachSocket, arrival: Arrival, who: peers.Credentials) -> None:
        self._owner, self._arrival, self._who = owner, arrival, who
        self._connection = arrival.connection
        self._loop = asyncio.get_running_loop()
        self._frames = FrameReader(MAX_HELLO_BYTES)
        self._state = _ConnectionState.HELLO
        self._peer: Peer | None = None
        """None before its Welcome."""
        self._local: LocalConnection | None = None
        self._transport: asyncio.Transport | None = None  # as it behaves: uvloop's is no subclass
        self._pidfd: int | None = None
        self._late = self._loop.call_later(HELLO_SECONDS, self._take, self._refuse_late)
        self._watch(self._connection.fileno(), self._readable)

    def _enter(self, state: _ConnectionState) -> None:
        """The only place where the state changes."""
        assert state in _NEXT[self._state], (self._state, state)
        self._state = state

    def shut_down(self) -> None:
        """The daemon exits. The end of the stream is seen, and cleaned up as for a client that has gone."""
        if self._local is not None and self._transport is not None:
            self._local.shut_down()
            return
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _watch(self, fd: int, call: Callable[[], None] | None) -> None:
        """Call this while the descriptor is readable; None: no more."""
        self._owner.poll_set.watch(fd, READABLE if call else 0, lambda _: call() if call else None)

    def _take(self, step: Callable[[], None]) -> None:
        self._owner.turns.take((TURNS, self._who.uid), step)

    # -- until the Welcome -----------------------------------------------------------------------------------------

    def _readable(self) -> None:
        self._watch(self._connection.fileno(), None)
        self._arrival.waits = not self._frames.buffered  # else it has come in pieces
        self._take(self._read)

    def _read(self) -> None:
        self._arrival.waits = False
        if self._state is not _ConnectionState.HELLO:  # it was late
            return
        try:
            hello = self._receive()
            if hello is None:
                self._watch(self._connection.fileno(), self._readable)
                return
            check_protocol(hello.protocol)
            self._owner.arrivals.complete(self._arrival)
            self._late.cancel()
            self._peer, self._local = self._owner.welcome(self._arrival, self._who, hello)
            self._enter(_ConnectionState.SERVED)
            self._wait_until_gone()
        except KVSidecarError as error:
            self._refuse(error)
        except OSError as error:
            _log.debug("attach connection broke", error=str(error))
            self._end()

    def _receive(self) -> pb.Hello | None:
        """Receive what has arrived, which is most often all. Returns the Hello when it is complete; its descriptors are
        the arrival's.

        Raises:
            InvalidRequest: it does not parse, or they do not match.
            LimitExceeded: its user has too many.
        """
        frames, arrival = self._frames, self._arrival
        payload = None
        for _ in ("length", "payload"):
            try:
                chunk, fds, truncated = peers.recv_fds(self._connection, frames.missing)
            except BlockingIOError:
                return None
            if truncated:
                peers.close_all(fds)
                raise InvalidRequest(
                    f"descriptors were lost: more than {peers.MAX_FDS} came with one byte, or the daemon has no room "
                    "for more (ulimit -n, LimitNOFILE=)"
                )
            self._owner.arrivals.received(arrival, fds)
            if not chunk:
                raise InvalidRequest("the client closed the connection before its Hello was complete")
            frames.feed(chunk)
            try:
                payload = frames.next()
            except FrameTooLong as error:
                text = f"a Hello of {error.length} bytes is over the limit of {MAX_HELLO_BYTES}"
                raise InvalidRequest(text) from error
            if payload is not None:
                break  # its length came in an earlier turn
        if payload is None:
            return None
        try:
            hello = pb.Hello.FromString(payload)
        except Exception as error:  # protobuf's DecodeError is not part of its typed interface
            raise InvalidRequest(f"the Hello does not parse: {error}") from error
        if hello.num_fds != len(arrival.fds):
            raise InvalidRequest(f"the Hello announces {hello.num_fds} descriptors, but {len(arrival.fds)} arrived")
        return hello

    def _refuse_late(self) -> None:
        if self._state is _ConnectionState.HELLO:
            self._refuse(Unfinished(f"no Hello was complete within {HELLO_SECONDS:g} s"))

    def _refuse(self, error: KVSidecarError) -> None:
        self._owner.reject(self._connection, error)
        self._end()

    # -- after it --------------------------------------------------------------------------------------------------

    def _wait_until_gone(self) -> None:
        """Wait until the process has gone: until the connection is closed or its pidfd reports its exit.

        Neither is enough alone: a forked child that outlives the engine keeps the connection open, and a process in a
        PID namespace that is not visible here may have no pidfd.
        """
        self._pidfd = peers.pidfd(self._connection)
        if self._pidfd is not None:
            self._watch(self._pidfd, self.gone)
        if self._local is not None:
            self._local.closed.add_done_callback(lambda _: self.gone())
            self._owner.tasks.spawn(self._serve(self._local), name="attach-connection")
        else:
            self._watch(self._connection.fileno(), self._drain)

    async def _serve(self, local: LocalConnection) -> None:
        try:
            self._transport, _ = await self._loop.connect_accepted_socket(lambda: local, self._connection)
        except OSError as error:
            _log.debug("attach connection broke", error=str(error))
            self.gone()
        if self._state is _ConnectionState.ENDED:
            self._abort()

    def _drain(self) -> None:
        """The end of the stream comes when every copy of the client's descriptor is closed."""
        try:
            if self._connection.recv(1024):
                return
        except BlockingIOError:
            return
        except OSError as error:
            _log.debug("attach connection broke", error=str(error))
        self.gone()

    def gone(self) -> None:
        """Note that the client has gone; may be called again."""
        if self._state is _ConnectionState.SERVED:
            self._enter(_ConnectionState.LEAVING)
            self._stop_listening()
            self._take(self._end)

    def _stop_listening(self) -> None:
        if self._pidfd is not None:
            self._watch(self._pidfd, None)
        if self._local is None:
            self._watch(self._connection.fileno(), None)

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _end(self) -> None:
        if self._state is not _ConnectionState.LEAVING:
            self._stop_listening()
        self._enter(_ConnectionState.ENDED)
        self._late.cancel()
        if self._pidfd is not None:
            os.close(self._pidfd)
        self._abort()
        self._connection.close()
        self._owner.ended(self, self._arrival, self._peer)
