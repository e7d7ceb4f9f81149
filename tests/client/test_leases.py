"""Leases that are kept and given up without waiting."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvsidecar.client import Client, LeaseRenewal, Namespace
from kvsidecar.client.grpc_transport import GrpcTransport
from kvsidecar.client.local_transport import LocalTransport
from kvsidecar.client.messages import TransportError
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.client.fake_daemon import FakeDaemon
from tests.harness import SECONDS, hashes


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
