"""Leases that are kept and given up without waiting."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from kvsidecar.client import Client, LeaseRenewal, LookupMode, Namespace
from kvsidecar.client.grpc_transport import GrpcTransport
from kvsidecar.client.local_transport import LocalTransport
from kvsidecar.client.lookups import LookupCalls
from kvsidecar.client.messages import LookupQuery, TransportError
from kvsidecar.client.types import NO_ANSWER
from kvsidecar.support.breaker import CircuitBreaker
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.client.fake_daemon import FakeDaemon
from tests.harness import NAMESPACE, SECONDS, hashes


class FakeTransport:
    """Hands on ``arrives``, an answer that lies in the socket, when it is asked for."""

    def __init__(self) -> None:
        self.released: list[int] = []
        self.lease: LeaseRenewal | None = None
        self.arrives: Any = None

    def post(self, request: pb.LocalRequest, then: object) -> bool:
        assert (request.WhichOneof("message"), then) == ("release", None)
        self.released.append(request.release.lease)
        return True

    def collect(self) -> None:
        if self.arrives is not None and self.lease is not None:
            answer, self.arrives = self.arrives, None
            self.lease.on_answer(answer)


@pytest.fixture
def transport() -> FakeTransport:
    return FakeTransport()


@pytest.fixture
def lease(transport: FakeTransport) -> LeaseRenewal:
    transport.lease = LeaseRenewal(transport, 7)  # type: ignore[arg-type]
    return transport.lease


def test_one_is_released_once(lease: LeaseRenewal, transport: FakeTransport) -> None:
    assert lease.sent
    assert not transport.released
    for _ in range(2):
        lease.release()
    assert transport.released == [7]


@pytest.mark.parametrize("renewed", [True, False])
def test_whether_it_was_kept_is_known_when_it_is_released(
    lease: LeaseRenewal, transport: FakeTransport, renewed: bool
) -> None:
    assert lease.renewed is None
    transport.arrives = pb.RenewReply(renewed=renewed)
    lease.release()
    assert lease.renewed is renewed
    assert transport.released == [7]


def test_one_that_is_refused_is_logged(
    lease: LeaseRenewal, transport: FakeTransport, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        lease.on_answer(TransportError(grpc.StatusCode.PERMISSION_DENIED, "somebody else's"))
    lease.release()
    assert "somebody else's" in caplog.text
    assert lease.renewed is None


class Lookup(FakeTransport):
    """Takes a lookup, which `on_answer` answers."""

    connection = SimpleNamespace(token=b"t")

    def __init__(self) -> None:
        super().__init__()
        self.late: set[object] = set()
        self.woken = False
        self.on_answer: Callable[[Any], None] = lambda _: None

    def post(self, request: pb.LocalRequest, then: Any) -> bool:
        if request.WhichOneof("message") != "lookup":
            return super().post(request, then)
        self.on_answer = then
        return True

    def call(self, request: pb.LocalRequest, seconds: float, on_late: Any) -> Any:
        """It is not answered in time."""
        self.on_answer = on_late
        return TransportError(grpc.StatusCode.DEADLINE_EXCEEDED, "", comes_late=True)

    def lookups(self) -> LookupCalls:
        supervisor: Any = SimpleNamespace(transport=self, late_answers=self.late, wake=self.wake, attempts=1)
        dialling: Any = SimpleNamespace(breaker=CircuitBreaker(), step_budget=1.0, socket="")
        return LookupCalls(supervisor, dialling)

    def wake(self) -> None:
        self.woken = True


QUERY = LookupQuery(NAMESPACE, {0: hashes("a")}, LookupMode.PREFIX, lease_seconds=2.0)


def test_one_that_a_cancelled_lookup_brings_is_released_though_nobody_asks_for_anything_any_more() -> None:
    transport = Lookup()
    pending = transport.lookups().begin(QUERY)
    assert pending is not None
    pending.cancel()
    assert (transport.late, transport.woken) == ({pending}, True), "nobody reads the answer"
    transport.on_answer(pb.LookupReply(ready=True, lease=7, groups=[pb.GroupHits(hits=1)]))
    assert transport.released == [7]
    assert not transport.late


def test_one_that_a_late_answer_brings_is_released() -> None:
    transport = Lookup()
    assert transport.lookups().lookup(QUERY, 0.1).reason == NO_ANSWER
    assert (len(transport.late), transport.woken) == (1, True), "nobody reads the answer"
    transport.on_answer(pb.LookupReply(ready=True, lease=7, groups=[pb.GroupHits(hits=1)]))
    assert transport.released == [7]
    assert not transport.late


def test_one_of_a_daemon_that_has_begun_to_decline_lookups_is_released() -> None:
    transport = Lookup()
    pending = transport.lookups().begin(QUERY)
    assert pending is not None
    transport.on_answer(pb.LookupReply(ready=False, lease=7, groups=[pb.GroupHits()]))
    result = pending.result(0.0)
    assert (result.ready, result.lease) == (False, None)
    assert transport.released == [7]


@pytest.mark.parametrize("local_protocol", [True, False])
def test_whether_it_was_asked_for_is_known(
    short_dir: Path, local_protocol: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        FakeDaemon(short_dir, local_protocol=local_protocol) as daemon,
        Client(daemon.socket, step_budget=SECONDS) as client,
    ):
        assert not client.renew_nowait(7, 60.0).sent, "nothing is connected yet"
        client.release_nowait(7)
        client.lookup(Namespace("m", "d", "l", 16, 1, 1, "h"), {0: hashes("a")})
        assert client.renew_nowait(7, 60.0).sent
        transport = LocalTransport if local_protocol else GrpcTransport
        monkeypatch.setattr(transport, "post", lambda *_: False)
        assert client.renew_nowait(7, 60.0).sent, "there is another way"
        monkeypatch.setattr(transport, "post_in_background", lambda *_: False)
        assert not client.renew_nowait(7, 60.0).sent


def test_it_is_asked_for_once_on_the_first_transport_that_takes_it() -> None:
    class Calls:
        def __init__(self, takes: bool) -> None:
            self.takes, self.asked = takes, 0

        def post(self, request: pb.LocalRequest, then: object) -> bool:
            self.asked += 1
            return self.takes

    transport = object.__new__(LocalTransport)
    calls = transport._calls = tuple(map(Calls, (False, True, True)))  # type: ignore[assignment]
    assert transport.post(pb.LocalRequest(), None)
    assert [each.asked for each in calls] == [1, 1, 0]
    transport._calls = (Calls(False),)  # type: ignore[assignment]
    assert not transport.post(pb.LocalRequest(), None)


def test_one_that_could_not_be_asked_for_is_none() -> None:
    lease = LeaseRenewal(None)
    lease.release()
    assert (lease.renewed, lease.sent) == (None, False)
