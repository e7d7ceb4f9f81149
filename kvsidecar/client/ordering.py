"""A store reads live KV: it comes after the kernels that wrote it, by a wait on the host or on the device.

``HOST``: a thread of the client waits for the engine's event, then the store is sent. Needs nothing shared.
``DEVICE``: the store names an entry of a ring of interprocess events, and the daemon starts it when that is over.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from kvsidecar.client.jobs import Completion, Job, Jobs
from kvsidecar.client.results import EVENT_FAILED, JobDone
from kvsidecar.types import Outcome


class Order(Enum):
    """What a store comes after, when it is not an event of the caller's own."""

    DEVICE = "device"
    """After all work that the engine's current stream was given before the call."""


DEVICE = Order.DEVICE


class EventRing(Protocol):
    """A fixed set of interprocess events of the engine; `kvsidecar.client.torch.TorchEventRing` is one.

    The client keeps it until it is closed: a wait for an event whose exporter has destroyed it is undefined.
    """

    @property
    def handles(self) -> Sequence[bytes]:
        """``cuIpcGetEventHandle`` of every event, 64 bytes each; the same ones every time."""

    def record(self, index: int) -> None:
        """Record event ``index`` on the engine's current stream. Called in the thread that stores."""

    def mark(self) -> Completion:
        """Record an event that is not in the ring on the engine's current stream: for stores that find no free entry,
        and for daemons that cannot open the ring. Called in the thread that stores."""


class RingSlots:
    """Which entries of a ring may be recorded. Used under `Jobs.changed`.

    Recording an event forgets what it held. An entry recorded again before the daemon has seen the end of the first
    record (`WaitIssued`, which comes before the job's own end) makes the earlier store wait for work it has nothing to
    do with, or, at the moment in between, for nothing.
    """

    def __init__(self, size: int) -> None:
        self._user: list[int | None] = [None] * size
        self._next = 0

    def take(self, job: int) -> int | None:
        """An entry that nobody will wait for any more, now this job's; None if there is none."""
        size = len(self._user)
        for step in range(size):
            index = (self._next + step) % size
            if self._user[index] is None:
                self._user[index] = job
                self._next = (index + 1) % size
                return index
        return None

    def issued(self, index: int) -> None:
        """The daemon needs no more what this entry holds: it may be recorded again."""
        if 0 <= index < len(self._user):
            self._user[index] = None

    def over(self, job: int, index: int) -> None:
        """A job has ended, so nobody will wait for its entry; no effect if the entry is another job's by now."""
        if self._user[index] == job:
            self._user[index] = None


class HostOrder:
    """Sends each job when what it comes after is over. Its thread lives from the first such job to `stop`."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self._waiting: queue.SimpleQueue[tuple[Job, Completion] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def add(self, job: Job, after: Completion) -> None:
        with self._lock:
            if self._thread is None and not self._stopped:
                self._thread = threading.Thread(target=self._run, name="kvsidecar-order", daemon=True)
                self._thread.start()
            self._waiting.put((job, after))

    def stop(self) -> None:
        """No job is added after this. Those added before are still waited for and sent."""
        with self._lock:
            self._stopped = True
            self._waiting.put(None)

    def join(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds for the thread. False: an event of the engine is not over."""
        if self._thread is None:
            return True
        self._thread.join(max(0.0, timeout))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            job, after = item
            with self._jobs.changed:
                if not self._jobs.is_outstanding(job.number):
                    continue  # cancelled, or its daemon is lost: nobody needs to wait for its event
            try:
                after.synchronize()
            except Exception as error:  # noqa: BLE001 - an engine's event may raise anything; the job must end
                self._jobs.finish(JobDone(job.number, Outcome.FAILED, EVENT_FAILED, str(error)))
                continue
            job.session.send(job)
