"""Stores that are ordered on the device: which event is recorded when, and when it may be recorded again."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvsidecar.client import DEVICE, Blocks, Client, ClientError, HostBuffer, Outcome
from tests.client.fake_daemon import FakeDaemon, Stream
from tests.harness import NAMESPACE, SECONDS, hashes, layout
from tests.marks import both_protocols

pytestmark = both_protocols

HANDLES = [b"\1" * 64, b"\2" * 64]


class Mark:
    """An event of this process; over when the test says so."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def synchronize(self) -> None:
        assert self.over.wait(SECONDS)


class FakeRing:
    """Implements `kvsidecar.client.EventRing`."""

    handles = HANDLES

    def __init__(self) -> None:
        self.recorded: list[int] = []
        self.marks: list[Mark] = []
        self.broken = False

    def record(self, index: int) -> None:
        if self.broken:
            raise RuntimeError("device lost")
        self.recorded.append(index)

    def mark(self) -> Mark:
        self.marks.append(Mark())
        return self.marks[-1]


Attach = Callable[..., tuple[Client, Stream]]


@pytest.fixture
def attach(short_dir: Path, local: bool) -> Iterator[Attach]:
    """Attaches a client with this ring to a daemon that answers registrations so."""
    with contextlib.ExitStack() as ends:

        def attach(ring: FakeRing | None, **registered: Any) -> tuple[Client, Stream]:
            buffer = ends.enter_context(contextlib.closing(HostBuffer(1 << 20)))
            daemon = ends.enter_context(FakeDaemon(short_dir, **registered))
            client = Client(daemon.socket, timeout=SECONDS, local_protocol=local)
            client.attach(
                instance="test", namespace=NAMESPACE, buffers=buffer.kv_buffers(), groups=[layout()], events=ring
            )  # fmt: skip
            assert client.local_protocol == local
            return client, daemon.stream()

        yield attach


def store(client: Client) -> int:
    return client.store([Blocks(0, hashes("a"), [0])], after=DEVICE)


def test_an_event_is_recorded_before_its_store_is_sent_and_named_by_it(attach: Attach) -> None:
    ring = FakeRing()
    client, stream = attach(ring, device_order=True)
    assert list(stream.register.event_handles) == HANDLES
    assert (client.device_order, client.device_order_refused) == (True, "")
    for index in (0, 1):
        job = store(client)
        message = stream.store()
        assert ring.recorded == list(range(index + 1)), "sent before it was recorded"
        assert (message.job, message.event) == (job, index + 1)
        stream.done(job)
        assert client.wait([job], SECONDS)[job].outcome is Outcome.DONE
    assert client.close()


def test_an_entry_is_recorded_again_only_when_the_daemon_needs_it_no_more(attach: Attach) -> None:
    ring = FakeRing()
    client, stream = attach(ring, device_order=True)
    first, second = store(client), store(client)
    assert [stream.store().event, stream.store().event] == [1, 2]
    third = store(client)
    assert ring.recorded == [0, 1], "an entry was recorded again while the daemon may still ask for it"
    assert len(ring.marks) == 1, "without a free entry the store waits on the host"
    ring.marks[0].over.set()
    message = stream.store()
    assert (message.job, message.event) == (third, 0)
    stream.wait_issued(2)
    stream.done(third)  # what was said before it has been heard when this has
    client.wait([third], SECONDS)
    fourth = store(client)
    assert (ring.recorded, stream.store().event) == ([0, 1, 1], 2)
    stream.done(first)  # a job's end frees its entry too
    client.wait([first], SECONDS)
    fifth = store(client)
    assert (ring.recorded, stream.store().event) == ([0, 1, 1, 0], 1)
    stream.done(second)  # its entry is the fourth's by now
    client.wait([second], SECONDS)
    store(client)
    assert ring.recorded == [0, 1, 1, 0], "the end of an earlier job freed an entry that a later one uses"
    for job in (fourth, fifth):
        stream.done(job)
    ring.marks[-1].over.set()
    stream.done(stream.store().job)
    assert client.close()


def test_a_daemon_that_cannot_open_the_events_is_given_stores_in_host_order(attach: Attach) -> None:
    ring = FakeRing()
    client, stream = attach(ring, device_order_refused="no shared /dev/shm")
    assert (client.device_order, client.device_order_refused) == (False, "no shared /dev/shm")
    job = store(client)
    assert (ring.recorded, len(ring.marks)) == ([], 1)
    ring.marks[0].over.set()
    assert stream.store().event == 0
    stream.done(job)
    assert client.close()


def test_a_store_whose_event_cannot_be_recorded_fails_and_is_never_sent(attach: Attach) -> None:
    ring = FakeRing()
    client, stream = attach(ring, device_order=True)
    ring.broken = True
    job = store(client)
    failed = client.wait([job], SECONDS)[job]
    assert (failed.outcome, failed.reason, failed.error) == (Outcome.FAILED, "event_failed", "device lost")
    ring.broken = False
    for _ in range(2):
        store(client)
    sent = [stream.store(), stream.store()]
    assert job not in [message.job for message in sent]
    assert sorted(message.event for message in sent) == [1, 2], "the entry of the failed store was not given back"
    for message in sent:
        stream.done(message.job)
    assert client.close()


def test_device_order_without_a_ring_is_a_mistake(attach: Attach) -> None:
    client, _ = attach(None)
    with pytest.raises(ClientError, match="ring of events"):
        store(client)
    assert client.close()


def test_flush_is_asked_for_what_was_sent_and_cancels_here_what_was_not(attach: Attach) -> None:
    client, stream = attach(None)
    running = client.store([Blocks(0, hashes("a"), [0])])
    assert stream.store().job == running
    event = Mark()
    waiting = client.store([Blocks(0, hashes("b"), [1])], after=event)
    other = client.store([Blocks(0, hashes("c"), [2])], after=event)
    answers: list[frozenset[int]] = []
    flushing = threading.Thread(
        target=lambda: answers.append(client.flush([running, waiting], timeout=SECONDS, cancel=True))
    )
    flushing.start()
    asked = stream.next().flush
    assert (list(asked.jobs), asked.mode) == ([running], 2)
    cancelled = client.wait([waiting], SECONDS)[waiting]
    assert (cancelled.outcome, cancelled.reason) == (Outcome.DECLINED, "cancelled")
    stream.flushed(asked.flush)
    flushing.join()
    assert answers == [frozenset()], "the daemon said that they no longer read the blocks"
    event.over.set()
    assert stream.store().job == other, "a cancelled job was sent, or another one was cancelled with it"
    for job in (running, other):
        stream.done(job)
    assert client.close()


@pytest.mark.parametrize("light", [0.0, SECONDS], ids=["notified", "lightly"])
def test_flush_that_finishes_hurries_what_was_sent_and_waits_for_what_was_not(
    attach: Attach, light: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsidecar.client.waiting.LIGHT_SECONDS", light)
    client, stream = attach(None)
    running = client.store([Blocks(0, hashes("a"), [0])])
    stream.store()
    event = Mark()
    waiting = client.store([Blocks(0, hashes("b"), [1])], after=event)
    answers: list[frozenset[int]] = []
    flushing = threading.Thread(target=lambda: answers.append(client.flush(timeout=SECONDS)))
    flushing.start()
    first = stream.next().flush
    assert (list(first.jobs), first.mode) == ([running], 1)
    event.over.set()
    assert stream.store().job == waiting
    second = stream.next().flush
    assert list(second.jobs) == [waiting]
    stream.flushed(first.flush)
    assert not answers
    stream.done(waiting)
    flushing.join()
    assert answers == [frozenset()]
    stream.done(running)
    assert client.close()


def test_a_deadline_counts_from_the_submission_and_a_late_job_is_not_sent(attach: Attach) -> None:
    client, stream = attach(None)
    event = Mark()
    late = client.store([Blocks(0, hashes("a"), [0])], after=event, timeout=0.0)
    event.over.set()
    declined = client.wait([late], SECONDS)[late]
    assert (declined.outcome, declined.reason) == (Outcome.DECLINED, "deadline")
    jobs = [client.store([], timeout=timeout) for timeout in (500.0, None)] + [client.store([])]
    sent = [stream.store() for _ in jobs]
    assert 400_000 < sent[0].deadline_ms <= 500_000
    assert sent[1].deadline_ms == 0, "None is no deadline"
    assert 20_000 < sent[2].deadline_ms <= 30_000, "every job has one by default"
    assert late not in [message.job for message in sent]
    for job in jobs:
        stream.done(job)
    assert client.close()
