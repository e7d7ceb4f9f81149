"""Calls that a step waits for, within a budget: lookups and leases."""

from __future__ import annotations

import logging
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
        def request(transport: Transport) -> pb.LaneRequest:
            return lookup_request(namespace, groups, mode, lease_seconds, transport.link.token)

        try:
            return lookup_result(self._ask(request, timeout), namespace, groups)
        except NoAnswer as missing:
            return no_hits(namespace, groups, mode, missing.reason)

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

    def _ask(self, request: Callable[[Transport], pb.LaneRequest], timeout: float | None) -> Any:
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
            reply = transport.call(message, max(0.001, deadline - time.monotonic()))
        except CarrierError as error:
            if error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
                if self._breaker.failed():
                    _log.warning("the daemon at %s does not answer in time: lookups miss until it does", self._socket)
                    self._supervisor.wake()
                raise NoAnswer(NO_ANSWER) from None
            # A connection that was given up in the meantime answers anything, such as that its token is unknown.
            if error.code is grpc.StatusCode.UNAVAILABLE or self._supervisor.transport is not transport:
                raise NoAnswer(DAEMON_LOST) from None
            raise ClientError(error.text) from error
        self._breaker.succeeded()
        return reply
