"""Lookups and leases: the calls that an engine's step makes, each within a time budget."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from kvsidecar.client.lookup_parts import PART_HASHES, LookupParts, touch_parts
from kvsidecar.client.messages import LookupQuery, TransportError, to_milliseconds
from kvsidecar.client.supervisor import Dialling, Supervisor
from kvsidecar.client.transport import OnAnswer, Transport
from kvsidecar.client.types import BREAKER_OPEN, DAEMON_LOST, NO_ANSWER, LookupResult
from kvsidecar.errors import ClientError
from kvsidecar.v1 import sidecar_pb2 as pb

_log = logging.getLogger("kvsidecar.client")

UNAVAILABLE_SECONDS = 1.0
"""How long calls must be refused before a warning: the loss of a daemon is noticed sooner."""
EARLY_TOUCH_BYTES = 1 << 20
"""Most bytes of touches that wait for the first connection. Beyond it, the oldest are dropped."""


class NoAnswer(Exception):
    """The call was not sent, or not answered in time. Its text is a reason of `kvsidecar.client.types`."""


class LookupCalls:
    """Makes the calls unless the circuit breaker is open. See `Client` for each."""

    def __init__(self, supervisor: Supervisor, dialling: Dialling) -> None:
        self._supervisor = supervisor
        self._breaker = dialling.breaker
        self._budget = dialling.step_budget
        self._socket = dialling.socket
        self._failing: tuple[Transport, float] | None = None
        """A transport whose calls fail although its daemon is connected, and since when."""
        self._said = False
        self._early: deque[pb.LocalRequest] = deque()
        """Touches that wait for the first connection."""
        self._early_lock = threading.Lock()
        supervisor.on_connected = self._send_early

    def lookup(self, query: LookupQuery, timeout: float | None) -> LookupResult:
        deadline = self._deadline(timeout)
        parts = LookupParts(query)
        try:
            while (part := parts.next()) is not None:
                parts.take(part.result(self._call(part.request, deadline)))
        except NoAnswer as missing:
            self._release(parts)
            return query.no_hits(str(missing))
        except BaseException:
            self._release(parts)
            raise
        return self.finished(parts)

    def finished(self, parts: LookupParts) -> LookupResult:
        """The result of a lookup. A daemon that began to decline lookups reports no hits, and need not protect any."""
        result = parts.result()
        if not result.ready and parts.lease:
            self._release(parts)
            result = parts.result()
        return result

    def _release(self, parts: LookupParts) -> None:
        lease, parts.lease = parts.lease, 0
        if (transport := self._supervisor.transport) is not None:
            _post_release(transport, lease)

    def begin(self, query: LookupQuery) -> PendingLookup | None:
        if (transport := self._available_transport()) is None:
            return None
        pending = PendingLookup(self, transport, query)
        return pending if pending.begin() else None

    def touch_nowait(self, query: LookupQuery) -> bool:
        requests = [part.request(b"") for part in touch_parts(query)]  # no lease, so no token
        with self._early_lock:
            if self._supervisor.transport is None and not self._supervisor.attempts:
                self._keep_early(requests)
                return True
        transport = self._available_transport()
        return transport is not None and _post_in_turn(transport, requests)

    def _keep_early(self, requests: list[pb.LocalRequest]) -> None:
        if not self._supervisor.has_registration:
            self._supervisor.start_without_registration()
        self._early += requests
        sizes = [each.ByteSize() for each in self._early]
        while sum(sizes) > EARLY_TOUCH_BYTES:
            del sizes[0]
            self._early.popleft()

    def _send_early(self, transport: Transport) -> None:
        """Send the waiting touches over the first connection. After a failed attempt they are outdated."""
        with self._early_lock:
            early, self._early = self._early, deque()
        if early and self._supervisor.attempts == 1:
            _post_in_turn(transport, early)

    def report_nowait(self, report: pb.LocalRequest) -> bool:
        transport = self._available_transport()
        return transport is not None and post(transport, report, None)

    def renew_nowait(self, lease: int, lease_seconds: float) -> LeaseRenewal:
        if (transport := self._available_transport()) is not None:
            renewal = LeaseRenewal(transport, lease)
            if post(transport, _renew_request(lease, lease_seconds), renewal.on_answer):
                return renewal
        return LeaseRenewal(None)

    def release_nowait(self, lease: int) -> None:
        if (transport := self._available_transport()) is not None:
            _post_release(transport, lease)

    def release(self, lease: int, timeout: float | None) -> bool:
        request = _release_request(lease)
        try:
            reply: pb.ReleaseReply = self._call(lambda _: request, self._deadline(timeout))
        except NoAnswer:
            return False
        return reply.released

    def renew(self, lease: int, lease_seconds: float, timeout: float | None) -> float:
        request = _renew_request(lease, lease_seconds)
        try:
            reply: pb.RenewReply = self._call(lambda _: request, self._deadline(timeout))
        except NoAnswer:
            return 0.0
        return reply.lease_ms / 1000 if reply.renewed else 0.0

    def _deadline(self, timeout: float | None) -> float:
        return time.monotonic() + (self._budget if timeout is None else timeout)

    def _available_transport(self) -> Transport | None:
        return self._supervisor.transport if self._breaker.allows else None

    def _call(self, request: Callable[[bytes], pb.LocalRequest], deadline: float) -> Any:
        """Send a request and wait for the reply. If it arrives too late, its lease is released.

        Args:
            request: makes the request from the connection's token.
            deadline: monotonic seconds.

        Raises:
            NoAnswer: the daemon is lost or hangs.
            ClientError: the daemon refuses the request.
        """
        transport = self._supervisor.transport
        if not self._breaker.allows:
            raise NoAnswer(BREAKER_OPEN if transport is not None else DAEMON_LOST)
        if transport is None and not self._supervisor.attempts and not self._supervisor.has_registration:
            # Only the first call of a client that never attaches (a scheduler's) waits for the connection.
            self._supervisor.start_without_registration()
            if not self._supervisor.wait_attempt(0, deadline - time.monotonic()):
                self._breaker.failed(surely=True)  # a connection takes the same time whatever is asked
            transport = self._supervisor.transport
        if transport is None:
            raise NoAnswer(DAEMON_LOST)
        call = object()

        def on_late(answer: Any) -> None:
            self._supervisor.late_answers.discard(call)
            self.heard(answer)
            if isinstance(answer, pb.LookupReply):
                _post_release(transport, answer.lease)

        message = request(transport.connection.token)
        self._breaker.called()
        self._supervisor.late_answers.add(call)  # before it may come
        try:
            answer = transport.call(message, max(0.001, deadline - time.monotonic()), on_late)
        except TransportError as error:
            answer = error
        if isinstance(answer, TransportError) and answer.comes_late:
            self._supervisor.wake()
        else:
            self._supervisor.late_answers.discard(call)
        return self.reply(answer, transport)

    def called(self) -> None:
        self._breaker.called()

    def heard(self, answer: Any) -> None:
        """Note that an answer has arrived, perhaps late: the daemon lives."""
        if not isinstance(answer, TransportError):
            self._breaker.succeeded()
            if self._failing is not None:
                self._note_answer()

    def expect_late(self, pending: PendingLookup) -> None:
        """Note that nobody waits for this answer any more. It must be read all the same, because of its lease."""
        self._supervisor.late_answers.add(pending)
        self._supervisor.wake()

    def late_came(self, pending: PendingLookup) -> None:
        self._supervisor.late_answers.discard(pending)

    def missed(self) -> None:
        """Note that a wait has ended without an answer."""
        if self._breaker.failed():
            _log.warning("kvsidecar: the daemon at %s does not answer: lookups miss until it does", self._socket)
            self._supervisor.wake()

    def reply(self, answer: Any, transport: Transport) -> Any:
        """Return the reply, or raise like `_call` if the answer is a TransportError. Updates the circuit breaker."""
        if not isinstance(answer, TransportError):
            self.heard(answer)
            return answer
        if answer.code is grpc.StatusCode.DEADLINE_EXCEEDED:
            self.missed()
            raise NoAnswer(NO_ANSWER)
        # After the connection was replaced, any error is possible, such as that its token is unknown.
        if answer.code is grpc.StatusCode.UNAVAILABLE or self._supervisor.transport is not transport:
            self._note_unavailable(answer, transport)
            raise NoAnswer(DAEMON_LOST)
        raise ClientError(answer.text) from answer

    def _note_unavailable(self, error: TransportError, transport: Transport) -> None:
        """Log it when a connected daemon accepts no calls: its socket may be gone. The loss of a daemon, which the
        supervisor logs, looks the same at first."""
        if self._supervisor.transport is not transport:
            return
        now = time.monotonic()
        if self._failing is None or self._failing[0] is not transport:
            self._failing, self._said = (transport, now), False
        elif not self._said and now - self._failing[1] > UNAVAILABLE_SECONDS:
            self._said = True
            _log.warning("kvsidecar: the daemon at %s accepts no calls, so lookups miss: %s", self._socket, error.text)

    def _note_answer(self) -> None:
        if self._said:
            _log.info("kvsidecar: the daemon at %s accepts calls again", self._socket)
        self._failing, self._said = None, False


class PendingLookup:
    """A lookup sent by `Client.begin_lookup`. One thread calls `wait`, and then `result` or `cancel`, once."""

    def __init__(self, lookups: LookupCalls, transport: Transport, query: LookupQuery) -> None:
        self._lookups, self._transport, self._query = lookups, transport, query
        self._parts = LookupParts(query)
        self._part: LookupQuery | None = None
        """The part that is under way."""
        self._in_background = query.hashes > PART_HASHES
        """Whether answers arrive in a thread of the transport: it sends the other parts."""
        self._lock = threading.Lock()
        """Guards what answers change. Nothing is sent with it held: to send delivers answers to others."""
        self._arrived = threading.Event()
        self._error: TransportError | None = None
        self._cancelled = False

    def begin(self) -> bool:
        """Send the first part. False: it cannot be sent.

        Raises:
            ClientError, ValueError: see `Client.lookup`.
        """
        self._part = self._parts.next()
        return self._send(self._part) if self._part is not None else False

    def _send(self, part: LookupQuery) -> bool:
        message = part.request(self._transport.connection.token)
        self._lookups.called()
        if not self._in_background:
            if self._transport.post(message, self.on_answer):
                return True
            self._in_background = True
        return self._transport.post_in_background(message, self.on_answer)

    def on_answer(self, answer: Any) -> None:
        """Take the answer to a part, and send the next one."""
        self._lookups.heard(answer)
        with self._lock:
            part, self._part = self._part, None
            if isinstance(answer, TransportError):
                self._error = answer
            elif part is not None:
                self._parts.take(part.result(answer))
            cancelled = self._cancelled
            if not cancelled and self._error is None:
                self._part = self._parts.next()
            part = self._part
            if part is None and not cancelled:
                self._arrived.set()
        if cancelled:
            self._lookups.late_came(self)
            self._release_lease()
        elif part is not None and not self._send(part):
            self.on_answer(TransportError(grpc.StatusCode.UNAVAILABLE, "the connection was closed"))

    def wait(self, timeout: float) -> bool:
        """Whether the whole answer has arrived. Waits for it at most ``timeout`` seconds; may be called again."""
        if not self._arrived.is_set():
            if self._in_background:
                self._arrived.wait(timeout)
                self._transport.collect()  # answers to other calls are a sign of life as well
            else:
                self._transport.collect(self._arrived.is_set, timeout)
            if timeout > 0 and not self._arrived.is_set():
                self._lookups.missed()  # not after a look: a daemon that was given no time may well live
        return self._arrived.is_set()

    def result(self, timeout: float) -> LookupResult:
        """What `Client.lookup` would have returned. Waits at most ``timeout`` seconds, and gives the lookup up then.

        Raises:
            ClientError: the daemon refuses the request.
        """
        if not self.wait(timeout):
            self.cancel()
            return self._query.no_hits(NO_ANSWER)
        if self._error is None:
            return self._lookups.finished(self._parts)
        self._release_lease()
        try:
            self._lookups.reply(self._error, self._transport)
        except NoAnswer as missing:
            return self._query.no_hits(str(missing))
        raise AssertionError("an error is no reply")

    def cancel(self) -> None:
        """Discard the answer, and release its lease when it arrives. Never waits."""
        with self._lock:
            self._cancelled = True
            if not self._arrived.is_set():
                self._lookups.expect_late(self)
        self._release_lease()

    def _release_lease(self) -> None:
        """Release the lease on the hits so far."""
        with self._lock:
            lease, self._parts.lease = self._parts.lease, 0
        _post_release(self._transport, lease)


def post(transport: Transport, request: pb.LocalRequest, on_answer: OnAnswer | None) -> bool:
    """Send a call without waiting, by whichever way takes it at once. False: the connection is closed."""
    return transport.post(request, on_answer) or transport.post_in_background(request, on_answer)


def _post_release(transport: Transport, lease: int) -> None:
    """Release a lease without waiting; 0: there is none."""
    if lease:
        post(transport, _release_request(lease), None)


def _post_in_turn(transport: Transport, requests: Sequence[pb.LocalRequest]) -> bool:
    """Send calls without waiting, each after the answer to the one before: their order matters."""
    first, *others = requests
    if not others:
        return post(transport, first, None)
    rest = iter(others)

    def go_on(answer: Any) -> None:
        if not isinstance(answer, TransportError) and (request := next(rest, None)) is not None:
            transport.post_in_background(request, go_on)

    return transport.post_in_background(first, go_on)


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
            _post_release(transport, self._lease)

    def on_answer(self, answer: Any) -> None:
        if not isinstance(answer, TransportError):
            self.renewed = answer.renewed
        elif answer.code not in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE):
            _log.warning("kvsidecar: the daemon refuses to renew a lease: %s", answer.text)


def _release_request(lease: int) -> pb.LocalRequest:
    return pb.LocalRequest(release=pb.ReleaseRequest(lease=lease))


def _renew_request(lease: int, seconds: float) -> pb.LocalRequest:
    return pb.LocalRequest(renew=pb.RenewRequest(lease=lease, lease_ms=to_milliseconds("lease_seconds", seconds)))
