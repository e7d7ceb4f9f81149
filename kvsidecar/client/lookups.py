"""Lookups and leases: the calls that an engine's step makes, each within a time budget."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc

from kvsidecar.client.messages import LookupQuery, TransportError, to_milliseconds
from kvsidecar.client.supervisor import Supervisor
from kvsidecar.client.transport import Transport
from kvsidecar.client.types import BREAKER_OPEN, DAEMON_LOST, NO_ANSWER, LookupResult
from kvsidecar.errors import ClientError
from kvsidecar.support.breaker import CircuitBreaker
from kvsidecar.v1 import sidecar_pb2 as pb

_log = logging.getLogger("kvsidecar.client")

UNAVAILABLE_SECONDS = 1.0
"""For which no call was taken, before that is said: a daemon that was lost is noticed sooner."""
_TIMED_OUT = TransportError(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer in time")


class NoAnswer(Exception):
    """The call was not sent, or not answered in time. ``reason`` is one of `kvsidecar.client.types`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Lookups:
    """Makes the calls unless the circuit breaker is open. See `Client` for each.

    Args:
        budget: default time limit of a call, in seconds.
    """

    def __init__(self, supervisor: Supervisor, breaker: CircuitBreaker, budget: float, socket: str) -> None:
        self._supervisor = supervisor
        self._breaker = breaker
        self._budget = budget
        self._socket = socket
        self._failing: tuple[Transport, float] | None = None
        """Calls fail although this transport's daemon is connected, since then."""
        self._said = False

    def lookup(self, query: LookupQuery, timeout: float | None) -> LookupResult:
        try:
            return query.result(self._call(query.request, timeout))
        except NoAnswer as missing:
            return query.no_hits(missing.reason)

    def begin(self, query: LookupQuery) -> PendingLookup | None:
        if (transport := self._available_transport()) is None:
            return None
        message = query.request(transport.connection.token)
        pending = PendingLookup(self, transport, query)
        return pending if transport.post(message, pending.on_answer) else None

    def renew_nowait(self, lease: int, lease_seconds: float) -> LeaseRenewal:
        if (transport := self._available_transport()) is not None:
            renewal = LeaseRenewal(transport, lease)
            if transport.post(_renew_request(lease, lease_seconds), renewal.on_answer):
                return renewal
        return LeaseRenewal(None)

    def release_nowait(self, lease: int) -> None:
        if (transport := self._available_transport()) is not None:
            transport.post(_release_request(lease), None)

    def release(self, lease: int, timeout: float | None) -> bool:
        request = _release_request(lease)
        try:
            reply: pb.ReleaseReply = self._call(lambda _: request, timeout)
        except NoAnswer:
            return False
        return reply.released

    def renew(self, lease: int, lease_seconds: float, timeout: float | None) -> float:
        request = _renew_request(lease, lease_seconds)
        try:
            reply: pb.RenewReply = self._call(lambda _: request, timeout)
        except NoAnswer:
            return 0.0
        return reply.lease_ms / 1000 if reply.renewed else 0.0

    def _available_transport(self) -> Transport | None:
        return self._supervisor.transport if self._breaker.allows else None

    def _call(self, request: Callable[[bytes], pb.LocalRequest], timeout: float | None) -> Any:
        """Send a request and wait for the reply.

        Args:
            request: makes the request from the connection's token.

        Raises:
            NoAnswer: the daemon is lost or hangs.
            ClientError: the daemon refuses the request.
        """
        deadline = time.monotonic() + (self._budget if timeout is None else timeout)
        transport = self._supervisor.transport
        if not self._breaker.allows:
            raise NoAnswer(BREAKER_OPEN if transport is not None else DAEMON_LOST)
        if transport is None and not self._supervisor.attempts and not self._supervisor.has_registration:
            # Only the first call of a client that never attaches (a scheduler's) waits for the connection.
            self._supervisor.start_without_registration()
            if not self._supervisor.wait_attempt(0, deadline - time.monotonic()):
                self._breaker.failed()
            transport = self._supervisor.transport
        if transport is None:
            raise NoAnswer(DAEMON_LOST)
        message = request(transport.connection.token)
        try:
            answer = transport.call(message, max(0.001, deadline - time.monotonic()))
        except TransportError as error:
            answer = error
        return self.reply(answer, transport)

    def reply(self, answer: Any, transport: Transport) -> Any:
        """Return the reply, or raise as `_call` if the answer is a TransportError. Updates the circuit breaker."""
        if not isinstance(answer, TransportError):
            self._breaker.succeeded()
            if self._failing is not None:
                self._note_answer()
            return answer
        if answer.code is grpc.StatusCode.DEADLINE_EXCEEDED:
            if self._breaker.failed():
                _log.warning("the daemon at %s does not answer in time: lookups miss until it does", self._socket)
                self._supervisor.wake()
            raise NoAnswer(NO_ANSWER)
        # After the connection was replaced, any error is possible, such as that its token is unknown.
        if answer.code is grpc.StatusCode.UNAVAILABLE or self._supervisor.transport is not transport:
            self._note_unavailable(answer, transport)
            raise NoAnswer(DAEMON_LOST)
        raise ClientError(answer.text) from answer

    def _note_unavailable(self, error: TransportError, transport: Transport) -> None:
        """Say it if a daemon that is connected takes no calls: its socket may be gone. The loss of a daemon, which the
        supervisor says, looks like that at first."""
        if self._supervisor.transport is not transport:
            return
        now = time.monotonic()
        if self._failing is None or self._failing[0] is not transport:
            self._failing, self._said = (transport, now), False
        elif not self._said and now - self._failing[1] > UNAVAILABLE_SECONDS:
            self._said = True
            _log.warning("the daemon at %s takes no calls, so lookups miss: %s", self._socket, error.text)

    def _note_answer(self) -> None:
        if self._said:
            _log.info("the daemon at %s takes calls again", self._socket)
        self._failing, self._said = None, False


class PendingLookup:
    """A lookup sent by `Client.begin_lookup`. One thread calls `result` or `cancel`, once."""

    def __init__(self, lookups: Lookups, transport: Transport, query: LookupQuery) -> None:
        self._lookups, self._transport, self._query = lookups, transport, query
        self._lock = threading.Lock()
        """Guards the two below: over gRPC the answer arrives in another thread."""
        self._answer: Any = None
        self._cancelled = False

    def on_answer(self, answer: Any) -> None:
        with self._lock:
            self._answer, late = answer, self._cancelled
        if late:
            self._release_lease(answer)

    def result(self, timeout: float) -> LookupResult:
        """What `Client.lookup` would have returned. Waits at most ``timeout`` seconds.

        Raises:
            ClientError: the daemon refuses the request.
        """
        if self._answer is None:
            self._transport.collect(lambda: self._answer is not None, timeout)
        try:
            reply = self._lookups.reply(_TIMED_OUT if self._answer is None else self._answer, self._transport)
        except NoAnswer as missing:
            self.cancel()
            return self._query.no_hits(missing.reason)
        return self._query.result(reply)

    def cancel(self) -> None:
        """Discard the answer, and release its lease when it arrives. Never waits."""
        with self._lock:
            self._cancelled, answer = True, self._answer
        self._release_lease(answer)

    def _release_lease(self, answer: Any) -> None:
        if isinstance(answer, pb.LookupReply) and answer.lease:
            self._transport.post(_release_request(answer.lease), None)


class LeaseRenewal:
    """A renewal sent by `Client.renew_nowait`. If it or the release is lost, the lease expires.

    Args:
        transport: over which it was sent; None if it could not be sent.
    """

    def __init__(self, transport: Transport | None, lease: int = 0) -> None:
        self._transport, self._lease = transport, lease
        self.renewed: bool | None = None
        """False: the lease had expired before. None: not answered, or not yet."""

    @property
    def sent(self) -> bool:
        """False: the daemon is lost or busy, and the lease keeps its old expiry."""
        return self._transport is not None

    def release(self) -> None:
        """Release the lease. Never waits, never raises."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.collect()
            transport.post(_release_request(self._lease), None)

    def on_answer(self, answer: Any) -> None:
        if not isinstance(answer, TransportError):
            self.renewed = answer.renewed
        elif answer.code not in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE):
            _log.warning("the daemon refuses to renew a lease: %s", answer.text)


def _release_request(lease: int) -> pb.LocalRequest:
    return pb.LocalRequest(release=pb.ReleaseRequest(lease=lease))


def _renew_request(lease: int, seconds: float) -> pb.LocalRequest:
    return pb.LocalRequest(renew=pb.RenewRequest(lease=lease, lease_ms=to_milliseconds("lease_seconds", seconds)))
