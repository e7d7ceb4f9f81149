"""Calls that a step waits for, within a budget: lookups and leases."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc

from kvsidecar.client.breaker import CircuitBreaker
from kvsidecar.client.leases import KeptLease, release_request, renew_request
from kvsidecar.client.messages import CarrierError, lookup_request, lookup_result, no_hits
from kvsidecar.client.results import BREAKER_OPEN, DAEMON_LOST, NO_ANSWER, LookupResult
from kvsidecar.client.supervisor import Supervisor
from kvsidecar.client.transport import Transport
from kvsidecar.errors import ClientError
from kvsidecar.types import LookupMode, Namespace
from kvsidecar.v1 import sidecar_pb2 as pb

_log = logging.getLogger("kvsidecar.client")


_LATE = CarrierError(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer in time")


class NoAnswer(Exception):
    """The daemon was not asked, or did not answer in time. ``reason`` is one of `kvsidecar.client.results`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Lookups:
    """Asks the daemon within a budget, or does not ask it.

    Args:
        budget: seconds that a call waits unless it says otherwise.
    """

    def __init__(self, supervisor: Supervisor, breaker: CircuitBreaker, budget: float, socket: str) -> None:
        self._supervisor = supervisor
        self._breaker = breaker
        self._budget = budget
        self._socket = socket

    def lookup(
        self,
        namespace: Namespace,
        groups: Mapping[int, bytes | Sequence[bytes]],
        mode: LookupMode,
        lease_seconds: float,
        timeout: float | None,
    ) -> LookupResult:
        def request(transport: Transport) -> pb.LocalRequest:
            return lookup_request(namespace, groups, mode, lease_seconds, transport.link.token)

        try:
            return lookup_result(self._ask(request, timeout), namespace, groups)
        except NoAnswer as missing:
            return no_hits(namespace, groups, mode, missing.reason)

    def begin(
        self,
        namespace: Namespace,
        groups: Mapping[int, bytes | Sequence[bytes]],
        mode: LookupMode,
        lease_seconds: float,
    ) -> PendingLookup | None:
        transport = self._supervisor.transport
        if transport is None or not self._breaker.allows:
            return None
        message = lookup_request(namespace, groups, mode, lease_seconds, transport.link.token)
        pending = PendingLookup(self, transport, namespace, groups, mode)
        return pending if transport.post(message, pending.answered) else None

    def keep(self, lease: int, lease_seconds: float) -> KeptLease:
        transport = self._supervisor.transport
        if transport is None or not self._breaker.allows:
            return KeptLease(None)
        kept = KeptLease(transport, lease)
        return kept if transport.post(renew_request(lease, lease_seconds), kept.answered) else KeptLease(None)

    def drop(self, lease: int) -> None:
        transport = self._supervisor.transport
        if transport is not None and self._breaker.allows:
            transport.post(release_request(lease), None)

    def release(self, lease: int, timeout: float | None) -> bool:
        request = release_request(lease)
        try:
            reply: pb.ReleaseReply = self._ask(lambda _: request, timeout)
        except NoAnswer:
            return False
        return reply.released

    def renew(self, lease: int, lease_seconds: float, timeout: float | None) -> float:
        request = renew_request(lease, lease_seconds)
        try:
            reply: pb.RenewReply = self._ask(lambda _: request, timeout)
        except NoAnswer:
            return 0.0
        return reply.lease_ms / 1000 if reply.renewed else 0.0

    def _ask(self, request: Callable[[Transport], pb.LocalRequest], timeout: float | None) -> Any:
        """One call. Raises NoAnswer; ClientError if the daemon refuses the request."""
        deadline = time.monotonic() + (self._budget if timeout is None else timeout)
        transport = self._supervisor.transport
        if not self._breaker.allows:
            raise NoAnswer(BREAKER_OPEN if transport is not None else DAEMON_LOST)
        if transport is None and not self._supervisor.attempts and not self._supervisor.attaches:
            # The first calls of a client that does not attach, a scheduler's: the only ones that wait to be connected.
            self._supervisor.start_without_registration()
            if not self._supervisor.wait_attempt(0, deadline - time.monotonic()):
                self._breaker.failed()
            transport = self._supervisor.transport
        if transport is None:
            raise NoAnswer(DAEMON_LOST)
        message = request(transport)
        try:
            answer = transport.call(message, max(0.001, deadline - time.monotonic()))
        except CarrierError as error:
            answer = error
        return self.reply(answer, transport)

    def reply(self, answer: Any, transport: Transport) -> Any:
        """The reply in an answer, which may be a CarrierError; tells the breaker. Raises as `_ask`."""
        if not isinstance(answer, CarrierError):
            self._breaker.succeeded()
            return answer
        if answer.code is grpc.StatusCode.DEADLINE_EXCEEDED:
            if self._breaker.failed():
                _log.warning("the daemon at %s does not answer in time: lookups miss until it does", self._socket)
                self._supervisor.wake()
            raise NoAnswer(NO_ANSWER)
        # A connection that was given up in the meantime answers anything, such as that its token is unknown.
        if answer.code is grpc.StatusCode.UNAVAILABLE or self._supervisor.transport is not transport:
            raise NoAnswer(DAEMON_LOST)
        raise ClientError(answer.text) from answer


class PendingLookup:
    """A lookup that `Client.begin_lookup` has sent. For one thread, which calls `result` or `give_up` once."""

    def __init__(
        self,
        lookups: Lookups,
        transport: Transport,
        namespace: Namespace,
        groups: Mapping[int, bytes | Sequence[bytes]],
        mode: LookupMode,
    ) -> None:
        self._lookups, self._transport = lookups, transport
        self._namespace, self._groups, self._mode = namespace, groups, mode
        self._lock = threading.Lock()
        """Guards the two below: over gRPC the answer comes in another thread."""
        self._answer: Any = None
        self._given_up = False

    def answered(self, answer: Any) -> None:
        """The daemon has answered, has refused it, or is lost."""
        with self._lock:
            self._answer, late = answer, self._given_up
        if late:
            self._drop_lease(answer)

    def result(self, timeout: float) -> LookupResult:
        """What `Client.lookup` would have said; waits at most ``timeout`` seconds for it.

        Raises:
            ClientError: the daemon refuses the request.
        """
        if self._answer is None:
            self._transport.collect(lambda: self._answer is not None, timeout)
        try:
            reply = self._lookups.reply(_LATE if self._answer is None else self._answer, self._transport)
        except NoAnswer as missing:
            self.give_up()
            return no_hits(self._namespace, self._groups, self._mode, missing.reason)
        return lookup_result(reply, self._namespace, self._groups)

    def give_up(self) -> None:
        """Nobody wants the answer: its lease is dropped, now or when it comes. Never waits."""
        with self._lock:
            self._given_up, answer = True, self._answer
        self._drop_lease(answer)

    def _drop_lease(self, answer: Any) -> None:
        if isinstance(answer, pb.LookupReply) and answer.lease:
            self._transport.post(release_request(answer.lease), None)
