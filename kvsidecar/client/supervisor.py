"""The connection supervisor: connects, attaches, notices a lost daemon, ends its jobs safely, and connects again.

How the client works
====================

A client has one `Supervisor` and one `Ledger` for its whole life, and one `Transport` with one `AttachSession` for each
run of the daemon that it connects to. `states` draws the states of the connection. While it is connected, the
supervisor waits for the end of the daemon's process, of the attach socket or of the stream, whichever is first, and
makes the circuit breaker's probes. While a session ends, a job that was not sent ends at once; a store, when its daemon
has announced its shutdown; the others, when there is proof (`quiescing`) that no copy of the session runs. There is no
new session with that run of the daemon before the memory of the last one is unmapped.

A store goes down through these layers; no layer calls back up::

    Client.store -> Ledger.add -> AttachSession.send -> SendQueue.put -> DaemonStream.pump -> socket, or gRPC's thread
                       '-> HostOrder, if it waits for an event: then AttachSession.send

Its result comes up: ``DaemonStream.receive`` returns replies -> `AttachSession` handles them -> `Ledger.finish` ->
``Client.poll``.

Threads
-------

the engine's
    May call any method. A thread that waits or polls reads the answers itself (`AttachSession.read_now`).
kvsidecar-keep, the supervisor's
    From `start` to `close`. Only this thread publishes, withdraws and closes a transport and a session.
kvsidecar-read
    One per session. Waits for the stream and handles its replies; at the end of the stream it marks the session ended
    and wakes the supervisor.
kvsidecar-flush
    From the first message that found the socket full to the end of the stream. Sends what the socket had no room for.
kvsidecar-order
    From the first job that waits on the host until the client is closed. Waits for the engine's events.
gRPC's
    One set per channel. Iterate the send queue, deliver answers.

Locks
-----

In the order in which they are taken:

1. ``AttachSession._receive_lock``: one thread at a time receives and handles replies, which keeps them in order. A
   thread that only helps does not wait for it.
2. ``Monitor.lock``, with the condition ``Monitor.changed``: guards the ledger, the send queue, the session's fields,
   the stream's unsent bytes, and what the supervisor publishes. Every change notifies the condition. No system call
   that may wait is made under it. A step reads ``Supervisor.transport`` and ``.session``, ``Ledger.finished`` and
   `worth_polling` without it: the next step sees what it misses.
3. Leaf locks, under which no other is taken: the breaker's, a `Waker`'s, a `Channel`'s, ``HostOrder._lock``.
   ``LocalCalls._lock`` is held from a call's request to its answer, and together with no other.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import grpc

from kvsidecar.client.buffers import Descriptor
from kvsidecar.client.connection import LostDaemon, connect
from kvsidecar.client.grpc_transport import GrpcTransport
from kvsidecar.client.ledger import Ledger
from kvsidecar.client.local_transport import LocalTransport
from kvsidecar.client.messages import Registration, TransportError, Watching
from kvsidecar.client.quiescing import has_ended, quiesce
from kvsidecar.client.session import AttachSession
from kvsidecar.client.states import CLOSING, CONNECTING, HUNG, PUBLISHED, ConnectionState, Event, after
from kvsidecar.client.transport import Transport
from kvsidecar.client.types import CLOSED, DAEMON_LOST
from kvsidecar.client.waiting import DaemonPoller, Monitor, Waker
from kvsidecar.errors import AttachRefused, ClientError, DaemonUnreachable
from kvsidecar.protocol.paths import attach_path
from kvsidecar.support.breaker import Backoff, CircuitBreaker
from kvsidecar.v1 import sidecar_pb2 as pb

_log = logging.getLogger("kvsidecar.client")

HANG_SECONDS = 10.0
"""A daemon that has not ended a job this long after its deadline hangs, and is given up."""
HANG_CHECK_SECONDS = 5.0
LATE_SECONDS = 0.05
"""Interval of the checks for late answers, which no call reads."""
STREAM_END_SECONDS = 1.0
"""How long to wait for the end of a dead daemon's stream, which takes milliseconds; then it is broken off."""


@dataclass(frozen=True, slots=True)
class Dialling:
    """How a client connects: arguments of `Client`. Times are in seconds."""

    socket: str
    name: str
    local: bool
    timeout: float
    """Time limit of a connection, and of a registration."""
    step_budget: float
    """Time limit of a lookup, and of the breaker's probes."""
    breaker: CircuitBreaker
    backoff: Backoff
    quiet: bool = False
    """Whether another client of the same engine logs the state of the connection."""


class Supervisor:
    """Runs in one thread, from `start` to `close`. The client's lock guards what it publishes."""

    def __init__(self, dialling: Dialling, ledger: Ledger, monitor: Monitor, *, idle: bool = False) -> None:
        self._dialling = dialling
        self._ledger = ledger
        self._changed = monitor.changed
        self._monitor = monitor
        self._registration: Registration | Watching | None = None
        self._state = ConnectionState.IDLE
        self._close_at = math.inf
        self._wake = Waker()
        self._poller = DaemonPoller(self._wake)
        self._cancel = Waker()
        """Stays readable from `close` on."""
        self._thread: threading.Thread | None = None
        self._lost = ""
        """How the last daemon was lost, until another one answers: the reason with which jobs end. Until then retries
        are not logged."""
        self._refused_before = ""
        self._attached_before = False
        self.transport: Transport | None = None
        """Set while connected; may be read without the lock."""
        self.session: AttachSession | None = None
        """Set while attached; may be read without the lock."""
        self.idle = idle
        """Whether the GPU is idle, for every session."""
        self.late_answers: set[object] = set()
        """Calls whose answers nobody waits for any more; the leases that they bring are released when they are read."""
        self.on_connected: Callable[[Transport], None] = lambda _: None
        """Called in the supervisor's thread with each new transport."""
        self.attempts = 0
        """Attempts to connect and attach that have succeeded or failed."""
        self.error: ClientError | None = None
        """Why there is no connection."""
        self.lost_daemon: LostDaemon | None = None
        """A daemon that may still have the memory mapped, after `close` or behind a fence."""

    # -- for the client ----------------------------------------------------------------------------------------------

    def start(self, registration: Registration | Watching, *, once: bool = False) -> None:
        """Begin to connect and attach. A connection without a registration is closed first.

        Args:
            once: end the thread if the first attempt fails.
        """
        with self._changed:
            self._enter(Event.TRY if once else Event.START)
            self._registration, self.error = registration, None
        self._wake.set()

    @property
    def has_registration(self) -> bool:
        return self._registration is not None

    def start_without_registration(self) -> None:
        """Begin to connect, unless it has begun."""
        with self._changed:
            self._enter(Event.DIAL)

    def _enter(self, event: Event) -> ConnectionState:
        """The only place where the state changes. With the lock held."""
        self._state = after(self._state, event)
        if self._state not in PUBLISHED:
            self.transport = self.session = None
        if self._state in CONNECTING and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvsidecar-keep", daemon=True)
            self._thread.start()  # it waits for the lock
        self._changed.notify_all()
        return self._state

    def wait_attempt(self, before: int, timeout: float) -> bool:
        """Wait until more than ``before`` attempts have ended. False after ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self.attempts > before or self._state in CLOSING, timeout)

    def wait_session(self, timeout: float) -> AttachSession | None:
        """Wait until there is a session, or an attempt has failed. None after ``timeout`` seconds, too."""
        with self._changed:
            self._changed.wait_for(lambda: self.session or self.error or self._state in CLOSING, timeout)
            return self.session

    def wake(self) -> None:
        """Check again what the thread waits for, such as the breaker: it has opened. May be called from any thread."""
        self._wake.set()

    def give_up(self, reason: str) -> None:
        """End the session with a daemon that hangs: no job is taken from now on. Never waits."""
        with self._changed:
            if self.session is not None:
                self.error = DaemonUnreachable(reason)
            self._enter(Event.GIVE_UP)
        self._wake.set()

    def set_idle(self, idle: bool, *, soon: bool) -> None:
        with self._changed:
            self.idle = idle
            if self.session is not None:
                self.session.set_idle(idle)
                if not soon:
                    self.session.send_unsent()

    def close(self, timeout: float) -> None:
        """End the session in order, or break it off after ``timeout`` seconds. Joins the thread. Cannot be undone."""
        with self._changed:
            self._close_at = min(self._close_at, time.monotonic() + timeout)
            self._enter(Event.CLOSE)
        self._cancel.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        self._wake.close()
        self._cancel.close()

    # -- connecting --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._state in CONNECTING:
            with self._changed:
                begun, registration = self._state, self._registration
            try:
                transport, session = self._connect(registration)
            except Exception as error:  # noqa: BLE001 - this thread must go on: without it no job would ever end
                failure = error if isinstance(error, ClientError) else DaemonUnreachable(_unexpected("connect", error))
                with self._changed:
                    self.error = failure
                    self.attempts += 1
                    self._enter(Event.FAILED)
                self._log_failure(failure)
                self._pause(begun)
                continue
            self._publish(transport, session)
            try:
                self._lost = self._wait_until_lost(transport, session)
            except Exception as error:  # noqa: BLE001 - as above
                self._lost = self._lose(_unexpected("watch the daemon", error))
                if session is not None:
                    session.cancel()
            if self._lost:
                self._tell(
                    logging.WARNING,
                    "kvsidecar: the daemon at %s is lost, continuing without it: %s",
                    self._dialling.socket,
                    self._lost,
                )
            if session is not None:
                if not self._end_session_surely(transport, session):
                    self.lost_daemon = LostDaemon(transport.connection.process.duplicate(), session)
                with self._changed:
                    self._enter(Event.ENDED)
            transport.close()
        if self.lost_daemon is not None and not self.is_too_late():  # closed before it was asked
            with suppress(ClientError):
                transport = self._open([], fenced=False)
                self._wait_until_unmapped(transport, self.is_too_late)
                transport.close()

    def _open(self, fds: Sequence[Descriptor], *, fenced: bool, cancel: int | None = None) -> Transport:
        to, left = self._dialling, max(0.0, self._close_at - time.monotonic())
        timeout = min(to.timeout, left)
        transport = open_transport(
            to.socket, fds=fds, name=to.name, timeout=timeout, cancel=cancel, local=to.local, fenced=fenced
        )
        self._poller = DaemonPoller(self._wake, transport.connection)
        return transport

    def _connect(self, registration: Registration | Watching | None) -> tuple[Transport, AttachSession | None]:
        fds, fenced = registration.fds if registration else [], isinstance(registration, Registration)
        transport = self._open(fds, fenced=fenced, cancel=self._cancel.fd)
        self._wait_until_unmapped(transport, lambda: self._state is ConnectionState.CLOSED)
        return transport, None if registration is None else self._attach(transport, registration)

    def _wait_until_unmapped(self, transport: Transport, is_late: Callable[[], bool]) -> None:
        """Wait, before this run of the daemon maps the memory again. On DaemonUnreachable the transport is closed.

        Args:
            is_late: whether to wait no longer.
        """
        session = None if self.lost_daemon is None else self.lost_daemon.session
        if session is None or session.epoch != transport.connection.epoch:
            return

        def is_over() -> bool:
            return is_late() or bool(_how_lost(transport, None))

        delays = Backoff(0.02, 1.0)
        while not has_ended(transport, session, self, is_over):
            if is_over():
                transport.close()
                raise DaemonUnreachable(
                    f"the daemon at {self._dialling.socket} has not unmapped the memory of the last session"
                )
            self.wait_until(is_over, delays.next())
        self.lost_daemon = None

    def _attach(self, transport: Transport, registration: Registration | Watching) -> AttachSession:
        """Register, and wait for the answer. On DaemonUnreachable and AttachRefused the transport is closed."""
        session = AttachSession(
            transport,
            registration.message(transport.connection.token),
            self._ledger,
            self._monitor,
            ring_size=len(registration.event_handles),
            wake=self._wake.set,
            inbox=registration.inbox if isinstance(registration, Watching) else None,
            tell=self._tell,
            greeting=f"attached{' again' if self._attached_before else ''} to the daemon at {self._dialling.socket}",
        )
        with self._changed:
            self._changed.wait_for(
                lambda: session.id or session.ended or self._state is ConnectionState.CLOSED, self._dialling.timeout
            )
            if session.id and not session.ended:
                self._attached_before = True
                return session
            error = session.error
        unavailable = error is not None and error.code is grpc.StatusCode.UNAVAILABLE
        # Look before this end closes the connection. A daemon that is draining or has lost the device refuses with the
        # same status code, and keeps the attach socket open.
        going_down = unavailable and self.wait_until(transport.connection.ended, STREAM_END_SECONDS / 5)
        # No job was sent on it. A daemon that hangs in the registration unmaps the memory when the stream breaks.
        session.cancel()
        session.join()
        transport.close()
        if error is None:
            raise DaemonUnreachable(
                f"the daemon at {self._dialling.socket} did not answer the registration in {self._dialling.timeout:g} s"
            )
        if going_down:
            raise DaemonUnreachable(f"the daemon at {self._dialling.socket} is gone: {error.text}")
        raise AttachRefused(error.text)

    def _log_failure(self, error: ClientError) -> None:
        if self._state is ConnectionState.CLOSED:
            return
        text, socket = str(error), self._dialling.socket
        if isinstance(error, AttachRefused) and text != self._refused_before:
            self._refused_before = text
            _log.warning(
                "kvsidecar: the daemon at %s refuses this rank; trying again until it accepts: %s", socket, text
            )
        elif not self._lost:
            self._lost = text
            self._tell(logging.WARNING, "kvsidecar: continuing without a daemon, still trying to connect: %s", text)

    def _tell(self, level: int, text: str, *arguments: object) -> None:
        _log.log(logging.DEBUG if self._dialling.quiet else level, text, *arguments, stacklevel=2)

    def _pause(self, begun: ConnectionState) -> None:
        """Wait for the next attempt."""
        self._poller = DaemonPoller(self._wake)
        self.wait_until(lambda: self._state is not begun, self._dialling.backoff.next())

    # -- connected ---------------------------------------------------------------------------------------------------

    def _publish(self, transport: Transport, session: AttachSession | None) -> None:
        self._dialling.backoff.reset()
        self._dialling.breaker.reset()
        if (session is None or isinstance(self._registration, Watching)) and self._lost:
            self._tell(
                logging.INFO,
                "kvsidecar: the daemon at %s answers (epoch %x)",
                self._dialling.socket,
                transport.connection.epoch,
            )
        self._lost = self._refused_before = ""
        with self._changed:
            self.attempts += 1
            self.error = None
            if self._enter(Event.CONNECTED if session is None else Event.ATTACHED) in PUBLISHED:
                self.transport, self.session = transport, session
            if session is not None and self.idle:
                session.set_idle(True)
                session.send_unsent()
        try:
            self.on_connected(transport)
        except Exception as error:  # noqa: BLE001 - the connection is there all the same
            _unexpected("tell of a connection", error)

    def _wait_until_lost(self, transport: Transport, session: AttachSession | None) -> str:
        """Wait until the daemon is lost. Returns how; empty if this client disconnects first."""
        while self._state in PUBLISHED:
            if lost := _how_lost(transport, session):
                self._lose(lost)
                break
            with self._changed:
                if session is not None and self._ledger.is_overdue(time.monotonic() - HANG_SECONDS):
                    self.give_up(f"it has not ended a job {HANG_SECONDS:g} s after its deadline")
                    break
            self._probe(transport)
            late = LATE_SECONDS if self.late_answers else None
            if late is not None:
                transport.collect()
            waits = (self._dialling.breaker.probe_in(), None if session is None else HANG_CHECK_SECONDS, late)
            self._poller.wait(min((each for each in waits if each is not None), default=None))
        with self._changed:
            return str(self.error or "")

    def _lose(self, how: str) -> str:
        """Note that the daemon is lost, unless this client has disconnected. Returns how."""
        with self._changed:
            if self._state in PUBLISHED:
                self.error = DaemonUnreachable(how)
                self._enter(Event.LOST)
        return how

    def _probe(self, transport: Transport) -> None:
        """Make a cheap call if the breaker needs a probe."""
        if not self._dialling.breaker.begin_probe():
            return

        def on_answer(answer: pb.ReleaseReply | TransportError) -> None:
            if isinstance(answer, TransportError):
                self._dialling.breaker.failed()
            elif self._dialling.breaker.succeeded():
                _log.info("kvsidecar: the daemon at %s answers again", self._dialling.socket)
            self._wake.set()

        # There is no lease 0: the daemon answers no.
        transport.query(pb.ReleaseRequest(lease=0), self._dialling.step_budget, on_answer)

    # -- ending a session, and for `quiescing` -------------------------------------------------------------------------

    def _end_session_surely(self, transport: Transport, session: AttachSession) -> bool:
        """Call `_end_session`, and again after an unexpected error: its jobs must end."""
        delays = Backoff(0.02, 1.0)
        while True:
            try:
                return self._end_session(transport, session)
            except Exception as error:  # noqa: BLE001 - as above
                _unexpected("end a session", error)
            if self.is_too_late():
                return False
            self.wait_until(lambda: False, delays.next())

    def _end_session(self, transport: Transport, session: AttachSession) -> bool:
        """Receive a session's last replies and report its jobs. Returns whether the daemon has unmapped the memory.

        A job that was not sent ends at once. One that was sent may still move bytes: a load would overwrite blocks of
        another request, and a store would read another request's KV and make it readable under its own hashes. Only the
        store is harmless once its daemon goes down, because nothing is served from there again.
        """
        if self._lost:
            self._report(self._ledger.end_unsent)
        else:
            self._report(self._ledger.end_waiting)
            session.half_close()
        self._drain_stream(transport, session)
        self._report(self._ledger.end_unsent)
        unmapped = session.quiesced or quiesce(transport, session, self, given_up=self._state in HUNG)
        if unmapped:
            self._report(self._ledger.end_all)
        return unmapped

    def going_down(self) -> None:
        """Note that the daemon shuts down with its pool, which is never served again. Called again and again."""
        self._report(self._ledger.end_stores)

    def fenced(self) -> None:
        """Note that nothing is copied behind the fence. Called once."""
        self._report(self._ledger.end_all)

    @property
    def is_closing(self) -> bool:
        """Whether to wait for unmapped memory, too."""
        return self._state in CLOSING

    def is_too_late(self) -> bool:
        return time.monotonic() >= self._close_at

    def _report(self, end: Callable[[str, str], None]) -> None:
        with self._changed:
            end(DAEMON_LOST if self._lost else CLOSED, self._lost)
            self._changed.notify_all()

    def _drain_stream(self, transport: Transport, session: AttachSession) -> None:
        """Wait until the stream has ended, or break it off. Every reply that has arrived is handled."""
        process = transport.connection.process

        def is_over() -> bool:
            return session.ended or process.gone() or self._state in HUNG

        self.wait_until(is_over, self._dialling.timeout if self._lost else math.inf)
        if process.gone():  # its last replies are still in the socket
            self.wait_until(lambda: session.ended, STREAM_END_SECONDS)
        session.cancel()
        session.join()

    def wait_until(self, is_done: Callable[[], bool], seconds: float) -> bool:
        """Wait until ``is_done``, checking after every event. False: the time has passed, or that given to `close`."""
        deadline = time.monotonic() + seconds
        while not is_done():
            left = min(deadline, self._close_at) - time.monotonic()
            if left <= 0:
                return False
            self._poller.wait(left)
        return True


def _unexpected(what: str, error: Exception) -> str:
    """Log an error while it is being handled. Returns it as a reason."""
    _log.exception("kvsidecar: an unexpected error of the client, which goes on (to %s)", what)
    return f"an unexpected error of the client: {type(error).__name__}: {error}"


def _how_lost(transport: Transport, session: AttachSession | None) -> str:
    """How the daemon was lost; empty while it is connected."""
    if transport.connection.process.gone():
        return "its process has ended"
    if transport.connection.ended():
        return "it closed the connection"
    if session is not None and session.ended:
        return session.error.text if session.error else "it ended the connection"
    return ""


def open_transport(
    socket: str,
    *,
    fds: Sequence[Descriptor],
    name: str,
    timeout: float,
    cancel: int | None = None,
    local: bool,
    fenced: bool = False,
) -> Transport:
    """Connect, and choose the transport. Other arguments and errors are those of `connection.connect`.

    Args:
        socket: path of the daemon's gRPC socket.
        local: use the local protocol if the daemon offers it.
    """
    path = attach_path(socket)
    connection = connect(path, fds=fds, client=name, timeout=timeout, cancel=cancel, fenced=fenced)
    if local and connection.local_protocol:
        connect_calls = partial(connect, path, fds=(), client=f"{name} (calls)".lstrip())
        return LocalTransport(connection, socket, connect_calls)
    return GrpcTransport(connection, socket)
