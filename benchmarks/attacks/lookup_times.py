"""How long a daemon takes for a lookup, without what its threads wait for a core, of which the kernel keeps count."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.harness import DaemonProcess, Rank

OWN_SECONDS = 0.0002
"""A lookup is not counted if this process has waited longer for a core: its answer may have been there for long."""


class Waits:
    """How long the threads of a process have waited for a core."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._files: list[int] = []
        self.look()

    def look(self) -> None:
        """See which threads it has now."""
        self.close()
        for task in Path(f"/proc/{self._pid}/task").iterdir():
            with suppress(FileNotFoundError):  # it has just ended
                self._files.append(os.open(task / "schedstat", os.O_RDONLY))

    def now(self) -> list[float]:
        """Of each, in seconds, so far."""
        found = []
        for file in self._files:
            try:
                found.append(int(os.pread(file, 100, 0).split()[1]) / 1e9)
            except ProcessLookupError:  # it has ended
                found.append(0.0)
        return found

    def close(self) -> None:
        for file in self._files:
            os.close(file)
        self._files.clear()


def longest_wait(before: list[float], after: list[float]) -> float:
    """Of a thread, in seconds: that which waits may have Python's lock, and hold up all."""
    return max(0.0, *(late - early for early, late in zip(before, after, strict=True)))


@dataclass
class Asked:
    """A daemon that is asked, and how long its answers took."""

    daemon: DaemonProcess
    rank: Rank
    waits: Waits
    seconds: list[float] = field(default_factory=list)
    most_mib: float = 0.0

    def ask(self, own: Waits) -> None:
        own_before, before, began = own.now(), self.waits.now(), time.perf_counter()
        self.rank.hits("a")  # whether it hits is not asked: the attackers store, too, and evict what is old
        took = time.perf_counter() - began
        waited = longest_wait(before, self.waits.now())
        if longest_wait(own_before, own.now()) < OWN_SECONDS:
            self.seconds.append(took - waited)

    def taken(self) -> list[float]:
        found, self.seconds = sorted(self.seconds), []
        return found
