"""Before preempted blocks are overwritten: wait until named jobs no longer touch them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvsidecar.client.jobs import Job, Jobs, Phase
from kvsidecar.client.session import Session
from kvsidecar.types import Direction, Refusal


def flush(jobs: Jobs, numbers: Sequence[int], *, timeout: float, cancel: bool) -> frozenset[int]:
    """Wait at most ``timeout`` seconds; see `Client.flush`. Returns the jobs that still touch the device's blocks."""
    deadline = time.monotonic() + timeout
    wanted = frozenset(numbers)
    with jobs.changed:
        if cancel:
            # What waits or is queued here has not begun; the daemon is asked about the rest.
            jobs.cancel_unsent([job.number for job in _named(jobs, wanted)], Refusal.CANCELLED)
        busy = {job.number: job for job in _named(jobs, wanted)}
        asked: set[int] = set()
        flushes: dict[int, tuple[Session, frozenset[int]]] = {}
        try:
            while True:
                for number, (session, of_flush) in flushes.items():
                    pending = session.flushed.get(number)
                    for each in of_flush - pending if pending is not None else ():
                        busy.pop(each, None)
                busy = {number: job for number, job in busy.items() if jobs.is_outstanding(number)}
                left = deadline - time.monotonic()
                if not busy or left <= 0:
                    return frozenset(busy)
                # Jobs that still wait for their events are asked about when they are on their way: the daemon cannot
                # hurry what it has not been told of, and the others need not wait for them.
                known = [job for job in busy.values() if job.number not in asked and job.phase is not Phase.WAITING]
                for session in dict.fromkeys(job.session for job in known):
                    of_session = [job.number for job in known if job.session is session]
                    number = jobs.number()
                    flushes[number] = session, frozenset(of_session)
                    session.flush(number, of_session, left, cancel=cancel)
                    asked.update(of_session)
                jobs.changed.wait(left)
        finally:
            for number, (session, _) in flushes.items():
                session.forget_flush(number)


def _named(jobs: Jobs, wanted: frozenset[int]) -> list[Job]:
    return [job for job in jobs.outstanding() if (job.number in wanted if wanted else job.direction is Direction.STORE)]
