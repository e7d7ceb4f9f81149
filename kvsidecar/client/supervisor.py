"""The connection supervisor: connects, attaches, notices a lost daemon, quiesces what it left, and begins again.

How the client works
====================

A client is one `Supervisor` and one `Ledger` for its whole life, and one `Transport` with one `Session` for each run of
the daemon that it has met::

    idle --start--> CONNECTING --link, registration--> ATTACHED --lost, or closing--> QUIESCING --proof--> CONNECTING
                    ^        |                                                          |                  or closed
                    '--delay-'  refused, nobody there                                   '--no proof in time: closed

- CONNECTING: no session is published. `store` and `load` are declined, lookups miss. Attempts repeat with a backoff.
- ATTACHED: `transport` and `session` are published. The supervisor waits for the end of the daemon's process, of the
  attach socket or of the stream, whichever is first, and makes the circuit breaker's probes. (A client that only looks
  up has a transport and no session.)
- QUIESCING: neither is published any more. Each outstanding job ends at the moment at which nothing can touch its
  blocks any more, and not before: one that the daemon was never told of at once; a store when its daemon has said that
  it goes down; the others when there is a proof (`quiescing`) that no copy of the session runs.

Only the supervisor's thread moves from one state to the next, and only after every job of a session has ended is there
another session. So all outstanding jobs are of one session, always.

A store, from the top down; nothing calls back up::

    Client.store -> Ledger.add -> Session.send -> Outbox.put -> AttachStream.pump -> socket (or a thread of gRPC's)
                       '-> HostOrder, if it waits for an event: then Session.send

and its end, from the bottom up: ``AttachStream.receive`` returns replies -> `Session` takes them -> `Ledger.finish` ->
``Client.poll``.

Threads
-------

the engine's
    Own nothing. Any of them may call any method; one that waits or polls reads the answers itself (`Session.read_now`).
kvsidecar-keep, the supervisor's
    From `start` to `close`. It alone publishes, withdraws and closes a transport and a session.
kvsidecar-read
    With a session. Waits for the stream, takes what it says; at the end of the stream it marks the session ended and
    wakes the supervisor.
kvsidecar-flush
    From the first message that found the socket full to the end of the stream. Sends what there was no room for.
kvsidecar-order
    From the first job that waits on the host until the client is closed. Waits for the engine's events.
gRPC's
    With a channel. Iterate the outbox, hand on answers to questions.

Locks
-----

In the order in which they are taken:

1. ``Session._reading``: one thread at a time receives answers and takes them, so that they are taken in order. Who only
   helps does not wait for it.
2. ``Monitor.lock``, with the condition ``Monitor.changed``: the ledger, the outbox, the session's fields, the stream's
   unsent rest, and what the supervisor publishes. Who changes any of it notifies. No system call that may wait is made
   with it held. ``Supervisor.transport`` and ``.session``, ``Ledger.finished`` and `may_have_ended` may be looked
   at without it, in a step: what comes in between is seen the next time.
3. Leaves, under which nothing else is taken: the breaker's, a `Waker`'s, a `Channel`'s, ``HostOrder._lock`` (the
   start of its thread). ``LocalCalls._lock`` is held from a call's request to its answer, and together with no other.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import grpc

from kvsidecar.client.breaker import Backoff, CircuitBreaker
from kvsidecar.client.dialling import dial
from kvsidecar.client.ledger import Ledger
from kvsidecar.client.link import LostDaemon
from kvsidecar.client.messages import CarrierError, Registration
from kvsidecar.client.quiescing import quiesce
from kvsidecar.client.results import CLOSED, DAEMON_LOST
from kvsidecar.client.session import Session
from kvsidecar.client.transport import Transport
from kvsidecar.client.waiting import Monitor
from kvsidecar.client.watch import Waker, Watch
from kvsidecar.errors import AttachRefused, ClientError, DaemonUnreachable
from kvsidecar.v1 import sidecar_pb2 as pb

_log = logging.getLogger("kvsidecar.client")

LAST_WORDS_SECONDS = 1.0
"""A dead daemon's stream ends within milliseconds, after what it said last; one that does not is broken off."""


class Supervisor:
    """One thread, from `start` to `close`. What it publishes belongs to the client's lock.

    Args:
        socket: the daemon's gRPC socket.
        name: free text for the daemon's log.
        local: use the local protocol if the daemon offers it.
        timeout: seconds that the daemon has to answer a connection or a registration.
        probe_seconds: budget of the breaker's probes.
        backoff: delays between attempts to connect.
    """

    def __init__(
        self,
        socket: str,
        *,
        name: str,
        local: bool,
        timeout: float,
        probe_seconds: float,
        ledger: Ledger,
        monitor: Monitor,
        breaker: CircuitBreaker,
        backoff: Backoff,
    ) -> None:
        self._socket = socket
        self._name = name
        self._local = local
        self._timeout = timeout
        self._probe_seconds = probe_seconds
        self._ledger = ledger
        self._changed = monitor.changed
        self._monitor = monitor
        self._breaker = breaker
        self._backoff = backoff
        self._registration: Registration | None = None
        self._once = False
        self._closing = False
        self._close_at = 0.0
        self._wake = Waker()
        self._cancel = Waker()
        """Stays readable once the client is being closed."""
        self._thread: threading.Thread | None = None
        self._lost_before = ""
        """How the last daemon was lost, until another one answers: retries are quiet."""
        self._refused_before = ""
        self.transport: Transport | None = None
        """While the daemon answers; may be read without the lock."""
        self.session: Session | None = None
        """While attached; may be read without the lock."""
        self.idle = False
        """What every session is told of the GPU."""
        self.attempts = 0
        """Attempts to connect and attach that have ended, for better or worse."""
        self.error: ClientError | None = None
        """Why there is no connection."""
        self.left: LostDaemon | None = None
        """After `close`: a daemon that may still have the memory mapped."""

    # -- for the client ----------------------------------------------------------------------------------------------

    def start(self, registration: Registration, *, once: bool = False) -> None:
        """Begin to connect, and to attach. A connection that was made without a registration is made again with it.

        Args:
            once: end the thread if the first attempt fails.
        """
        with self._changed:
            self._registration = registration
            self._once = once
            self.error = None
            self._start_thread()
        self._wake.set()

    @property
    def attaches(self) -> bool:
        """Whether it has a registration."""
        return self._registration is not None

    def start_without_registration(self) -> None:
        """Begin to connect, unless that has begun."""
        with self._changed:
            self._start_thread()

    def _start_thread(self) -> None:
        if self._thread is None and not self._closing:
            self._thread = threading.Thread(target=self._run, name="kvsidecar-keep", daemon=True)
            self._thread.start()

    def wait_attempt(self, before: int, timeout: float) -> bool:
        """Wait until more than ``before`` attempts have ended. False: ``timeout`` seconds have passed."""
        with self._changed:
            return self._changed.wait_for(lambda: self.attempts > before or self._closing, timeout)

    def wake(self) -> None:
        """Look again: the breaker has opened."""
        self._wake.set()

    def close(self, timeout: float) -> None:
        """End the session in order, or give that up after ``timeout`` seconds. The thread has ended when this returns.

        Leaves the supervisor closed for good.
        """
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._close_at = time.monotonic() + timeout
            self._changed.notify_all()
        self._cancel.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        self._wake.close()
        self._cancel.close()

    # -- CONNECTING --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            registration = self._registration
            try:
                transport = dial(
                    self._socket,
                    fds=registration.fds if registration else [],
                    name=self._name,
                    timeout=self._timeout,
                    cancel=self._cancel.fd,
                    local=self._local,
                )
                watch = Watch(self._wake, transport.link)
                session = None if registration is None else self._attach(transport, watch, registration)
            except ClientError as error:
                with self._changed:
                    self.error = error
                    self.attempts += 1
                    self._changed.notify_all()
                    if self._once:
                        return
                self._log_failure(error)
                self._pause(registration)
                continue
            self._publish(transport, session)
            lost = self._watch(transport, session, watch, registration)
            self._withdraw(lost)
            if session is not None and not self._end(transport, session, watch, lost):
                self.left = LostDaemon(transport.link.process.duplicate(), session.epoch)
            transport.close()

    def _attach(self, transport: Transport, watch: Watch, registration: Registration) -> Session:
        """Register, and wait for the answer. Raises DaemonUnreachable, AttachRefused; the transport is closed then."""
        session = Session(
            transport,
            registration.message(transport.link.token),
            self._ledger,
            self._monitor,
            ring_size=len(registration.event_handles),
            wake=self._wake.set,
        )
        with self._changed:
            self._changed.wait_for(lambda: session.id or session.ended or self._closing, self._timeout)
            if session.id and not session.ended:
                return session
            error = session.error
        # Before this end of the connection is closed, too.
        dies = error is not None and error.code is grpc.StatusCode.UNAVAILABLE and self._dies(transport, watch)
        # No job was sent on it. A daemon that hangs in the registration unmaps when it sees that the stream is broken.
        session.cancel()
        session.join()
        transport.close()
        if error is None:
            raise DaemonUnreachable(
                f"the daemon at {self._socket} did not answer the registration in {self._timeout:g} s"
            )
        if dies:
            raise DaemonUnreachable(f"the daemon at {self._socket} went away: {error.text}")
        raise AttachRefused(error.text)

    def _dies(self, transport: Transport, watch: Watch) -> bool:
        """Whether a stream broke because the daemon goes down, which its other socket then says too.

        The same status code is a refusal for now: the daemon drains, or the device is lost.
        """
        return self._wait_until(watch, transport.link.ended, LAST_WORDS_SECONDS / 5)

    def _log_failure(self, error: ClientError) -> None:
        if isinstance(error, AttachRefused) and str(error) != self._refused_before:
            self._refused_before = str(error)
            _log.warning("the daemon at %s refuses this rank, trying on: %s", self._socket, self._refused_before)
        elif not self._lost_before and not self._closing:
            self._lost_before = str(error)
            _log.warning("going on without a daemon, trying on: %s", self._lost_before)

    def _pause(self, registration: Registration | None) -> None:
        """Between two attempts."""
        watch = Watch(self._wake)
        self._wait_until(watch, lambda: self._closing or self._registration is not registration, self._backoff.next())

    # -- ATTACHED ----------------------------------------------------------------------------------------------------

    def _publish(self, transport: Transport, session: Session | None) -> None:
        self._backoff.reset()
        self._breaker.reset()
        if self._lost_before:
            _log.info("the daemon at %s answers (epoch %x)", self._socket, transport.link.epoch)
        self._lost_before = self._refused_before = ""
        with self._changed:
            self.transport, self.session, self.error, self._once = transport, session, None, False
            if session is not None and self.idle:
                session.set_idle(True)
                session.say()
            self.attempts += 1
            self._changed.notify_all()

    def _watch(
        self, transport: Transport, session: Session | None, watch: Watch, registration: Registration | None
    ) -> str:
        """Until the daemon is lost, and how that was seen; an empty text if it is this client that leaves."""
        while not self._closing and registration is self._registration:
            if lost := _how_lost(transport, session):
                return lost
            self._probe(transport)
            watch.wait(self._breaker.probe_in())
        return ""

    def _probe(self, transport: Transport) -> None:
        """Ask the daemon something cheap if the breaker wants to know whether it answers again."""
        if not self._breaker.begin_probe():
            return

        def answered(answer: pb.ReleaseReply | CarrierError) -> None:
            if isinstance(answer, CarrierError):
                self._breaker.failed()
            elif self._breaker.succeeded():
                _log.info("the daemon at %s answers again", self._socket)
            self._wake.set()

        # A lease that nobody has: the daemon looks it up and says no.
        transport.ask(pb.ReleaseRequest(lease=0), self._probe_seconds, answered)

    def _withdraw(self, lost: str) -> None:
        """No new work from here on."""
        with self._changed:
            self.transport, self.session = None, None
            self.error = DaemonUnreachable(lost) if lost else None
            self._changed.notify_all()
        if lost:
            self._lost_before = lost
            _log.warning("the daemon at %s is lost, going on without it: %s", self._socket, lost)

    # -- QUIESCING ---------------------------------------------------------------------------------------------------

    def _end(self, transport: Transport, session: Session, watch: Watch, lost: str) -> bool:
        """Hear the last words of a session, then report its jobs. Returns whether the daemon has let go of the memory.

        A job that the daemon was never told of ends at once. One that it knows may still move bytes: of a load they
        go into blocks that would be another request's, and a store that still reads would make what is written there
        next readable under its own hashes. A daemon that is going down will never answer for the latter.
        """
        reason = DAEMON_LOST if lost else CLOSED
        if lost:
            self._report(self._ledger.end_unsent, reason, lost)
        else:
            self._report(self._ledger.end_waiting, reason)
            session.half_close()
        self._hear_last_words(transport, session, watch, lost)
        self._report(self._ledger.end_unsent, reason, lost)
        proven = session.quiesced or quiesce(
            transport,
            session,
            wait_until=lambda is_done, seconds: self._wait_until(watch, is_done, seconds),
            going_down=lambda: self._report(self._ledger.end_stores, reason, lost),
            give_up=self._is_too_late,
            wake=self._wake.set,
        )
        if proven:
            self._report(self._ledger.end_all, reason, lost)
        return proven

    def _report(self, end: Callable[..., None], *words: str) -> None:
        with self._changed:
            end(*words)
            self._changed.notify_all()

    def _hear_last_words(self, transport: Transport, session: Session, watch: Watch, lost: str) -> None:
        """Until the stream has ended, in order or because it is broken off here: what was said on it has been taken."""
        process = transport.link.process

        def is_over() -> bool:
            return session.ended or process.gone() or (bool(lost) and self._is_too_late())

        self._wait_until(watch, is_over, self._timeout if lost else self._close_at - time.monotonic())
        if process.gone():  # what it said before is still in the socket
            self._wait_until(watch, lambda: session.ended, LAST_WORDS_SECONDS)
        session.cancel()
        session.join()

    def _is_too_late(self) -> bool:
        return self._closing and time.monotonic() >= self._close_at

    # -- waiting -----------------------------------------------------------------------------------------------------

    def _wait_until(self, watch: Watch, is_done: Callable[[], bool], seconds: float) -> bool:
        """Wait for news until it is what was waited for. False: the time has passed, or that which `close` gives."""
        deadline = time.monotonic() + seconds
        while not is_done():
            left = (min(deadline, self._close_at) if self._closing else deadline) - time.monotonic()
            if left <= 0:
                return False
            watch.wait(left)
        return True


def _how_lost(transport: Transport, session: Session | None) -> str:
    """Empty while the daemon is there."""
    if transport.link.process.gone():
        return "its process has ended"
    if transport.link.ended():
        return "it closed the attach socket"
    if session is not None and session.ended:
        return session.error.text if session.error else "it ended the connection"
    return ""
