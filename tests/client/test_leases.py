"""A lease that nobody waits for is released once, whenever its answer comes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvsidecar.client import Client, Namespace, PendingLease
from kvsidecar.client.connection import Connection
from kvsidecar.client.messages import CarrierError
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.client.fake_daemon import FakeDaemon
from tests.harness import SECONDS, hashes

ANSWER = pb.LookupReply(ready=True, lease=7, groups=[pb.GroupHits(group=3, hits=2)])


class FakeConnection:
    """Hands on ``arrives``, an answer that lies in the socket, when it is asked for."""

    def __init__(self) -> None:
        self.released: list[int] = []
        self.pending: PendingLease | None = None
        self.arrives: Any = None

    def post(self, request: pb.LaneRequest, then: object) -> None:
        assert (request.WhichOneof("message"), then) == ("release", None)
        self.released.append(request.release.lease)

    def collect(self) -> None:
        if self.arrives is not None and self.pending is not None:
            answer, self.arrives = self.arrives, None
            self.pending.answered(answer)


@pytest.fixture
def connection() -> FakeConnection:
    return FakeConnection()


@pytest.fixture
def lease(connection: FakeConnection) -> PendingLease:
    connection.pending = PendingLease(connection)  # type: ignore[arg-type]
    return connection.pending


def test_one_that_was_answered_is_released(lease: PendingLease, connection: FakeConnection) -> None:
    lease.answered(ANSWER)
    assert (lease.hits, lease.asked) == ({3: 2}, True)
    assert not connection.released
    for _ in range(2):
        lease.release()
    assert connection.released == [7]


def test_one_whose_answer_lies_in_the_socket_is_released_at_once(
    lease: PendingLease, connection: FakeConnection
) -> None:
    connection.arrives = ANSWER
    lease.release()
    assert connection.released == [7]
    assert lease.hits == {3: 2}


def test_one_that_is_answered_later_is_released_then(lease: PendingLease, connection: FakeConnection) -> None:
    lease.release()
    assert lease.hits is None
    assert not connection.released
    lease.answered(ANSWER)
    assert connection.released == [7]


def test_one_without_a_hit_needs_no_release(lease: PendingLease, connection: FakeConnection) -> None:
    lease.answered(pb.LookupReply(ready=True, groups=[pb.GroupHits(group=3)]))
    lease.release()
    assert lease.hits == {3: 0}
    assert not connection.released


def test_one_that_is_refused_is_logged(
    lease: PendingLease, connection: FakeConnection, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        lease.answered(CarrierError(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many leases"))
    lease.release()
    assert "too many leases" in caplog.text
    assert (lease.hits, connection.released) == (None, [])


@pytest.mark.parametrize("fast_lane", [True, False])
def test_whether_it_was_asked_for_is_known(short_dir: Path, fast_lane: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeDaemon(short_dir, fast_lane=fast_lane) as daemon, Client(daemon.socket, step_budget=SECONDS) as client:
        namespace = Namespace("m", "d", "l", 16, 1, 1, "h")
        assert not client.lease(namespace, {0: hashes("a")}, 60.0).asked, "nothing is connected yet"
        client.lookup(namespace, {0: hashes("a")})
        assert client.lease(namespace, {0: hashes("a")}, 60.0).asked
        monkeypatch.setattr(Connection, "post", lambda *_: False)
        assert not client.lease(namespace, {0: hashes("a")}, 60.0).asked


def test_it_is_asked_for_once_on_the_first_connection_that_takes_it() -> None:
    class Calls:
        def __init__(self, takes: bool) -> None:
            self.takes, self.asked = takes, 0

        def post(self, request: pb.LaneRequest, then: object) -> bool:
            self.asked += 1
            return self.takes

    connection = object.__new__(Connection)
    calls = connection._calls = tuple(map(Calls, (False, True, True)))  # type: ignore[assignment]
    assert connection.post(pb.LaneRequest(), None)
    assert [each.asked for each in calls] == [1, 1, 0]
    connection._calls = (Calls(False),)  # type: ignore[assignment]
    assert not connection.post(pb.LaneRequest(), None)


def test_one_that_could_not_be_asked_for_is_none() -> None:
    lease = PendingLease(None)
    lease.release()
    assert (lease.hits, lease.asked) == (None, False)
