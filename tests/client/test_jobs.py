"""What is outstanding, and who looks for its end."""

from __future__ import annotations

from kvsidecar.client.jobs import Job, Jobs
from kvsidecar.client.results import JobDone
from kvsidecar.types import Direction, Outcome


class FakeSession:
    """Counts how often somebody looks for answers."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self.looked = 0
        self.ended: list[int] = []

    def read_now(self) -> None:
        self.looked += 1
        while self.ended:
            self._jobs.finish(JobDone(self.ended.pop(), Outcome.DONE))

    def job_over(self, job: Job) -> None: ...


def test_the_end_of_jobs_is_looked_for_unless_all_were_added_since_the_last_time() -> None:
    jobs = Jobs(10)
    session = FakeSession(jobs)

    def add(number: int) -> None:
        jobs.add(Job(number, Direction.STORE, (), session))  # type: ignore[arg-type]

    assert (jobs.poll(), session.looked) == ([], 0)
    add(1)
    session.ended.append(1)
    assert (jobs.poll(), session.looked) == ([], 0)
    add(2)
    assert [done.job for done in jobs.poll()] == [1]
    assert session.looked == 1
    session.ended.append(2)
    assert [done.job for done in jobs.poll()] == [2]
    assert (jobs.poll(), session.looked) == ([], 2)
