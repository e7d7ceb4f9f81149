"""Lookups and leases: calls that an engine's step waits for, so each has a budget and the breaker behind it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import grpc

from kvsidecar.client.breaker import CircuitBreaker
from kvsidecar.client.connection import Connection
from kvsidecar.client.keeper import Keeper
from kvsidecar.client.messages import lookup_request, lookup_result, no_hits
from kvsidecar.client.results import BREAKER_OPEN, DAEMON_LOST, NO_ANSWER, LookupResult
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

    def __init__(self, keeper: Keeper, breaker: CircuitBreaker, budget: float, socket: str) -> None:
        self._keeper = keeper
        self._breaker = breaker
        self._budget = budget
        self._socket = socket

    def lookup(
        self,
        namespace: Namespace,
        groups: Mapping[int, Sequence[bytes]],
        mode: LookupMode,
        lease_seconds: float,
        timeout: float | None,
    ) -> LookupResult:
        def request(connection: Connection) -> pb.LookupRequest:
            return lookup_request(namespace, groups, mode, lease_seconds, connection.token)

        try:
            return lookup_result(self._ask("Lookup", request, timeout), groups)
        except NoAnswer as missing:
            return no_hits(groups, mode, missing.reason)

    def release(self, lease: int, timeout: float | None) -> bool:
        try:
            reply: pb.ReleaseReply = self._ask("Release", lambda _: pb.ReleaseRequest(lease=lease), timeout)
        except NoAnswer:
            return False
        return reply.released

    def renew(self, lease: int, lease_seconds: float, timeout: float | None) -> float:
        request = pb.RenewRequest(lease=lease, lease_ms=int(lease_seconds * 1000))
        try:
            reply: pb.RenewReply = self._ask("Renew", lambda _: request, timeout)
        except NoAnswer:
            return 0.0
        return reply.lease_ms / 1000 if reply.renewed else 0.0

    def _ask(self, method: str, request: Any, timeout: float | None) -> Any:
        """One call. Raises NoAnswer; ClientError if the daemon refuses the request."""
        deadline = time.monotonic() + (self._budget if timeout is None else timeout)
        connection = self._keeper.connection
        if connection is None and not self._keeper.started:
            # The first call of a client that does not attach, a scheduler's: the only one that waits to be connected.
            self._keeper.start(None)
            self._keeper.wait_attempt(0, deadline - time.monotonic())
            connection = self._keeper.connection
        if connection is None:
            raise NoAnswer(DAEMON_LOST)
        if not self._breaker.allows:
            raise NoAnswer(BREAKER_OPEN)
        try:
            call = getattr(connection.stub, method)
            reply = call(request(connection), timeout=max(0.001, deadline - time.monotonic()))
        except grpc.RpcError as error:
            code = error.code()
            if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                if self._breaker.failed():
                    _log.warning("the daemon at %s does not answer in time: lookups miss until it does", self._socket)
                    self._keeper.wake()
                raise NoAnswer(NO_ANSWER) from None
            # A connection that was given up in the meantime answers anything, such as that its token is unknown.
            if code is grpc.StatusCode.UNAVAILABLE or self._keeper.connection is not connection:
                raise NoAnswer(DAEMON_LOST) from None
            raise ClientError(error.details() or code.name) from error
        except ValueError:
            if self._keeper.connection is connection:
                raise
            raise NoAnswer(DAEMON_LOST) from None  # "Cannot invoke RPC on closed channel!"
        self._breaker.succeeded()
        return reply
