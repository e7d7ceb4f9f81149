"""Orders stores after the kernels that write their blocks, by a wait on the host or on the device.

``HOST``: a thread of the client waits for the engine's event, then the store is sent (`jobs.HostOrder`). Needs nothing
shared. ``DEVICE``: the store names an entry of a ring of interprocess events, and the daemon starts it when that event
has completed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol


class Order(Enum):
    """What a store waits for, if not for an event of the caller."""

    DEVICE = "device"
    """All work that was enqueued on the engine's current stream before the call."""


DEVICE = Order.DEVICE
"""For ``Client.store(after=DEVICE)``: after all work that the engine enqueued on its current stream before the call."""


class Completion(Protocol):
    """Something to wait for before a copy may start; ``torch.cuda.Event`` is one. If it has a method ``query``, as that
    has, which says without waiting whether the work has completed, `Client.poll` sends what need not wait any more."""

    def synchronize(self) -> None:
        """Return when the work recorded before it has completed. Called in a thread of the client."""


class EventRing(Protocol):
    """A fixed set of interprocess events of the engine; `kvsidecar.client.torch.TorchEventRing` is one.

    The client references it until the client is closed, because waiting for a destroyed event is undefined.
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
    """Keeps track of the entries of a ring that are free to be recorded. Used with the client's lock held.

    Recording an event discards its last recording. If that happens before the daemon has issued its wait (`WaitIssued`,
    which precedes the end of the job), the earlier store waits for unrelated work, or not at all.

    Args:
        is_outstanding: whether a job has not ended. A job that has ended leaves its entry free.
    """

    def __init__(self, size: int, is_outstanding: Callable[[int], bool]) -> None:
        self._is_outstanding = is_outstanding
        self._user: list[int | None] = [None] * size
        self._next = 0

    def take(self, job: int) -> int | None:
        """Reserve a free entry for this job; None if there is none."""
        size = len(self._user)
        for step in range(size):
            index = (self._next + step) % size
            user = self._user[index]
            if user is None or not self._is_outstanding(user):
                self._user[index] = job
                self._next = (index + 1) % size
                return index
        return None

    def issued(self, index: int) -> None:
        """Free an entry: the daemon has issued its wait."""
        if 0 <= index < len(self._user):
            self._user[index] = None
