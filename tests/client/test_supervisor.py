"""The connection supervisor, with its daemons in the test's hands."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from kvsidecar.client import supervisor as module
from kvsidecar.client.buffers import KVBuffers
from kvsidecar.client.ledger import Ledger, SubmittedJob
from kvsidecar.client.messages import Registration, TransportError
from kvsidecar.client.supervisor import Dialling, Supervisor
from kvsidecar.client.types import Blocks
from kvsidecar.client.waiting import Monitor
from kvsidecar.errors import AttachRefused, ClientError, DaemonUnreachable
from kvsidecar.support import fence as fences
from kvsidecar.support.breaker import Backoff, BreakerState, CircuitBreaker
from kvsidecar.support.fence import Fence
from kvsidecar.types import Direction, Outcome
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.client.fake_transport import FakeTransport
from tests.harness import NAMESPACE, SECONDS, eventually, hashes

REGISTRATION = Registration("test", NAMESPACE, KVBuffers("host", ()), (), 0, 1)
NOBODY = DaemonUnreachable("nobody is there")


class Node:
    """Where a supervisor dials: every attempt gets the next of ``daemons``, or fails with it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.daemons: queue.SimpleQueue[FakeTransport | ClientError] = queue.SimpleQueue()
        self.options: list[dict[str, Any]] = []
        self.ledger, self.monitor = Ledger(10), Monitor()
        self.breaker = CircuitBreaker(failures=1, silence=0.0, backoff=Backoff(1e-3, 1e-3))
        monkeypatch.setattr(module, "open_transport", self._dial)
        monkeypatch.setattr(module, "STREAM_END_SECONDS", 0.05)
        dialling = Dialling("kvs.sock", "test", True, SECONDS, SECONDS, self.breaker, Backoff(1e-3, 1e-3))
        self.supervisor = Supervisor(dialling, self.ledger, self.monitor)

    def _dial(self, socket: str, **options: Any) -> FakeTransport:
        if socket != "kvs.sock":  # a client of an earlier test that still looks for its daemon
            raise NOBODY
        self.options.append(options)
        try:
            daemon = self.daemons.get(timeout=options["timeout"])
        except queue.Empty:
            raise NOBODY from None
        if isinstance(daemon, ClientError):
            raise daemon
        return daemon

    def until(self, is_done: Callable[[], object]) -> None:
        with self.monitor.changed:
            assert self.monitor.changed.wait_for(is_done, SECONDS)

    def attached(self, fence: Fence | None = None) -> FakeTransport:
        """Attach to a new daemon."""
        daemon = FakeTransport(fence=fence)
        self.daemons.put(daemon)
        if not self.supervisor.has_registration:
            self.supervisor.start(REGISTRATION)
        self.until(lambda: self.supervisor.session)
        assert daemon.stream.next().HasField("register")
        return daemon

    def submit(
        self, number: int, direction: Direction = Direction.STORE, deadline: float | None = None
    ) -> SubmittedJob:
        job = SubmittedJob(number, direction, [Blocks(0, hashes(number), [number])], deadline=deadline)
        with self.monitor.lock:
            self.ledger.add(job)
            assert self.supervisor.session is not None
            self.supervisor.session.send(job)
        return job

    def ended(self) -> dict[int, tuple[Outcome, str]]:
        with self.monitor.lock:
            return {done.job: (done.outcome, done.reason) for done in self.ledger.take_finished()}


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    node = Node(monkeypatch)
    yield node
    node.daemons.put(NOBODY)
    node.supervisor.close(0.0)


def test_it_dials_until_a_daemon_takes_it_and_says_so_once_each(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvsidecar.client")
    for each in (NOBODY, NOBODY, AttachRefused("too big"), AttachRefused("too big"), NOBODY):
        node.daemons.put(each)
    daemon = node.attached()
    assert (node.supervisor.attempts, node.supervisor.error) == (6, None)
    assert node.supervisor.transport is daemon
    # The thread that reads the daemon's answers says it, perhaps a little later.
    eventually(lambda: "attached to the daemon at kvs.sock (epoch 7)" in caplog.text, caplog.text)
    assert [caplog.text.count(text) for text in ("nobody is there", "too big", "attached to")] == [1, 1, 1]


def test_a_quiet_client_leaves_it_to_another_one_to_say_how_the_connection_is(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "kvsidecar.client")
    node.supervisor._dialling = replace(node.supervisor._dialling, quiet=True)
    for each in (NOBODY, AttachRefused("too big")):
        node.daemons.put(each)
    node.attached()
    eventually(lambda: "attached to the daemon" in caplog.text, caplog.text)
    said = [(each.levelno, each.getMessage()) for each in caplog.records]
    assert [text for level, text in said if level > logging.DEBUG] == [
        "kvsidecar: the daemon at kvs.sock refuses this rank; trying again until it accepts: too big"
    ], "why a rank is refused is its own affair"


def test_an_attempt_that_is_made_once_ends_the_thread_with_its_error(node: Node) -> None:
    node.daemons.put(NOBODY)
    node.supervisor.start(REGISTRATION, once=True)
    assert node.supervisor.wait_attempt(0, SECONDS)
    assert node.supervisor.error is NOBODY
    assert node.supervisor._thread is not None
    node.supervisor._thread.join(SECONDS)
    assert not node.supervisor._thread.is_alive()


def test_a_connection_without_a_registration_is_made_again_with_it(node: Node) -> None:
    first = FakeTransport()
    node.daemons.put(first)
    node.supervisor.start_without_registration()
    node.until(lambda: node.supervisor.transport)
    assert (node.supervisor.session, first.streams) == (None, [])
    daemon = node.attached()
    assert first.closed.is_set()
    assert node.supervisor.transport is daemon


def test_a_client_that_is_attached_is_not_attached_again(node: Node) -> None:
    daemon = node.attached()
    with pytest.raises(ClientError, match="impossible while the connection is attached"):
        node.supervisor.start(REGISTRATION)
    assert (node.supervisor.transport, node.supervisor.session is not None) == (daemon, True)


def test_a_daemon_that_refuses_the_registration_is_closed_and_tried_again(node: Node) -> None:
    refusing = FakeTransport(session=0)  # 0: it has not answered
    node.daemons.put(refusing)
    node.supervisor.start(REGISTRATION)
    while not refusing.streams:
        threading.Event().wait(1e-3)
    refusing.stream.end(TransportError(grpc.StatusCode.INVALID_ARGUMENT, "no such device"))
    assert node.supervisor.wait_attempt(0, SECONDS)
    assert isinstance(node.supervisor.error, AttachRefused)
    assert refusing.closed.is_set()
    node.attached()


@pytest.mark.parametrize("how", ["process", "socket", "stream"])
def test_a_lost_daemon_is_seen_however_it_is_lost_and_its_jobs_end_with_the_proof(node: Node, how: str) -> None:
    daemon = node.attached()
    load, store = node.submit(1, Direction.LOAD), node.submit(2)
    assert [daemon.stream.next().WhichOneof("message") for _ in range(2)] == ["load", "store"]
    daemon.stream.full = True
    node.submit(3)
    match how:
        case "process":
            daemon.gone.set()
            node.supervisor.wake()
        case "socket":
            daemon.far.close()
        case "stream":
            daemon.stream.end(TransportError(grpc.StatusCode.UNAVAILABLE, "broken"))
    node.until(lambda: node.supervisor.session is None and not node.ledger.is_outstanding(3))
    assert node.supervisor.transport is None
    if how == "process":
        node.until(lambda: not node.ledger.count)
        return
    if how == "socket":
        daemon.stream.end(TransportError(grpc.StatusCode.UNAVAILABLE, "broken"))
        node.until(lambda: not node.ledger.is_outstanding(2))  # it will never be served
        assert node.ended() == {3: (Outcome.FAILED, "daemon_lost"), 2: (Outcome.FAILED, "daemon_lost")}
    question, answer = daemon.asked()
    assert question == pb.StatusRequest(session=11)
    answer(pb.StatusReply(epoch=7, session_ended=False))
    assert node.ledger.is_outstanding(load.number), "the daemon said that it is not over"
    assert node.ledger.is_outstanding(store.number) is (how == "stream")
    question, answer = daemon.asked()
    answer(pb.StatusReply(epoch=7, session_ended=True))
    node.until(lambda: not node.ledger.count)
    assert daemon.closed.wait(SECONDS)


def test_the_next_session_begins_when_every_job_of_the_last_has_ended(node: Node) -> None:
    daemon = node.attached()
    node.submit(1)
    daemon.stream.end(TransportError(grpc.StatusCode.UNAVAILABLE, "broken"))
    _, answer = daemon.asked()
    successor = FakeTransport(epoch=8)
    node.daemons.put(successor)
    assert (len(node.options), node.ledger.count) == (1, 1), "it dialled before the jobs were over"
    answer(pb.StatusReply(epoch=7, session_ended=True))
    node.until(lambda: node.supervisor.session)
    assert node.supervisor.transport is successor
    assert node.ended() == {1: (Outcome.FAILED, "daemon_lost")}


def test_the_jobs_of_a_daemon_that_is_given_up_end_behind_the_fence(node: Node) -> None:
    fd = fences.create()
    fence, lane = Fence(fd), fences.lanes(fd)[Direction.LOAD]
    daemon = node.attached(fence)
    node.submit(1, Direction.LOAD)
    assert lane.enter()
    node.supervisor.give_up("it is silent")
    assert node.supervisor.session is None, "no job is taken from now on"
    eventually(lambda: fence.is_shut, "the fence is shut")
    assert daemon.stream.cancelled
    daemon.asked()
    assert node.ledger.is_outstanding(1), "its copy is under way"
    lane.leave()
    node.until(lambda: not node.ledger.count)
    assert node.ended() == {1: (Outcome.FAILED, "daemon_lost")}
    assert daemon.closed.wait(SECONDS)
    assert node.supervisor.lost_daemon is not None, "the memory is still mapped"


def test_a_daemon_that_is_given_up_by_a_client_that_leaves_is_fenced_off(node: Node) -> None:
    fence = Fence(fences.create())
    daemon = node.attached(fence)
    node.submit(1, Direction.LOAD)
    looks, go_on = threading.Event(), threading.Event()
    daemon.connection.ended = lambda: looks.set() or not go_on.wait(SECONDS)
    node.supervisor.wake()
    assert looks.wait(SECONDS)
    node.supervisor.give_up("it is silent")
    closing = threading.Thread(target=node.supervisor.close, args=(SECONDS,))
    closing.start()
    eventually(lambda: node.supervisor.is_closing, "it closes")
    go_on.set()
    daemon.asked()
    assert fence.is_shut
    assert node.ended() == {1: (Outcome.FAILED, "daemon_lost")}
    assert closing.is_alive(), "the memory is still mapped"
    daemon.gone.set()
    node.supervisor.wake()
    closing.join(SECONDS)
    assert (closing.is_alive(), node.supervisor.lost_daemon) == (False, None)


def test_nothing_is_registered_again_before_the_memory_of_the_fenced_session_is_unmapped(node: Node) -> None:
    node.attached(Fence(fences.create()))
    node.supervisor.give_up("it is silent")
    again = FakeTransport(session=12)
    node.daemons.put(again)
    question, answer = again.asked()
    assert question == pb.StatusRequest(session=11)
    answer(pb.StatusReply(epoch=7, session_ended=False))
    _, answer = again.asked()
    assert (node.supervisor.session, again.streams) == (None, [])
    answer(pb.StatusReply(epoch=7, session_ended=True))
    node.until(lambda: node.supervisor.session)
    assert node.supervisor.lost_daemon is None


def test_another_run_of_the_daemon_is_not_asked_about_the_fenced_session(node: Node) -> None:
    lost = node.attached(Fence(fences.create()))
    node.supervisor.give_up("it is silent")
    successor = FakeTransport(epoch=8)
    node.daemons.put(successor)
    node.until(lambda: node.supervisor.session and node.supervisor.transport is successor)
    assert node.supervisor.lost_daemon is not None
    assert not node.supervisor.lost_daemon.gone()
    lost.gone.set()
    assert node.supervisor.lost_daemon.gone()


def test_a_client_that_leaves_before_it_has_asked_a_daemon_that_was_given_up_asks_it(node: Node) -> None:
    node.attached(Fence(fences.create()))
    node.supervisor.give_up("it is silent")
    eventually(lambda: len(node.options) == 2, "it connects again")
    closing = threading.Thread(target=node.supervisor.close, args=(SECONDS,))
    closing.start()
    eventually(lambda: node.supervisor.is_closing, "it closes")
    node.daemons.put(NOBODY)
    again = FakeTransport(session=12)
    node.daemons.put(again)
    _, answer = again.asked()
    answer(pb.StatusReply(epoch=7, session_ended=False))
    question, answer = again.asked()
    assert question == pb.StatusRequest(session=11)
    assert closing.is_alive()
    answer(pb.StatusReply(epoch=7, session_ended=True))
    closing.join(SECONDS)
    assert (closing.is_alive(), node.supervisor.lost_daemon, again.streams) == (False, None, [])
    assert again.closed.is_set()


def test_a_client_that_leaves_while_the_memory_is_mapped_behind_a_fence_knows_it(node: Node) -> None:
    node.attached(Fence(fences.create()))
    node.supervisor.give_up("it is silent")
    again = FakeTransport(session=12)
    node.daemons.put(again)
    again.asked()
    node.supervisor.close(0.0)
    assert node.supervisor.lost_daemon is not None
    assert again.closed.is_set()


def test_a_daemon_that_does_not_end_a_job_long_after_its_deadline_is_given_up(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HANG_CHECK_SECONDS", 1e-3)
    fence = Fence(fences.create())
    node.attached(fence)
    now = time.monotonic()
    node.submit(1, deadline=now - module.HANG_SECONDS + SECONDS)
    node.submit(2)
    attempts = node.supervisor.attempts
    node.supervisor.wake()
    assert (node.supervisor.session is not None, fence.is_shut) == (True, False), "it may still be on time"
    node.submit(3, deadline=now + SECONDS).deadline = now - module.HANG_SECONDS - 1
    node.until(lambda: not node.ledger.count)
    assert fence.is_quiet()
    assert node.supervisor.attempts == attempts
    assert set(node.ended()) == {1, 2, 3}


def test_the_last_words_of_a_dead_daemon_are_heard(node: Node) -> None:
    daemon = node.attached()
    node.submit(1)
    daemon.stream.done(1)
    daemon.stream.end(TransportError(grpc.StatusCode.UNAVAILABLE, "broken"))
    daemon.gone.set()
    node.supervisor.wake()
    node.until(lambda: not node.ledger.count)
    assert node.ended() == {1: (Outcome.DONE, "")}


def test_every_session_is_told_that_the_gpu_is_idle(node: Node) -> None:
    node.supervisor.idle = True
    assert node.attached().stream.next().idle.idle


def test_a_client_that_leaves_lets_the_daemon_finish(node: Node) -> None:
    daemon = node.attached()
    node.submit(1)
    closing = threading.Thread(target=node.supervisor.close, args=(SECONDS,))
    closing.start()
    assert daemon.stream.finished.wait(SECONDS)
    daemon.stream.done(1)
    daemon.stream.end(quiesced=True)
    closing.join(SECONDS)
    assert not closing.is_alive()
    assert node.ended() == {1: (Outcome.DONE, "")}
    assert (node.supervisor.lost_daemon, daemon.closed.is_set()) == (None, True)


def test_a_client_that_cannot_wait_leaves_a_daemon_behind_and_its_jobs_do_not_end(node: Node) -> None:
    daemon = node.attached()
    node.submit(1)
    node.supervisor.close(0.05)
    assert daemon.stream.cancelled
    assert node.supervisor.lost_daemon is not None
    assert not node.supervisor.lost_daemon.gone()
    daemon.gone.set()
    assert node.supervisor.lost_daemon.gone()
    assert (node.ended(), node.ledger.count) == ({}, 1)


def test_a_breaker_that_opens_is_probed_until_the_daemon_answers(node: Node) -> None:
    daemon = node.attached()
    assert node.breaker.failed()
    node.supervisor.wake()
    question, answer = daemon.asked()
    assert question == pb.ReleaseRequest(lease=0)
    answer(TransportError(grpc.StatusCode.DEADLINE_EXCEEDED, "late"))
    assert node.breaker.state is not BreakerState.CLOSED
    _, answer = daemon.asked()
    answer(pb.ReleaseReply(released=False))
    assert node.breaker.state is BreakerState.CLOSED


@pytest.mark.parametrize("at", ["_open", "_probe", "_drain_stream", "on_connected"])
def test_an_error_that_nobody_expects_costs_a_connection_at_most_and_is_heard(
    node: Node, at: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without its thread no job of a lost daemon would ever end, and no daemon would be attached to."""
    works, failures = getattr(node.supervisor, at), int(at != "_probe")

    def failing(*given: Any, **options: Any) -> Any:
        nonlocal failures
        if failures:
            failures -= 1
            raise ZeroDivisionError("planned")
        return works(*given, **options)

    monkeypatch.setattr(node.supervisor, at, failing)
    if at == "_open":
        node.supervisor.start(REGISTRATION)
        assert node.supervisor.wait_attempt(0, SECONDS)
    daemon = node.attached()
    if at == "_probe":  # not before there is a job
        node.submit(1)
        failures = 1
        node.supervisor.wake()
    elif at == "_drain_stream":
        node.submit(1)
        daemon.stream.end(TransportError(grpc.StatusCode.UNAVAILABLE, "broken"))
    if at in ("_drain_stream", "_probe"):
        _, answer = daemon.asked()
        answer(pb.StatusReply(epoch=7, session_ended=True))
        node.until(lambda: not node.ledger.count)
        assert node.ended() == {1: (Outcome.FAILED, "daemon_lost")}
        node.attached()
    eventually(lambda: [each.exc_info[0] for each in caplog.records if each.exc_info] == [ZeroDivisionError], "heard")
