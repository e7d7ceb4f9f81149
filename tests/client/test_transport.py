"""What every transport promises, asked of each of them at a real daemon."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from kvsidecar.client import HostBuffer
from kvsidecar.client.ledger import Ledger, Phase, SubmittedJob
from kvsidecar.client.messages import LookupQuery, Registration, TransportError
from kvsidecar.client.send_queue import SendQueue
from kvsidecar.client.supervisor import open_transport
from kvsidecar.client.transport import DaemonStream, Transport
from kvsidecar.client.types import Blocks
from kvsidecar.client.waiting import Monitor
from kvsidecar.types import Direction, LookupMode
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.e2e.endings import pause
from tests.harness import NAMESPACE, SECONDS, DaemonProcess, eventually, hashes, layout
from tests.marks import lent_daemon

pytestmark = lent_daemon


@pytest.fixture
def buffer() -> Iterator[HostBuffer]:
    buffer = HostBuffer(1 << 20)
    yield buffer
    buffer.close()


@pytest.fixture(params=["local", "grpc"])
def transport(request: pytest.FixtureRequest, daemon: DaemonProcess, buffer: HostBuffer) -> Iterator[Transport]:
    local = request.param == "local"
    transport = open_transport(daemon.socket, fds=[buffer.fd], name="contract", timeout=SECONDS, local=local)
    assert transport.is_local is local
    yield transport
    transport.close()


class Rank:
    """A rank's stream, and what a session does with it."""

    def __init__(self, transport: Transport, buffer: HostBuffer, *, register: bool = True) -> None:
        self.ledger, self.monitor = Ledger(1000), Monitor()
        self.send_queue = SendQueue(self.ledger)
        self.stream: DaemonStream = transport.open_stream(self.send_queue, self.monitor)
        self.replies: list[pb.AttachReply] = []
        if register:
            registration = Registration("contract", NAMESPACE, buffer.kv_buffers(), (layout(),), 0, 1)
            self.put(registration.message(transport.connection.token))
            assert self.next().HasField("registered")

    def put(self, *items: Any) -> None:
        with self.monitor.lock:
            self.send_queue.put(*items)
            self.stream.pump()

    def store(self, number: int) -> SubmittedJob:
        job = SubmittedJob(number, Direction.STORE, [Blocks(0, hashes(number), [number % 4])], phase=Phase.QUEUED)
        with self.monitor.lock:
            self.ledger.add(job)
        self.put(job)
        return job

    def finish(self) -> None:
        with self.monitor.lock:
            self.send_queue.finish()
            self.stream.pump()

    def receive(self) -> None:
        self.stream.wait()
        self.replies += self.stream.receive()

    def next(self) -> pb.AttachReply:
        """The next reply but of the daemon's readiness, which it tells when it likes."""
        while True:
            while not self.replies:
                assert not self.stream.ended, self.stream.error
                self.receive()
            if not (reply := self.replies.pop(0)).HasField("readiness"):
                return reply

    def read_to_the_end(self) -> None:
        while not self.stream.ended:
            self.receive()
        self.stream.close()


def lookup(*names: object) -> pb.LocalRequest:
    return LookupQuery(NAMESPACE, {0: hashes(*names)}, LookupMode.PREFIX).request(b"")


def test_what_is_put_arrives_and_is_answered(transport: Transport, buffer: HostBuffer) -> None:
    rank = Rank(transport, buffer)
    for number in range(1, 21):
        rank.store(number)
    answered = {rank.next().done.job for _ in range(20)}
    assert answered == set(range(1, 21))
    assert transport.call(lookup(1), SECONDS).groups[0].hits == 1
    rank.stream.cancel()
    rank.read_to_the_end()


def test_a_stream_that_is_finished_ends_in_order_with_all_it_owes(transport: Transport, buffer: HostBuffer) -> None:
    rank = Rank(transport, buffer)
    rank.store(1)
    rank.finish()
    rank.store(2)
    assert rank.next().done.job == 1
    rank.read_to_the_end()
    assert (rank.stream.error, rank.stream.quiesced, rank.replies) == (None, True, [])
    assert not transport.going_down()


def test_a_stream_that_is_broken_off_ends_with_an_error_and_proves_nothing(
    transport: Transport, buffer: HostBuffer
) -> None:
    rank = Rank(transport, buffer)
    threading.Timer(0.01, rank.stream.cancel).start()
    rank.read_to_the_end()
    assert rank.stream.error is not None
    assert not rank.stream.quiesced


def test_a_registration_that_is_refused_ends_the_stream_with_the_daemons_words(
    transport: Transport, buffer: HostBuffer
) -> None:
    rank = Rank(transport, buffer, register=False)
    rank.put(pb.AttachRequest(register=pb.Register(token=transport.connection.token, protocol=4711)))
    rank.read_to_the_end()
    assert rank.stream.error is not None
    assert "protocol" in rank.stream.error.text


def test_a_job_that_ends_in_the_outbox_is_told_to_who_waits(transport: Transport, buffer: HostBuffer) -> None:
    rank = Rank(transport, buffer)
    late = SubmittedJob(1, Direction.STORE, [Blocks(0, hashes(1), [1])], deadline=time.monotonic())
    with rank.monitor.changed:
        rank.ledger.add(late)
        rank.put(late)
        rank.monitor.changed.wait_for(lambda: not rank.ledger.is_outstanding(1), SECONDS)
        assert [done.reason for done in rank.ledger.take_finished()] == ["deadline"]
    rank.finish()
    rank.read_to_the_end()


def test_calls_are_answered_refused_or_late(transport: Transport, daemon: DaemonProcess) -> None:
    assert transport.call(lookup("a"), SECONDS).ready
    assert not transport.call(pb.LocalRequest(release=pb.ReleaseRequest(lease=4711)), SECONDS).released
    with pytest.raises(TransportError) as refused:
        transport.call(pb.LocalRequest(lookup=pb.LookupRequest(namespace=pb.Namespace(block_size=0))), SECONDS)
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.text
    pause(daemon)
    with pytest.raises(TransportError) as late:
        transport.call(lookup("a"), 0.05)
    daemon.process.send_signal(signal.SIGCONT)
    assert late.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


def test_what_is_posted_is_handed_on_when_it_has_arrived(transport: Transport) -> None:
    transport.call(lookup("a"), SECONDS)
    got: list[Any] = []
    assert transport.post(pb.LocalRequest(renew=pb.RenewRequest(lease=4711, lease_ms=1)), got.append)
    assert transport.post(pb.LocalRequest(release=pb.ReleaseRequest(lease=4711)), None)
    eventually(lambda: transport.collect() or got)
    assert [answer.renewed for answer in got] == [False]


def test_what_is_posted_is_done_though_nobody_wants_the_answer(
    transport: Transport, daemon: DaemonProcess, buffer: HostBuffer
) -> None:
    rank = Rank(transport, buffer)
    rank.store(1)
    assert rank.next().done.job == 1
    for _ in range(5):
        leased = LookupQuery(NAMESPACE, {0: hashes(1)}, LookupMode.PREFIX, 600.0).request(transport.connection.token)
        lease = transport.call(leased, SECONDS).lease
        assert daemon.metric("kvsidecar_leases") == 1
        assert transport.post(pb.LocalRequest(release=pb.ReleaseRequest(lease=lease)), None)
        eventually(lambda: daemon.metric("kvsidecar_leases") == 0)


def test_a_refusal_of_what_is_posted_is_handed_on(transport: Transport) -> None:
    transport.call(lookup("a"), SECONDS)
    got: list[Any] = []
    bad = pb.LocalRequest(lookup=pb.LookupRequest(namespace=pb.Namespace(block_size=0)))
    assert transport.post(bad, got.append)
    eventually(lambda: transport.collect() or got)
    assert [error.code for error in got] == [grpc.StatusCode.INVALID_ARGUMENT]


def test_who_waits_for_what_it_posted_has_it_or_knows_that_it_will_not_come(
    transport: Transport, daemon: DaemonProcess
) -> None:
    transport.call(lookup("a"), SECONDS)
    got: list[Any] = []
    for _ in range(20):
        assert transport.post(lookup("a"), got.append)
    transport.collect(lambda: len(got) == 20, SECONDS)
    assert [answer.ready for answer in got] == [True] * 20
    pause(daemon)
    assert transport.post(lookup("a"), got.append)
    transport.collect(lambda: len(got) == 21, 0.05)
    assert len(got) == 20
    daemon.process.kill()
    daemon.process.wait()
    transport.collect(lambda: len(got) == 21, SECONDS)
    assert got[20].code is grpc.StatusCode.UNAVAILABLE


def test_a_question_in_the_background_is_answered_also_when_the_daemon_knows_us_no_more(
    transport: Transport, daemon: DaemonProcess
) -> None:
    got: list[Any] = []
    came = threading.Event()

    def then(answer: Any) -> None:
        got.append(answer)
        came.set()

    transport.query(pb.ReleaseRequest(lease=0), SECONDS, then)
    assert came.wait(SECONDS)
    assert got == [pb.ReleaseReply(released=False)]
    transport.connection.shut_down()
    for _ in range(3):  # whether or not it has noticed
        came.clear()
        transport.query(pb.StatusRequest(session=4711), SECONDS, then)
        assert came.wait(SECONDS)
        assert got[-1].session_ended, got[-1]


def test_the_end_of_the_daemon_is_told_to_all_who_wait(
    transport: Transport, daemon: DaemonProcess, buffer: HostBuffer
) -> None:
    rank = Rank(transport, buffer)
    transport.call(lookup("a"), SECONDS)
    daemon.process.kill()
    daemon.process.wait()
    rank.read_to_the_end()
    assert rank.stream.error is not None
    assert not rank.stream.quiesced
    with pytest.raises(TransportError) as lost:
        transport.call(lookup("a"), SECONDS)
    assert lost.value.code is grpc.StatusCode.UNAVAILABLE
    eventually(transport.connection.process.gone)  # the kernel ends its copiers


def test_nothing_is_carried_by_one_that_is_closed(transport: Transport) -> None:
    transport.call(lookup("a"), SECONDS)
    transport.close()
    with pytest.raises(TransportError) as closed:
        transport.call(lookup("a"), SECONDS)
    assert closed.value.code is grpc.StatusCode.UNAVAILABLE
    assert not transport.post(lookup("a"), None)
