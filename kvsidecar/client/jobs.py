"""Which jobs are outstanding, and what became of the others. Every job ends once."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

from kvsidecar.client.messages import FIELDS_BYTES, milliseconds
from kvsidecar.client.results import Blocks, JobDone
from kvsidecar.client.waiting import NAP_SECONDS
from kvsidecar.protocol.wire import pack_hashes, pack_ids
from kvsidecar.types import Direction, Outcome
from kvsidecar.v1 import sidecar_pb2 as pb

if TYPE_CHECKING:
    from kvsidecar.client.session import Session


MAX_UNPOLLED = 1 << 16
"""Ends of jobs that are kept until somebody asks for them: about 15 MB. Of more the older half is forgotten."""
LIGHT_SECONDS = 0.05
"""A wait that takes longer is for something slow, and not worth a tenth of a core."""


_log = logging.getLogger("kvsidecar.client")


class Completion(Protocol):
    """Something to wait for before a copy may start; ``torch.cuda.Event`` is one."""

    def synchronize(self) -> None:
        """Return when the work recorded before it is over. Called in a thread of the client."""


class Phase(IntEnum):
    """How far a job has come. Up to QUEUED the daemon does not know it, so no DMA of it can run."""

    WAITING = 0
    """For what it comes after."""
    QUEUED = 1
    """Behind the messages before it."""
    SENT = 2


@dataclass(slots=True, eq=False)
class Job:
    """One store or load from its submission to its end. Mutable under `Jobs.changed`."""

    number: int
    direction: Direction
    blocks: Sequence[Blocks]
    session: Session
    """Of the daemon run it was submitted to: a job never moves to another one."""
    lease: int = 0
    deadline: float | None = None
    """Monotonic seconds; the copy does not start after it."""
    event: int = 0
    """Entry of the event ring, from 1; 0 for none."""
    traceparent: bytes = b""
    phase: Phase = Phase.WAITING
    verdict: JobDone | None = None
    """What the daemon said of it while its copy might still run: reported when it cannot any more."""

    def fill(self, message: pb.AttachRequest, now: float) -> int:
        """Returns the most bytes that the message can have: to ask it takes as long as to serialize it.

        Raises:
            TypeError, ValueError, OverflowError: the blocks are not what they should be.
        """
        request: pb.Store | pb.Load
        if self.direction is Direction.STORE:
            request = message.store
            request.event = self.event
        else:
            request = message.load
            request.lease = self.lease
        request.job = self.number
        if self.deadline is not None:
            # 0 on the wire means no deadline, and a deadline that is over was answered before.
            request.deadline_ms = max(1, milliseconds("timeout", self.deadline - now))
        nbytes = FIELDS_BYTES
        if self.traceparent:
            request.traceparent = self.traceparent
            nbytes += len(self.traceparent)
        for each in self.blocks:
            hashes, block_ids = pack_hashes(each.hashes), pack_ids(each.block_ids)
            request.blocks.add(group=each.group, hashes=hashes, block_ids=block_ids)
            nbytes += len(hashes) + len(block_ids) + FIELDS_BYTES
        return nbytes


class Jobs:
    """The jobs of one client.

    Args:
        limit: of outstanding jobs.
    """

    def __init__(self, limit: int) -> None:
        self.lock = threading.RLock()
        """Guards jobs, sessions and the connection of one client."""
        self.changed = threading.Condition(self.lock)
        """Notified when any of them changes. (To enter the lock itself takes a quarter of the time.)"""
        self._limit = limit
        self._numbers = itertools.count(1)
        self._outstanding: dict[int, Job] = {}
        self._new = 0
        """Jobs that were added since the last poll."""
        self._finished: dict[int, JobDone] = {}  # an empty one may be seen without the lock
        self._forgets = False
        self._session: Session | None = None
        """Of the newest job: the others are read by their own threads alone."""

    def number(self) -> int:
        """A number that no job or flush of this client has had."""
        return next(self._numbers)

    # -- with the lock held ------------------------------------------------------------------------------------------

    @property
    def full(self) -> bool:
        return len(self._outstanding) >= self._limit

    def add(self, job: Job) -> None:
        self._outstanding[job.number] = job
        self._new += 1
        self._session = job.session

    def is_outstanding(self, number: int) -> bool:
        return number in self._outstanding

    def outstanding(self, session: Session | None = None) -> list[Job]:
        """Jobs that have not ended; of one session if it is named."""
        return [job for job in self._outstanding.values() if session is None or job.session is session]

    # -- without it --------------------------------------------------------------------------------------------------

    def finish(self, done: JobDone) -> bool:
        """A job has ended. False if it had ended before: the first end is the one that is reported."""
        with self.lock:
            job = self._outstanding.pop(done.job, None)
            if job is None:
                return False
            job.session.job_over(job)
            self._keep(done)
            return True

    def hold(self, done: JobDone) -> None:
        """The daemon has given a job up, and its copy may still run: it ends with the daemon's process."""
        with self.changed:
            job = self._outstanding.get(done.job)
            if job is not None:
                job.verdict = done
                job.session.unsettled = True
                self.changed.notify_all()

    def decline(self, number: int, reason: str, error: str = "") -> None:
        """Answer a job that was never outstanding."""
        with self.changed:
            self._keep(JobDone(number, Outcome.DECLINED, reason, error))

    def _keep(self, done: JobDone) -> None:
        """Until it is polled, or waited for. With the lock held."""
        self._finished[done.job] = done
        if len(self._finished) > MAX_UNPOLLED:
            for number in tuple(itertools.islice(self._finished, MAX_UNPOLLED // 2)):
                del self._finished[number]
            if not self._forgets:
                self._forgets = True
                _log.warning("the ends of %d jobs were never asked for: the oldest are forgotten", MAX_UNPOLLED)
        self.changed.notify_all()

    def end_waiting(self, session: Session, reason: str) -> None:
        """Report the jobs whose events were not over in the time there was."""
        self._end(session, reason, "", lambda job: job.phase is Phase.WAITING)

    def end_unsent(self, session: Session, reason: str, error: str) -> None:
        """Report the jobs that a lost daemon was never told of."""
        self._end(session, reason, error, lambda job: job.phase is not Phase.SENT)

    def end_stores(self, session: Session, reason: str, error: str) -> None:
        """Report the stores of a session whose daemon will serve nothing more."""
        self._end(session, reason, error, lambda job: job.direction is Direction.STORE)

    def end(self, session: Session, reason: str, error: str) -> None:
        """Report all jobs of a session of which no copy can run any more."""
        self._end(session, reason, error, lambda _: True)

    def _end(self, session: Session, reason: str, error: str, which: Callable[[Job], bool]) -> None:
        with self.changed:
            for job in self.outstanding(session):
                if which(job):
                    self.finish(job.verdict or JobDone(job.number, Outcome.FAILED, reason, error))

    def cancel_unsent(self, numbers: Iterable[int], reason: str) -> None:
        """Decline those of these jobs that the daemon has not been told of."""
        with self.changed:
            for number in numbers:
                job = self._outstanding.get(number)
                if job is not None and job.phase is not Phase.SENT:
                    self.finish(JobDone(number, Outcome.DECLINED, reason))

    def poll(self) -> list[JobDone]:
        # Both may be looked at without the lock: what comes in between is seen the next time.
        # Nothing has ended that was only just sent: to look for it would be a system call of the step that sent it.
        if len(self._outstanding) > self._new and self._session is not None:
            self._session.read_now()
        self._new = 0
        if not self._finished:
            return []
        with self.changed:
            done = list(self._finished.values())
            self._finished.clear()
            return done

    def wait(self, numbers: Iterable[int], timeout: float) -> dict[int, JobDone]:
        wanted = tuple(numbers)
        # Not until they are among the finished: an end that somebody has had, or that was forgotten, never will be.
        self.wait_until(lambda: not any(number in self._outstanding for number in wanted), time.monotonic() + timeout)
        with self.changed:
            return {number: self._finished.pop(number) for number in wanted if number in self._finished}

    def wait_until(self, over: Callable[[], bool], deadline: float) -> None:
        """Wait for something that the daemon's answers, or the end of a connection, bring about.

        The thread that waits reads the answers itself, and sleeps lightly at first: each saves a wake-up that takes
        longer than a small copy.

        Args:
            over: asked with the lock held, after every change.
            deadline: monotonic seconds.
        """
        light_until = time.monotonic() + LIGHT_SECONDS
        while True:
            with self.changed:
                now = time.monotonic()
                if over() or now >= deadline:
                    return
                session = self._session if self._outstanding else None
                if session is None or now >= light_until:
                    self.changed.wait(min(deadline - now, threading.TIMEOUT_MAX))
                    continue
            if session.wait_readable(min(NAP_SECONDS, deadline - now)):
                session.read_now()
            else:
                light_until = now
