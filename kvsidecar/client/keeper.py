"""Keeps one client connected: connects, attaches, notices a lost daemon, settles what it left, and begins again."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable

import grpc

from kvsidecar.client.breaker import Backoff, CircuitBreaker
from kvsidecar.client.connection import Connection
from kvsidecar.client.jobs import Jobs
from kvsidecar.client.link import LostDaemon
from kvsidecar.client.messages import Registration
from kvsidecar.client.results import CLOSED, DAEMON_LOST
from kvsidecar.client.session import Session
from kvsidecar.client.settling import settle
from kvsidecar.errors import AttachRefused, ClientError, DaemonUnreachable
from kvsidecar.v1 import sidecar_pb2 as pb

_log = logging.getLogger("kvsidecar.client")

LAST_WORDS_SECONDS = 1.0
"""A dead daemon's stream ends within milliseconds, after what it said last; one that does not is broken off."""


class Keeper:
    """One thread, from `start` to `close`. What it publishes belongs to ``jobs.changed``.

    Args:
        socket: the daemon's gRPC socket.
        name: free text for the daemon's log.
        fast_lane: use it if the daemon has one.
        timeout: seconds that the daemon has to answer a connection or a registration.
        probe_seconds: budget of the breaker's probes.
        backoff: delays between attempts to connect.
    """

    def __init__(
        self,
        socket: str,
        *,
        name: str,
        fast_lane: bool,
        timeout: float,
        probe_seconds: float,
        jobs: Jobs,
        breaker: CircuitBreaker,
        backoff: Backoff,
    ) -> None:
        self._socket = socket
        self._name = name
        self._fast_lane = fast_lane
        self._timeout = timeout
        self._probe_seconds = probe_seconds
        self._jobs = jobs
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
        self.connection: Connection | None = None
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
        with self._jobs.changed:
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
        with self._jobs.changed:
            self._start_thread()

    def _start_thread(self) -> None:
        if self._thread is None and not self._closing:
            self._thread = threading.Thread(target=self._run, name="kvsidecar-keep", daemon=True)
            self._thread.start()

    def wait_attempt(self, before: int, timeout: float) -> bool:
        """Wait until more than ``before`` attempts have ended. False: ``timeout`` seconds have passed."""
        with self._jobs.changed:
            return self._jobs.changed.wait_for(lambda: self.attempts > before or self._closing, timeout)

    def wake(self) -> None:
        """Look again: the breaker has opened."""
        self._wake.set()

    def close(self, timeout: float) -> None:
        """End the session in order, or give that up after ``timeout`` seconds. The thread has ended when this returns.

        Leaves the `Keeper` closed for good.
        """
        with self._jobs.changed:
            if self._closing:
                return
            self._closing = True
            self._close_at = time.monotonic() + timeout
            self._jobs.changed.notify_all()
        self._cancel.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        self._wake.close()
        self._cancel.close()

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        lost = refused = ""  # what was logged last: retries are quiet
        while not self._closing:
            registration = self._registration
            try:
                connection = Connection(
                    self._socket,
                    fds=registration.fds if registration else [],
                    name=self._name,
                    timeout=self._timeout,
                    cancel=self._cancel.fd,
                    fast_lane=self._fast_lane,
                )
                session = None if registration is None else self._attach(connection, registration)
            except ClientError as error:
                with self._jobs.changed:
                    self.error = error
                    self.attempts += 1
                    self._jobs.changed.notify_all()
                    if self._once:
                        return
                if isinstance(error, AttachRefused) and str(error) != refused:
                    refused = str(error)
                    _log.warning("the daemon at %s refuses this rank, trying on: %s", self._socket, refused)
                elif not lost and not self._closing:
                    lost = str(error)
                    _log.warning("going on without a daemon, trying on: %s", lost)
                self._pause(self._backoff.next())
                continue
            self._backoff.reset()
            self._breaker.reset()
            refused = ""
            with self._jobs.changed:
                self.connection, self.session, self.error, self._once = connection, session, None, False
                if session is not None and self.idle:
                    session.set_idle(True)
                    session.say()
                self.attempts += 1
                self._jobs.changed.notify_all()
            if lost:
                _log.info("the daemon at %s answers (epoch %x)", self._socket, connection.epoch)
            lost = self._watch(connection, session, registration)
            if lost:
                _log.warning("the daemon at %s is lost, going on without it: %s", self._socket, lost)
            self._leave(connection, session, lost)

    def _attach(self, connection: Connection, registration: Registration) -> Session:
        """Register, and wait for the answer. Raises DaemonUnreachable, AttachRefused; the connection is closed then."""
        changed = self._jobs.changed
        session = Session(
            connection,
            registration.message(connection.token),
            self._jobs,
            ring_size=len(registration.event_handles),
            wake=self._wake.set,
        )
        with changed:
            changed.wait_for(lambda: session.id or session.ended or self._closing, self._timeout)
            if session.id and not session.ended:
                return session
            error = session.error
        # Before this end of the connection is closed, too.
        dies = error is not None and error.code is grpc.StatusCode.UNAVAILABLE and self._dies(connection)
        # No job was sent on it. A daemon that hangs in the registration unmaps when it sees that the stream is broken.
        session.cancel()
        session.join()
        refused: ClientError
        if error is None:
            text = f"the daemon at {self._socket} did not answer the registration in {self._timeout:g} s"
            refused = DaemonUnreachable(text)
        elif dies:
            refused = DaemonUnreachable(f"the daemon at {self._socket} went away: {error.text}")
        else:
            refused = AttachRefused(error.text)
        connection.close()
        raise refused

    def _dies(self, connection: Connection) -> bool:
        """Whether a stream broke because the daemon goes down, which its other socket then says too.

        The same status code is a refusal for now: the daemon drains, or the device is lost.
        """
        return self._poll(connection, LAST_WORDS_SECONDS / 5, until=connection.link.ended)

    def _watch(self, connection: Connection, session: Session | None, registration: Registration | None) -> str:
        """Until the daemon is lost, and how that was seen; an empty text if it is this client that leaves."""
        lost = ""

        def over() -> bool:
            nonlocal lost
            if self._closing or registration is not self._registration:
                return True
            if connection.link.process.gone():
                lost = "its process has ended"
            elif connection.link.ended():
                lost = "it closed the attach socket"
            elif session is not None and session.ended:
                lost = session.error.text if session.error else "it ended the connection"
            return bool(lost)

        while not over():
            self._probe(connection)
            self._poll(connection, self._breaker.probe_in(), until=over)
        return lost

    def _leave(self, connection: Connection, session: Session | None, lost: str) -> None:
        """Give up a connection: no new work first, then every job is answered, then it is closed."""
        with self._jobs.changed:
            self.connection, self.session = None, None
            self.error = DaemonUnreachable(lost) if lost else None
            self._jobs.changed.notify_all()
        if session is not None and not self._end(connection, session, lost):
            self.left = LostDaemon(connection.link.process.duplicate(), session.epoch)
        connection.close()

    def _end(self, connection: Connection, session: Session, lost: str) -> bool:
        """Hear the last words of a session, then report its jobs. Returns whether the daemon has let go of the memory.

        A job that the daemon was never told of ends at once. One that it knows may still move bytes: of a load they
        go into blocks that would be another request's, and a store that still reads would make what is written there
        next readable under its own hashes. A daemon that is going down will never answer for the latter.
        """
        link, reason = connection.link, DAEMON_LOST if lost else CLOSED
        if lost:
            self._jobs.end_unsent(session, reason, lost)
        else:
            self._jobs.end_waiting(session, reason)
            session.half_close()
        patience = self._timeout if lost else max(0.0, self._close_at - time.monotonic())

        def last_words() -> bool:
            return session.ended or link.process.gone() or (bool(lost) and self._too_late())

        self._poll(connection, patience, until=last_words)
        if not session.ended and link.process.gone():
            self._poll(connection, LAST_WORDS_SECONDS, until=lambda: session.ended, without_process=True)
        session.cancel()
        session.join()
        self._jobs.end_unsent(session, reason, lost)
        proven = (session.settled and not session.unsettled) or settle(
            connection,
            session,
            poll=lambda seconds, until: self._poll(connection, seconds, until=until),
            going_down=lambda: self._jobs.end_stores(session, reason, lost),
            give_up=self._too_late,
            wake=self._wake.set,
        )
        if proven:
            self._jobs.end(session, reason, lost)
        return proven

    def _too_late(self) -> bool:
        return self._closing and time.monotonic() >= self._close_at

    # -- waiting -----------------------------------------------------------------------------------------------------

    def _pause(self, seconds: float) -> None:
        """Between two attempts."""
        registration = self._registration
        self._poll(None, seconds, until=lambda: self._closing or self._registration is not registration)

    def _poll(
        self,
        connection: Connection | None,
        seconds: float | None,
        *,
        until: Callable[[], bool],
        without_process: bool = False,
    ) -> bool:
        """Wait for news of the daemon or of this client, until it is what was waited for, or the time has passed."""
        deadline = None if seconds is None else time.monotonic() + seconds
        poll = select.poll()
        poll.register(self._wake.fd, select.POLLIN)
        if connection is not None:
            if not connection.link.ended():
                poll.register(connection.link.connection, select.POLLRDHUP)  # what comes before the end is not ours
            if connection.link.process.fd is not None and not without_process:
                poll.register(connection.link.process.fd, select.POLLIN)
        while not until():
            limits = [limit for limit in (deadline, self._close_at if self._closing else None) if limit is not None]
            left = min(limits) - time.monotonic() if limits else None
            if left is not None and left <= 0:
                return False
            for fd, _ in poll.poll(None if left is None else max(1.0, left * 1000)):
                if fd == self._wake.fd:
                    self._wake.clear()
                else:
                    poll.unregister(fd)  # it stays readable, and has been told
            if seconds is None and self._breaker.probe_in() is not None:
                return False
        return True

    def _probe(self, connection: Connection) -> None:
        """Ask the daemon something cheap if the breaker wants to know whether it answers again."""
        if not self._breaker.begin_probe():
            return

        def answered(call: grpc.Future[pb.ReleaseReply]) -> None:
            if call.cancelled() or call.exception() is not None:
                self._breaker.failed()
            elif self._breaker.succeeded():
                _log.info("the daemon at %s answers again", self._socket)
            self._wake.set()

        # A lease that nobody has: the daemon looks it up and says no.
        probe = connection.stub.Release.future(pb.ReleaseRequest(lease=0), timeout=self._probe_seconds)
        probe.add_done_callback(answered)


class Waker:
    """An eventfd, to wake a thread that waits in poll(). Readable from `set` to `clear`.

    May be set by threads that outlive it: it does nothing once it is closed.
    """

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._closed = False

    def set(self) -> None:
        with self._lock:  # a descriptor closed in between could be somebody else's by now
            if not self._closed:
                os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.fd)
