"""A store reads live KV: it comes after the kernels that wrote it, by a wait on the host or on the device.

``HOST``: a thread of the client waits for the engine's event, then the store is sent (`jobs.HostOrder`). Needs nothing
shared. ``DEVICE``: the store names an entry of a ring of interprocess events, and the daemon starts it when that is
over.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol


class Order(Enum):
    """What a store comes after, when it is not an event of the caller's own."""

    DEVICE = "device"
    """After all work that the engine's current stream was given before the call."""


DEVICE = Order.DEVICE


class Completion(Protocol):
    """Something to wait for before a copy may start; ``torch.cuda.Event`` is one."""

    def synchronize(self) -> None:
        """Return when the work recorded before it is over. Called in a thread of the client."""


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
    """Which entries of a ring may be recorded. With the client's lock held.

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

    def ended(self, job: int, index: int) -> None:
        """A job has ended, so nobody will wait for its entry; no effect if the entry is another job's by now."""
        if self._user[index] == job:
            self._user[index] = None
