"""What is outstanding, and who looks for its end."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvsidecar.client import Client
from kvsidecar.client.jobs import HostOrder, Jobs
from kvsidecar.client.ledger import MAX_UNPOLLED, Flush, Ledger, Phase, SubmittedJob
from kvsidecar.client.types import BACKPRESSURE, NOT_ATTACHED, JobDone
from kvsidecar.client.waiting import Monitor
from kvsidecar.types import Direction, Outcome
from tests.harness import SECONDS


class FakeSession:
    """Counts how often somebody looks for answers."""

    unsent = ()

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.looked = 0
        self.ended: list[int] = []
        self.sent: list[int] = []
        self.flushes: list[Flush] = []
        """That were asked for, and are not forgotten."""
        self.named: list[int] = []
        """The jobs of all flushes."""

    def send(self, job: SubmittedJob) -> None:
        self.sent.append(job.number)

    def flush(self, flush: Flush, jobs: list[int], seconds: float) -> None:
        self.flushes.append(flush)
        self.named += jobs

    def forget_flush(self, flush: Flush) -> None:
        self.flushes.remove(flush)

    def wait_readable(self, seconds: float) -> bool:
        return False

    def read_now(self) -> None:
        self.looked += 1
        while self.ended:
            self._ledger.finish(JobDone(self.ended.pop(), Outcome.DONE))


def jobs_of(ledger: Ledger, session: FakeSession | None) -> Jobs:
    return Jobs(SimpleNamespace(session=session, error=None), ledger, Monitor())  # type: ignore[arg-type]


def test_the_end_of_jobs_is_looked_for_unless_all_were_added_since_the_last_time() -> None:
    ledger = Ledger(10)
    session = FakeSession(ledger)
    jobs = jobs_of(ledger, session)

    def add(number: int, phase: Phase = Phase.SENT) -> None:
        ledger.add(SubmittedJob(number, Direction.STORE, (), phase=phase))

    assert (jobs.poll(), session.looked) == ([], 0)
    add(0, Phase.WAITING)
    assert [jobs.poll(), jobs.poll()] == [[], []]
    assert session.looked == 0, "no daemon knows of a job that waits for its event"
    add(1)
    session.ended.append(1)
    assert (jobs.poll(), session.looked) == ([], 0)
    add(2)
    assert [done.job for done in jobs.poll()] == [1]
    assert session.looked == 1
    session.ended.append(2)
    assert [done.job for done in jobs.poll()] == [2]
    assert (jobs.poll(), session.looked) == ([], 2)


def test_more_jobs_than_the_limit_are_declined_and_not_sent() -> None:
    ledger = Ledger(2)
    session = FakeSession(ledger)
    jobs = jobs_of(ledger, session)
    first, second, third = (jobs.submit(jobs.new(Direction.STORE, (), None, None), None) for _ in range(3))
    assert session.sent == [first, second]
    assert [(done.job, done.reason) for done in jobs.poll()] == [(third, BACKPRESSURE)]
    ledger.finish(JobDone(first, Outcome.DONE))
    assert jobs.submit(jobs.new(Direction.STORE, (), None, None), None) in session.sent


def test_a_flush_that_is_over_is_forgotten_whether_its_jobs_have_ended_or_not() -> None:
    ledger = Ledger(2)
    session = FakeSession(ledger)
    jobs = jobs_of(ledger, session)
    ledger.add(SubmittedJob(1, Direction.STORE, (), phase=Phase.SENT))
    assert jobs.flush([1], 0.05, cancel=False) == {1}
    assert (session.named, session.flushes) == ([1], [])


def test_ends_that_nobody_asks_for_are_kept_up_to_a_limit(short_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A client that stores into the void, and never polls."""
    with Client(str(short_dir / "nobody.sock")) as client:
        numbers = [client.store([]) for _ in range(3 * MAX_UNPOLLED)]
        waited = client.wait([numbers[0], numbers[-1]], SECONDS)  # one was forgotten, and is not waited for
        assert [done.reason for done in waited.values()] == [NOT_ATTACHED]
        assert list(waited) == [numbers[-1]]
        kept = [done.job for done in client.poll()]
        assert MAX_UNPOLLED // 2 <= len(kept) <= MAX_UNPOLLED
        assert kept == numbers[-1 - len(kept) : -1], "not the newest are kept"
        assert client.poll() == []
    assert caplog.text.count("the oldest are dropped") == 1


def test_waiting_for_a_job_that_was_reported_does_not_wait() -> None:
    ledger = Ledger(10)
    jobs = jobs_of(ledger, None)
    ledger.decline(1, "pool_full")
    assert jobs.poll()
    began = time.monotonic()
    assert jobs.wait([1], 10 * SECONDS) == {}
    assert time.monotonic() - began < SECONDS


def test_a_job_that_cannot_be_sent_when_its_event_comes_ends_the_session_and_others_are_sent() -> None:
    ledger = Ledger(10)
    broken, works = FakeSession(ledger), FakeSession(ledger)
    order, failures = HostOrder(ledger), list[str]()

    broken.send = lambda _: 1 // 0  # type: ignore[assignment, method-assign, return-value]
    broken.failed = failures.append  # type: ignore[attr-defined]
    for number, session in (1, broken), (2, works):
        job = SubmittedJob(number, Direction.STORE, ())
        ledger.add(job)
        order.add(session, job, SimpleNamespace(synchronize=lambda: None))  # type: ignore[arg-type]
    order.close(SECONDS)
    assert (failures, works.sent) == (["a job was not sent"], [2])


class Event:
    """Of an engine's stream, as in a process whose other threads do not get the interpreter: who waits for it does not
    learn that it is over until the end of the test."""

    def __init__(self) -> None:
        self.over, self.waited, self.told = False, threading.Event(), threading.Event()

    def query(self) -> bool:
        return self.over

    def synchronize(self) -> None:
        self.waited.set()
        assert self.told.wait(SECONDS)


def test_a_poll_sends_the_jobs_whose_events_are_over_and_nobody_sends_them_again() -> None:
    ledger = Ledger(10)
    session = FakeSession(ledger)
    jobs = jobs_of(ledger, session)
    events = [Event(), Event(), Event()]
    numbers = [jobs.submit(jobs.new(Direction.LOAD, (), None, None), each) for each in events]
    assert events[0].waited.wait(SECONDS)
    jobs.poll()
    assert session.sent == []
    events[0].over = events[1].over = True
    jobs.poll()
    assert session.sent == numbers[:2]
    for each in events:
        each.told.set()
    jobs.close(SECONDS)
    assert session.sent == numbers


def test_an_event_that_cannot_be_polled_is_left_to_the_thread_that_waits_for_it() -> None:
    ledger = Ledger(10)
    session = FakeSession(ledger)
    jobs = jobs_of(ledger, session)
    event = Event()
    event.query = lambda: 1 // 0  # type: ignore[assignment, method-assign, return-value]
    number = jobs.submit(jobs.new(Direction.LOAD, (), None, None), event)
    jobs.poll()
    assert session.sent == []
    event.told.set()
    jobs.close(SECONDS)
    assert session.sent == [number]
