"""Which jobs may still touch the device's blocks. Decides, and does nothing; with the client's lock held."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvsidecar.client.ledger import Job, Ledger, Phase
from kvsidecar.errors import Refusal
from kvsidecar.types import Direction


class Flush:
    """One wait for jobs that shall no longer touch the device's blocks.

    Args:
        numbers: of the jobs; none for all stores.
        cancel: those that the daemon does not know are declined at once.
    """

    def __init__(self, ledger: Ledger, numbers: Sequence[int], *, cancel: bool) -> None:
        self._ledger = ledger
        self.cancel = cancel
        wanted = frozenset(numbers)
        jobs = [
            job
            for job in ledger.outstanding()
            if (job.number in wanted if wanted else job.direction is Direction.STORE)
        ]
        if cancel:
            ledger.cancel_unsent(jobs, Refusal.CANCELLED)
        self._busy: dict[int, Job] = {job.number: job for job in jobs}
        self._asked: set[int] = set()

    def busy(self) -> frozenset[int]:
        """Those that may still touch their blocks, as far as is known."""
        for number in [number for number in self._busy if not self._ledger.is_outstanding(number)]:
            del self._busy[number]
        return frozenset(self._busy)

    def to_ask(self) -> list[int]:
        """Those of which the daemon is to be asked now, each once.

        Those that still wait for their events are asked about when they are on their way: the daemon cannot hurry what
        it has not been told of, and the others need not wait for them.
        """
        jobs = [
            number for number, job in self._busy.items() if number not in self._asked and job.phase is not Phase.WAITING
        ]
        self._asked.update(jobs)
        return jobs

    def answered(self, asked: Iterable[int], pending: Iterable[int]) -> None:
        """The daemon has said which of the jobs that it was asked about still run."""
        for number in set(asked) - set(pending):
            job = self._busy.get(number)
            if job is not None and job.verdict is None:  # else nobody knows what its copy does
                del self._busy[number]
