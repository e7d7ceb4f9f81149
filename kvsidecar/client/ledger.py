"""Which jobs are outstanding, and what became of the others. Every job ends once.

Decides, and does nothing: no I/O, no thread, no clock, no lock of its own. All methods are called with the client's
lock held, unless they say otherwise, and none of them tells anybody: who changes the ledger notifies.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from kvsidecar.client.ordering import RingSlots
from kvsidecar.client.results import Blocks, JobDone
from kvsidecar.types import Direction, Outcome

MAX_UNPOLLED = 1 << 16
"""Ends of jobs that are kept until somebody asks for them: about 15 MB. Of more the older half is forgotten."""

_log = logging.getLogger("kvsidecar.client")


class Phase(IntEnum):
    """How far a job has come. Up to QUEUED the daemon does not know it, so no DMA of it can run."""

    WAITING = 0
    """For what it comes after."""
    QUEUED = 1
    """Behind the messages before it."""
    SENT = 2


@dataclass(slots=True, eq=False)
class Job:
    """One store or load from its submission to its end. Mutable with the client's lock held."""

    number: int
    direction: Direction
    blocks: Sequence[Blocks]
    lease: int = 0
    deadline: float | None = None
    """Monotonic seconds; the copy does not start after it."""
    ring: RingSlots | None = None
    """Where it has taken ``event``."""
    event: int = 0
    """Entry of the event ring, from 1; 0 for none."""
    traceparent: bytes = b""
    phase: Phase = Phase.WAITING
    verdict: JobDone | None = None
    """What the daemon said of it while its copy might still run: reported when it cannot any more."""


class Ledger:
    """The jobs of one client.

    Those outstanding are all of one session: a job never moves to another one, and the supervisor attaches again only
    when every job of the last session has ended.

    Args:
        limit: of outstanding jobs.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._numbers = itertools.count(1)
        self._outstanding: dict[int, Job] = {}
        self._new = 0
        """Jobs that were added since somebody looked for their end."""
        self.finished: dict[int, JobDone] = {}
        """Ends that nobody has taken yet. Whether there are any may be seen without the lock."""
        self._forgets = False

    def number(self) -> int:
        """A number that no job or flush of this client has had. Needs no lock."""
        return next(self._numbers)

    # -- what is outstanding -----------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        return len(self._outstanding)

    @property
    def is_full(self) -> bool:
        return len(self._outstanding) >= self._limit

    def add(self, job: Job) -> None:
        self._outstanding[job.number] = job
        self._new += 1

    def is_outstanding(self, number: int) -> bool:
        return number in self._outstanding

    def outstanding(self) -> list[Job]:
        return list(self._outstanding.values())

    def may_have_ended(self) -> bool:
        """Whether it is worth to look for the end of a job: nothing has ended that was only just added, and to look
        would be a system call of the step that added it. Needs no lock: what comes in between is seen the next time."""
        worth, self._new = len(self._outstanding) > self._new, 0
        return worth

    # -- how jobs end ------------------------------------------------------------------------------------------------

    def finish(self, done: JobDone) -> bool:
        """A job has ended. False if it had ended before: the first end is the one that is reported."""
        job = self._outstanding.pop(done.job, None)
        if job is None:
            return False
        if job.ring is not None:
            job.ring.ended(job.number, job.event - 1)
        self._keep(done)
        return True

    def hold(self, done: JobDone) -> bool:
        """The daemon has given a job up, and its copy may still run: it ends with the daemon's process. False if it had
        ended before."""
        job = self._outstanding.get(done.job)
        if job is not None:
            job.verdict = done
        return job is not None

    def decline(self, number: int, reason: str, error: str = "") -> None:
        """Answer a job that was never outstanding."""
        self._keep(JobDone(number, Outcome.DECLINED, reason, error))

    def cancel_unsent(self, jobs: Iterable[Job], reason: str) -> None:
        """Decline those of these jobs that the daemon has not been told of."""
        for job in jobs:
            if job.phase is not Phase.SENT:
                self.finish(JobDone(job.number, Outcome.DECLINED, reason))

    def end_waiting(self, reason: str) -> None:
        """Report the jobs whose events were not over in the time there was."""
        self._end(reason, "", lambda job: job.phase is Phase.WAITING)

    def end_unsent(self, reason: str, error: str) -> None:
        """Report the jobs that a lost daemon was never told of."""
        self._end(reason, error, lambda job: job.phase is not Phase.SENT)

    def end_stores(self, reason: str, error: str) -> None:
        """Report the stores: their daemon will serve nothing more."""
        self._end(reason, error, lambda job: job.direction is Direction.STORE)

    def end_all(self, reason: str, error: str) -> None:
        """Report all jobs: no copy of them can run any more."""
        self._end(reason, error, lambda _: True)

    def _end(self, reason: str, error: str, which: Callable[[Job], bool]) -> None:
        for job in self.outstanding():
            if which(job):
                self.finish(job.verdict or JobDone(job.number, Outcome.FAILED, reason, error))

    # -- what has ended ----------------------------------------------------------------------------------------------

    def take_finished(self) -> list[JobDone]:
        """All of them, each once."""
        done = list(self.finished.values())
        self.finished.clear()
        return done

    def take(self, numbers: Iterable[int]) -> dict[int, JobDone]:
        """The same of these jobs."""
        return {number: self.finished.pop(number) for number in numbers if number in self.finished}

    def _keep(self, done: JobDone) -> None:
        """Until it is taken."""
        self.finished[done.job] = done
        if len(self.finished) > MAX_UNPOLLED:
            for number in tuple(itertools.islice(self.finished, MAX_UNPOLLED // 2)):
                del self.finished[number]
            if not self._forgets:
                self._forgets = True
                _log.warning("the ends of %d jobs were never asked for: the oldest are forgotten", MAX_UNPOLLED)
