"""Calls about jobs: submit, poll, wait, flush."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from kvsidecar.client.flushing import Flush
from kvsidecar.client.host_order import HostOrder
from kvsidecar.client.ledger import Job, Ledger
from kvsidecar.client.ordering import Completion, EventRing, Order
from kvsidecar.client.results import BACKPRESSURE, CLOSED, DAEMON_LOST, NOT_ATTACHED, Blocks, JobDone
from kvsidecar.client.session import Session
from kvsidecar.client.supervisor import Supervisor
from kvsidecar.client.waiting import Monitor
from kvsidecar.types import Direction


class Jobs:
    """Puts jobs on the session that the supervisor has published, and looks for their ends. See `Client` for each."""

    def __init__(self, supervisor: Supervisor, ledger: Ledger, monitor: Monitor) -> None:
        self._supervisor = supervisor
        self._ledger = ledger
        self._monitor = monitor
        self._order = HostOrder()
        self._closed = False
        self.events: EventRing | None = None
        """For jobs that come after ``Order.DEVICE``."""

    def submit(
        self,
        direction: Direction,
        blocks: Sequence[Blocks],
        after: Completion | Order | None,
        lease: int,
        seconds: float | None,
        traceparent: str | None,
    ) -> int:
        if seconds is not None and math.isnan(seconds):
            raise ValueError("timeout is nan: it must be a number of seconds, or None")
        number = self._ledger.number()
        with self._monitor.lock:
            session = self._supervisor.session
            if session is None or self._closed or self._ledger.is_full:
                self._decline(number, session)
                return number
            job = Job(number, direction, blocks, lease)
            if seconds is not None:
                job.deadline = time.monotonic() + seconds
            if traceparent:
                job.traceparent = traceparent.encode(errors="replace")
            self._ledger.add(job)
            if after is None:
                session.send(job)
                return number
            entry = session.take_event(job) if isinstance(after, Order) else None
        if isinstance(after, Order):
            assert self.events is not None
            try:
                # Before the message is sent: a wait for an event that was never recorded waits for nothing.
                if entry is not None:
                    self.events.record(entry)
                after = self.events.mark() if entry is None else None
            except Exception as error:  # noqa: BLE001 - an engine's event may raise anything; the job must end
                session.fail(job, str(error))
                return number
        if after is None:
            session.send(job)
        else:
            self._order.add(session, job, after)
        return number

    def _decline(self, number: int, session: Session | None) -> None:
        if self._closed:
            reason, error = CLOSED, str(self._supervisor.error or "")
        elif session is None:
            reason, error = (
                DAEMON_LOST if self._supervisor.attaches else NOT_ATTACHED,
                str(self._supervisor.error or ""),
            )
        else:
            reason, error = BACKPRESSURE, "too many jobs are outstanding"
        self._ledger.decline(number, reason, error)
        self._monitor.changed.notify_all()

    def poll(self) -> list[JobDone]:
        if (session := self._supervisor.session) is not None:
            if session.unsaid:
                with self._monitor.lock:
                    session.say()
            if self._ledger.may_have_ended():
                session.read_now()
        if not self._ledger.finished:
            return []
        with self._monitor.lock:
            return self._ledger.take_finished()

    def wait(self, numbers: Sequence[int], timeout: float) -> dict[int, JobDone]:
        # Not until they are among the finished: an end that somebody has had, or that was forgotten, never will be.
        def is_done() -> bool:
            return not any(map(self._ledger.is_outstanding, numbers))

        self._monitor.wait_until(is_done, time.monotonic() + timeout, self._reader)
        with self._monitor.lock:
            return self._ledger.take(numbers)

    def flush(self, numbers: Sequence[int], timeout: float, *, cancel: bool) -> frozenset[int]:
        deadline = time.monotonic() + timeout
        with self._monitor.changed:
            flush = Flush(self._ledger, numbers, cancel=cancel)
            self._monitor.changed.notify_all()

        def is_done() -> bool:
            left = deadline - time.monotonic()
            if not flush.busy() or left <= 0:
                return True
            # Without a session nobody can be asked: the supervisor ends the jobs when nothing touches their blocks.
            if (session := self._supervisor.session) is not None and (jobs := flush.to_ask()):
                session.flush(flush, jobs, left)
            return False

        try:
            self._monitor.wait_until(is_done, deadline, self._reader)
            with self._monitor.lock:
                return flush.busy()
        finally:
            with self._monitor.lock:
                if (session := self._supervisor.session) is not None:
                    session.forget(flush)

    def close(self, timeout: float) -> None:
        """Take no more jobs. Those that wait for an event are sent if that is over within ``timeout`` seconds."""
        self._closed = True
        self._order.stop()
        self._order.join(timeout)

    def _reader(self) -> Session | None:
        """Who reads the answers that a thread waits for. With the lock held."""
        return self._supervisor.session if self._ledger.count else None
