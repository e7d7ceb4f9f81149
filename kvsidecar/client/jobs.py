"""Calls about jobs: submit, poll, wait, flush."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvsidecar.client.ledger import Flush, Ledger, SubmittedJob
from kvsidecar.client.ordering import Completion, EventRing, Order
from kvsidecar.client.session import AttachSession
from kvsidecar.client.supervisor import Supervisor
from kvsidecar.client.types import BACKPRESSURE, CLOSED, DAEMON_LOST, NOT_ATTACHED, Blocks, Default, JobDone
from kvsidecar.client.waiting import Monitor
from kvsidecar.errors import ClientError
from kvsidecar.types import Direction


class Jobs:
    """Sends jobs on the session that the supervisor has published, and collects their results. See `Client` for each
    method."""

    def __init__(
        self, supervisor: Supervisor, ledger: Ledger, monitor: Monitor, job_timeout: float | None = None
    ) -> None:
        self._supervisor, self._ledger, self._monitor = supervisor, ledger, monitor
        self._job_timeout = job_timeout
        self._host_order = HostOrder(ledger)
        self._closed = False
        self.events: EventRing | None = None
        """The events for jobs that come after ``Order.DEVICE``."""

    def new(
        self, direction: Direction, blocks: Sequence[Blocks], timeout: float | Default | None, traceparent: str | None
    ) -> SubmittedJob:
        """Make a job to `submit`. It may not start later than ``timeout`` seconds from now; None: no limit."""
        seconds = self._job_timeout if isinstance(timeout, Default) else timeout
        if seconds is not None and math.isnan(seconds):
            raise ValueError("timeout is nan: it must be a number of seconds, or None")
        job = SubmittedJob(
            self._ledger.next_number(), direction, blocks, traceparent=(traceparent or "").encode(errors="replace")
        )
        job.deadline = None if seconds is None else time.monotonic() + seconds
        return job

    def submit(self, job: SubmittedJob, after: Completion | Order | None) -> int:
        """Send a job. Returns its number. Raises ClientError if it is after ``Order.DEVICE`` and there is no ring."""
        if isinstance(after, Order) and self.events is None:
            raise ClientError("after=DEVICE needs a ring of events: pass attach(events=...)")
        with self._monitor.lock:
            session = self._supervisor.session
            if session is None or self._closed or self._ledger.is_full:
                self._decline(job.number, session)
                return job.number
            self._ledger.add(job)
            if after is None:
                session.send(job)
                return job.number
            entry = session.take_event(job) if isinstance(after, Order) else None
        if isinstance(after, Order):
            assert self.events is not None
            try:
                # Before the message is sent: to wait for an event that was never recorded returns at once.
                if entry is not None:
                    self.events.record(entry)
                after = self.events.mark() if entry is None else None
            except Exception as error:  # noqa: BLE001 - an engine's event may raise anything; the job must end
                session.fail(job, str(error))
                return job.number
        if after is None:
            session.send(job)
        else:
            self._host_order.add(session, job, after)
        return job.number

    @property
    def device_order_refused(self) -> str:
        session = self._supervisor.session
        if session is None or session.device_order:
            return ""
        if self.events is None:
            return "attach() was called without events=..."
        return session.device_order_refused or "this daemon does not wait for events"

    def _decline(self, number: int, session: AttachSession | None) -> None:
        error = str(self._supervisor.error or "")
        if self._closed:
            reason = CLOSED
        elif session is None:
            reason = DAEMON_LOST if self._supervisor.has_registration else NOT_ATTACHED
        else:
            reason, error = BACKPRESSURE, "too many jobs are outstanding: poll, or wait for some"
        self._ledger.decline(number, reason, error)
        self._monitor.changed.notify_all()

    def poll(self) -> list[JobDone]:
        self._host_order.send_ready()
        if (session := self._supervisor.session) is not None:
            if session.unsent:
                with self._monitor.lock:
                    session.send_unsent()
            if self._ledger.worth_polling():
                session.read_now()
        if not self._ledger.finished:
            return []
        with self._monitor.lock:
            return self._ledger.take_finished()

    def wait(self, numbers: Sequence[int], timeout: float) -> dict[int, JobDone]:
        # Not "all are finished": a result that was taken or dropped before would never be.
        def is_done() -> bool:
            return not any(map(self._ledger.is_outstanding, numbers))

        self._monitor.wait_until(is_done, time.monotonic() + timeout, self._reader)
        with self._monitor.lock:
            return self._ledger.take(numbers)

    def flush(self, numbers: Sequence[int], timeout: float, *, cancel: bool) -> frozenset[int]:
        deadline = time.monotonic() + timeout
        with self._monitor.changed:
            flush = Flush(self._ledger, frozenset(numbers), cancel=cancel)
            self._monitor.changed.notify_all()

        def is_done() -> bool:
            left = deadline - time.monotonic()
            if not flush.pending() or left <= 0:
                return True
            # Without a session the supervisor ends the jobs, when nothing can access their blocks.
            if (session := self._supervisor.session) is not None and (jobs := flush.take_unrequested()):
                session.flush(flush, jobs, left)
            return False

        try:
            self._monitor.wait_until(is_done, deadline, self._reader)
            with self._monitor.lock:
                return flush.pending()
        finally:
            with self._monitor.lock:
                if (session := self._supervisor.session) is not None:
                    session.forget_flush(flush)

    def close(self, timeout: float) -> None:
        """Take no more jobs. Send those whose events complete within ``timeout`` seconds."""
        self._closed = True
        self._host_order.close(timeout)

    def _reader(self) -> AttachSession | None:
        """The session that reads the answers a thread waits for. With the lock held."""
        return self._supervisor.session if self._ledger.count else None


@dataclass(slots=True, eq=False)
class _Ordered:
    """A job that waits for its event, until the thread that sends it takes it."""

    session: AttachSession
    job: SubmittedJob
    after: Completion
    taken: bool = False


class HostOrder:
    """Sends each job when its event is complete: in a thread of its own, from the first such job to `close`, or in the
    one that polls for results.

    A thread that has waited for an event must win the interpreter before it can send. An engine that spins through
    empty steps until its load has ended gives it up for instants only, and each of them begins a wait of 5 ms anew: its
    load began after half a second. But that engine polls in each of these steps.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._waiting: queue.SimpleQueue[_Ordered | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._untaken: deque[_Ordered] = deque()
        """Jobs in the order in which they were added."""
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, session: AttachSession, job: SubmittedJob, after: Completion) -> None:
        each = _Ordered(session, job, after)
        with self._lock:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="kvsidecar-order", daemon=True)
                self._thread.start()
            self._untaken.append(each)
            self._waiting.put(each)

    def send_ready(self) -> None:
        """Send the first of the jobs, as far as their events are known to be complete. Never waits."""
        while self._untaken:
            try:
                each = self._untaken[0]
            except IndexError:  # the thread has just taken it
                return
            query = getattr(each.after, "query", None)
            try:
                if query is None or not query():
                    return
            except Exception:  # noqa: BLE001 - the thread finds the same, and ends the job
                return
            if self._take(each):
                self._send(each)

    def close(self, timeout: float) -> None:
        """End the thread after the jobs that were added before. Wait for it at most ``timeout`` seconds."""
        with self._lock:
            self._closed = True
            self._waiting.put(None)
        if self._thread is not None:
            self._thread.join(max(0.0, timeout))

    def _take(self, each: _Ordered) -> bool:
        """Take a job. False: another thread has taken it."""
        with self._lock:
            if each.taken:
                return False
            each.taken = True
            self._untaken.remove(each)
            return True

    def _run(self) -> None:
        while (each := self._waiting.get()) is not None:
            try:
                if not each.taken and self._ledger.is_outstanding(each.job.number):
                    each.after.synchronize()
            except Exception as error:  # noqa: BLE001 - an engine's event may raise anything; the job must end
                if self._take(each):
                    each.session.fail(each.job, str(error))
                continue
            if self._take(each):
                self._send(each)

    def _send(self, each: _Ordered) -> None:
        """Send the job, unless it was cancelled or its daemon is lost."""
        try:
            each.session.send(each.job)
        except Exception:  # noqa: BLE001 - the thread goes on with the jobs of the next session
            each.session.failed("a job was not sent")
