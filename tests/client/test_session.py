"""One session, with its stream in the test's hands."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc
import pytest

from kvsidecar.client.ledger import Ledger, Phase, SubmittedJob
from kvsidecar.client.messages import TransportError
from kvsidecar.client.session import AttachSession
from kvsidecar.client.types import Blocks
from kvsidecar.client.waiting import Monitor
from kvsidecar.types import Direction, State
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.client.fake_transport import FakeStream, FakeTransport
from tests.harness import SECONDS, hashes


class Opened:
    """A session that is registered."""

    def __init__(self) -> None:
        self.ledger, self.monitor, self.woken = Ledger(10), Monitor(), threading.Event()
        transport = FakeTransport()
        register = pb.Register(instance="test")
        self.session = AttachSession(
            transport, pb.AttachRequest(register=register), self.ledger, self.monitor, ring_size=1, wake=self.woken.set
        )  # fmt: skip
        self.stream: FakeStream = transport.stream
        assert self.stream.next().register == register, "it does not register first"
        self.until(lambda: bool(self.session.id))

    def until(self, is_done: object) -> None:
        with self.monitor.changed:
            assert self.monitor.changed.wait_for(is_done, SECONDS)  # type: ignore[arg-type]

    def job(self, number: int) -> SubmittedJob:
        job = SubmittedJob(number, Direction.STORE, [Blocks(0, hashes(number), [number])])
        with self.monitor.lock:
            self.ledger.add(job)
        return job


@pytest.fixture
def opened() -> Iterator[Opened]:
    opened = Opened()
    yield opened
    opened.stream.end()
    opened.session.join()


def test_a_daemon_that_has_failed_is_told_of_in_the_log_once(opened: Opened, caplog: pytest.LogCaptureFixture) -> None:
    for bytes_pinned in (1, 2):
        failed = pb.Readiness(state=pb.Readiness.STATE_FAILED, reason="no memory to lock", pinned_bytes=bytes_pinned)
        opened.stream.reply(readiness=failed)
    opened.stream.reply(readiness=pb.Readiness(state=pb.Readiness.STATE_DRAINING))
    opened.until(lambda: opened.session.readiness.state is State.DRAINING)
    assert [each for each in caplog.messages if "no memory to lock" in each] == [
        "kvsidecar: the daemon has failed and stores nothing: no memory to lock"
    ]


def test_a_drain_is_told_of_in_the_log_and_its_end(opened: Opened, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    drained = pb.Readiness(state=pb.Readiness.STATE_DRAINING, reason="an operator asked to drain")
    opened.stream.reply(readiness=drained)
    opened.stream.reply(readiness=pb.Readiness(state=pb.Readiness.STATE_READY, pool_bytes=8 << 20))
    opened.stream.reply(readiness=pb.Readiness(state=pb.Readiness.STATE_PINNING))
    opened.until(lambda: opened.session.readiness.state is State.PINNING)
    assert caplog.messages[-2:] == [
        "kvsidecar: the daemon is draining, no offload until it is ready: an operator asked to drain",
        "kvsidecar: the daemon is ready: a pool of 8 MiB",
    ]


def test_jobs_are_sent_in_order_and_what_was_to_be_said_goes_with_the_next(opened: Opened) -> None:
    with opened.monitor.lock:
        opened.session.set_idle(True)
    assert opened.stream.said.empty(), "a hint cost a message of its own"
    for number in (1, 2):
        opened.session.send(opened.job(number))
    sent = [opened.stream.next() for _ in range(3)]
    assert [message.WhichOneof("message") for message in sent] == ["idle", "store", "store"]
    assert [message.store.job for message in sent[1:]] == [1, 2]
    opened.stream.done(1)
    opened.until(lambda: not opened.ledger.is_outstanding(1))
    assert opened.ledger.is_outstanding(2)


@pytest.mark.parametrize("error", [None, TransportError(grpc.StatusCode.UNAVAILABLE, "gone")])
def test_what_was_said_before_the_end_is_taken_and_nothing_is_sent_after_it(
    opened: Opened, error: TransportError | None
) -> None:
    opened.stream.full = True
    sent, queued = opened.job(1), opened.job(2)
    opened.session.send(queued)
    opened.stream.done(sent.number)
    opened.stream.end(error, quiesced=error is None)
    assert opened.woken.wait(SECONDS), "the supervisor was not woken"
    assert (opened.session.ended, opened.session.error, opened.session.quiesced) == (True, error, error is None)
    assert not opened.ledger.is_outstanding(1)
    opened.stream.full = False
    opened.session.send(opened.job(3))
    assert opened.stream.said.empty()
    assert queued.phase is Phase.QUEUED, "the daemon cannot have heard of it"


@pytest.mark.parametrize("reader", ["its thread", "an engine's"])
def test_a_reply_that_fails_unexpectedly_ends_the_session_and_is_heard(
    opened: Opened, reader: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What looks after lost sessions then ends its jobs, and attaches again. No engine's step ends with it."""
    monkeypatch.setattr(opened.ledger, "finish", lambda _: 1 // 0)
    if reader == "its thread":
        opened.stream.done(1)
    else:
        done = pb.AttachReply(done=pb.JobDone(job=1, outcome=pb.JobDone.OUTCOME_DONE))
        opened.stream._arrived.append(done)
        opened.session.read_now()
    assert opened.woken.wait(SECONDS), "the supervisor was not woken"
    assert (opened.session.ended, opened.stream.cancelled) == (True, True)
    assert [record.exc_info is not None for record in caplog.records] == [True]
