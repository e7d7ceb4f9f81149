"""Clocks around jobs. The same for every system: the host's clock, from the call that submits to the known end."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Timing:
    """Times of the jobs of one size, in seconds.

    Args:
        each: of each job, from the call that submits it to its known end.
        total: from the first call to the last end.
        in_flight: jobs that were outstanding at a time.
    """

    each: Sequence[float]
    total: float
    in_flight: int

    @property
    def ms_p50(self) -> float:
        return 1e3 * statistics.median(self.each)

    def gbps(self, job_bytes: int) -> float:
        """GB/s. One job at a time: by the median, so that one hiccup does not count. Several: by the whole time."""
        seconds = statistics.median(self.each) if self.in_flight == 1 else self.total / len(self.each)
        return job_bytes / seconds / 1e9


def measure(jobs: int, in_flight: int, submit: Callable[[int], T], wait: Callable[[T], None]) -> Timing:
    """Submit jobs, never more than ``in_flight`` at a time, and wait for them in order.

    Args:
        submit: starts job number so and so and returns a handle.
        wait: returns when the job of a handle is over, and raises if it failed.
    """
    pending: deque[tuple[T, float]] = deque()
    each: list[float] = []

    def finish() -> None:
        handle, started = pending.popleft()
        wait(handle)
        each.append(time.perf_counter() - started)

    begun = time.perf_counter()
    for job in range(jobs):
        if len(pending) == in_flight:
            finish()
        started = time.perf_counter()
        pending.append((submit(job), started))
    while pending:
        finish()
    return Timing(each, time.perf_counter() - begun, in_flight)


def poll_until(condition: Callable[[], bool], seconds: float, what: str, pause: float = 0.0) -> None:
    """Ask until it is so. Raises TimeoutError: it is not so after ``seconds``; ``what`` names it."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not after {seconds:g} s")
        time.sleep(pause)
