"""The client's jobs: which are outstanding, and how the others ended. Every job ends once.

Pure: no I/O, threads or clock. All methods are called with the client's lock held unless they say otherwise; the caller
notifies the condition.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from kvsidecar.client.types import Blocks, JobDone
from kvsidecar.errors import ClientError, Refusal
from kvsidecar.types import Direction, Outcome, Priority

MAX_UNPOLLED = 1 << 16
"""Results of jobs that are kept until they are polled: about 15 MB. Beyond it the older half is dropped."""

_log = logging.getLogger("kvsidecar.client")


class Phase(IntEnum):
    """The state of an outstanding job. Before SENT the daemon does not know it, so no DMA of it can run."""

    WAITING = 0
    """The job waits for the event that it comes after."""
    QUEUED = 1
    """The job is in the send queue."""
    SENT = 2


_NEXT = {Phase.WAITING: Phase.QUEUED, Phase.QUEUED: Phase.SENT}


@dataclass(slots=True, eq=False)
class SubmittedJob:
    """One store or load from its submission to its end. Once it is in the ledger, only the ledger changes it."""

    number: int
    direction: Direction
    blocks: Sequence[Blocks]
    lease: int = 0
    deadline: float | None = None
    """Monotonic seconds; the copy does not start after it."""
    event: int = 0
    """Entry of the event ring, from 1; 0 for none."""
    traceparent: bytes = b""
    ttl_seconds: int = 0
    idle_ttl_seconds: int = 0
    priority: Priority = Priority.NORMAL
    phase: Phase = Phase.WAITING


class Ledger:
    """The jobs of one client, and their only owner: the send queue, the thread that waits for events, the ring and
    flushes hold jobs or their numbers, and ask here whether they have ended.

    Those outstanding are all of one session: a job never moves to another one, and the supervisor attaches again only
    when every job of the last session has ended.

    Args:
        limit: most outstanding jobs.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._numbers = itertools.count(1)
        self._outstanding: dict[int, SubmittedJob] = {}
        self._under_way = 0
        """Outstanding jobs that do not wait for their events."""
        self._new = 0
        """Jobs that are under way since the last `worth_polling`."""
        self.finished: dict[int, JobDone] = {}
        """Results that were not taken yet. Testing whether there are any needs no lock."""
        self._warned = False

    def next_number(self) -> int:
        """A new number for a job or flush. Needs no lock."""
        return next(self._numbers)

    # -- outstanding jobs ---------------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        return len(self._outstanding)

    @property
    def is_full(self) -> bool:
        return len(self._outstanding) >= self._limit

    def add(self, job: SubmittedJob) -> None:
        self._outstanding[job.number] = job
        if job.phase is not Phase.WAITING:
            self._begun()

    def advance(self, job: SubmittedJob, phase: Phase) -> bool:
        """Move a job on. False: it has ended, and must not be sent. Raises ClientError unless the phase comes next."""
        if not self.is_outstanding(job.number):
            return False
        if _NEXT.get(job.phase) is not phase:
            raise ClientError(f"job {job.number} cannot be {phase.name} after {job.phase.name}")
        if job.phase is Phase.WAITING:
            self._begun()
        job.phase = phase
        return True

    def _begun(self) -> None:
        self._under_way += 1
        self._new += 1

    def is_outstanding(self, number: int) -> bool:
        """Whether this job has not ended. Needs no lock: the next call sees what this one misses."""
        return number in self._outstanding

    def outstanding(self) -> list[SubmittedJob]:
        return list(self._outstanding.values())

    def is_overdue(self, now: float) -> bool:
        """Whether an outstanding job is past its deadline, apart from those that wait for their events: by then a
        daemon has started it, or has reported that it never will."""
        jobs = self._outstanding.values()
        return any(job.phase is not Phase.WAITING and (job.deadline or now) < now for job in jobs)

    def worth_polling(self) -> bool:
        """Whether a job may have ended that was under way before the last call. One that was only just queued has not:
        looking would cost its step a system call. Needs no lock: the next call sees what this one misses."""
        worth, self._new = self._under_way > self._new, 0
        return worth

    # -- ending jobs -------------------------------------------------------------------------------------------------

    def finish(self, done: JobDone) -> bool:
        """Record the end of a job. False if it had ended before: only the first end is reported."""
        job = self._outstanding.pop(done.job, None)
        if job is not None:
            self._under_way -= job.phase is not Phase.WAITING
            self._keep(done)
        return job is not None

    def decline(self, number: int, reason: str, error: str = "") -> None:
        """Report a job that was never added."""
        self._keep(JobDone(number, Outcome.DECLINED, reason, error))

    def cancel_unsent(self, jobs: Iterable[SubmittedJob], reason: str) -> None:
        """Decline the jobs that were not sent."""
        for job in jobs:
            if job.phase is not Phase.SENT:
                self.finish(JobDone(job.number, Outcome.DECLINED, reason))

    def end_waiting(self, reason: str, error: str = "") -> None:
        """Report the jobs whose events did not complete in time."""
        self._end(reason, error, lambda job: job.phase is Phase.WAITING)

    def end_unsent(self, reason: str, error: str) -> None:
        """Report the jobs that were not sent."""
        self._end(reason, error, lambda job: job.phase is not Phase.SENT)

    def end_stores(self, reason: str, error: str) -> None:
        """Report the stores: no daemon will serve their blocks."""
        self._end(reason, error, lambda job: job.direction is Direction.STORE)

    def end_all(self, reason: str, error: str) -> None:
        """Report all jobs: their copies can no longer run."""
        self._end(reason, error, lambda _: True)

    def _end(self, reason: str, error: str, which: Callable[[SubmittedJob], bool]) -> None:
        for job in self.outstanding():
            if which(job):
                self.finish(JobDone(job.number, Outcome.FAILED, reason, error))

    # -- results -----------------------------------------------------------------------------------------------------

    def take_finished(self) -> list[JobDone]:
        """Remove and return all results."""
        done = list(self.finished.values())
        self.finished.clear()
        return done

    def take(self, numbers: Iterable[int]) -> dict[int, JobDone]:
        """Remove and return the results of these jobs."""
        return {number: self.finished.pop(number) for number in numbers if number in self.finished}

    def _keep(self, done: JobDone) -> None:
        self.finished[done.job] = done
        if len(self.finished) > MAX_UNPOLLED:
            for number in tuple(itertools.islice(self.finished, MAX_UNPOLLED // 2)):
                del self.finished[number]
            if not self._warned:
                self._warned = True
                _log.warning(
                    "kvsidecar: %d results were never polled, so the oldest are dropped: call Client.poll()",
                    MAX_UNPOLLED,
                )


class Flush:
    """One wait until jobs no longer access the device's blocks.

    Args:
        numbers: the jobs' numbers; none: all stores.
        cancel: decline the jobs that were not sent.
    """

    def __init__(self, ledger: Ledger, numbers: Collection[int], *, cancel: bool) -> None:
        self._ledger = ledger
        self.cancel = cancel
        jobs = [
            job
            for job in ledger.outstanding()
            if (job.number in numbers if numbers else job.direction is Direction.STORE)
        ]
        if cancel:
            ledger.cancel_unsent(jobs, Refusal.CANCELLED)
        self._pending: dict[int, SubmittedJob] = {job.number: job for job in jobs}
        self._requested: set[int] = set()

    def pending(self) -> frozenset[int]:
        """The jobs that may still access their blocks, as far as is known."""
        self._pending = {number: job for number, job in self._pending.items() if self._ledger.is_outstanding(number)}
        return frozenset(self._pending)

    def take_unrequested(self) -> list[int]:
        """The jobs to name in a request to the daemon now, each once.

        Jobs that wait for their events follow when they are queued: the daemon does not know them yet, and the others
        need not wait for them.
        """
        jobs = [
            number
            for number, job in self._pending.items()
            if number not in self._requested and job.phase is not Phase.WAITING
        ]
        self._requested.update(jobs)
        return jobs

    def on_answer(self, requested: Iterable[int], pending: Iterable[int]) -> None:
        """Take the daemon's answer to a request: which of its jobs still run."""
        for number in set(requested) - set(pending):
            self._pending.pop(number, None)
