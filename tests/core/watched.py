"""What watchers are told, and what they know from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvsidecar.core.changes import Update
from kvsidecar.core.metrics import Metrics
from kvsidecar.core.watches import Watch, Watches
from kvsidecar.types import Residency
from tests.cache.support import namespace, new_cache

WIDTH = 32


@dataclass
class Reader:
    """A watcher that follows what it is told."""

    room: bool = True
    readable: dict[int, set[bytes]] = field(default_factory=dict)
    notes: dict[bytes, bytes] = field(default_factory=dict)
    updates: list[Update] = field(default_factory=list)
    complete: bool = False
    on_disk: set[bytes] = field(default_factory=set)

    def has_room(self) -> bool:
        return self.room

    def send(self, update: Update) -> None:
        assert self.room
        self.updates.append(update)
        assert update.sequence == len(self.updates)
        if update.reset:
            self.readable, self.complete = {}, False
        for change in update.changes:
            mine = self.readable.setdefault(change.group, set())
            hashes = [change.hashes[i : i + WIDTH] for i in range(0, len(change.hashes), WIDTH)]
            match change.kind:
                case Residency.STORED:
                    mine |= set(hashes)
                case Residency.REMOVED:
                    mine -= set(hashes)
                case Residency.CLEARED:
                    mine.clear()
                case Residency.TIER_STORED:
                    self.on_disk |= set(hashes)
                case Residency.TIER_CLEARED:
                    self.on_disk.clear()
                case Residency.NOTES:
                    each = len(change.notes) // len(hashes)
                    self.notes |= {name: change.notes[i * each : (i + 1) * each] for i, name in enumerate(hashes)}
        self.complete |= update.complete


class Daemon:
    """A cache, its watchers, and a clock that the test turns."""

    def __init__(self, pages: int = 8) -> None:
        self.cache, self.metrics = new_cache(pages), Metrics("host")
        self.due: list[Callable[[], None]] = []
        """At the next interval."""
        self.soon: list[Callable[[], None]] = []
        """In the next iteration of the loop."""
        self.ready = True
        self.watches = Watches(self.cache, self.metrics, self.later, lambda: self.ready)

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        (self.due if seconds else self.soon).append(call)

    def watch(self, reader: Reader) -> Watch:
        return self.watches.begin(namespace(), reader)

    def turn(self) -> None:
        """The next interval."""
        due, self.due = self.due, []
        assert len(due) <= 1
        for call in due:
            call()
        while self.soon:
            self.soon.pop()()
            assert len(self.soon) <= 1

    def settle(self) -> None:
        for _ in range(1000):
            if not self.due:
                return
            self.turn()
        raise AssertionError("it never comes to rest")

    def resets(self, reason: str) -> float:
        return self.metrics.value("kvsidecar_residency_resets_total", reason=reason)
