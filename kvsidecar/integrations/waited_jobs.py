"""Jobs of a client that an engine's thread waits for, each with a function to call at its end. Engine-independent."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from kvsidecar.client import Client, JobDone

GIVE_UP_SECONDS = 10.0
"""Interval between messages about a copy that does not end."""

_log = logging.getLogger("kvsidecar")

OnEnd = Callable[[JobDone], None]


class WaitedJobs:
    """Calls back at the end of each job, in `poll` or `wait`. Used by one thread.

    Args:
        note: called with the end of every job, even if nothing waits for it.
    """

    def __init__(self, client: Client, note: Callable[[JobDone], object] = lambda _: None) -> None:
        self.client, self._note = client, note
        self._on_end: dict[int, OnEnd] = {}

    @property
    def num_running(self) -> int:
        return len(self._on_end)

    def add(self, job: int, on_end: OnEnd) -> int:
        self._on_end[job] = on_end
        return job

    def outstanding(self, jobs: Iterable[int]) -> tuple[int, ...]:
        return tuple(job for job in jobs if job in self._on_end)

    def poll(self) -> None:
        """Handle the jobs that have ended. Never waits."""
        if self._on_end:
            for done in self.client.poll():
                self._ended(done)

    def wait(self, jobs: Iterable[int], timeout: float) -> tuple[int, ...]:
        """Wait for these jobs, at most ``timeout`` seconds. Returns those that have not ended."""
        left = self.outstanding(jobs)
        if left:
            for done in self.client.wait(left, max(0.0, timeout)).values():
                self._ended(done)
        return self.outstanding(left)

    def stop(self, jobs: Iterable[int], timeout: float, *, cancel: bool) -> tuple[int, ...]:
        """Wait until these jobs no longer access the GPU's blocks. Returns those that still may after ``timeout``
        seconds.

        Args:
            cancel: decline jobs that have not started.
        """
        left = self.outstanding(jobs)
        if not left:
            return ()
        pending = self.client.flush(left, timeout=max(0.0, timeout), cancel=cancel)
        self.wait(left, 0.0)
        return tuple(pending)

    def end(self, jobs: Iterable[int], timeout: float, reason: str) -> None:
        """Cancel jobs that have not started. Those that still run after ``timeout`` seconds end with the session: see
        `give_up`."""
        if left := self.stop(jobs, timeout, cancel=True):
            self.give_up(left, reason)

    def give_up(self, jobs: Iterable[int], reason: str) -> None:
        """End the session with a daemon that hangs. Returns when none of these jobs accesses the GPU any more.

        That is at once, unless one of its copies has begun and does not end. The engine must not use those blocks, so
        it waits: a daemon that lives kills such a copier after --stuck-after.
        """
        self.client.give_up(reason)
        while left := self.wait(jobs, GIVE_UP_SECONDS):
            _log.error("kvsidecar: waiting for %d copies that have begun, or for the end of their copier", len(left))

    def _ended(self, done: JobDone) -> None:
        self._note(done)
        if (on_end := self._on_end.pop(done.job, None)) is not None:
            on_end(done)
