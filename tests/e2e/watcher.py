"""A client that watches what the pool holds."""

from __future__ import annotations

from kvsidecar.client import Residency, ResidencyChange
from kvsidecar.types import Namespace
from tests.harness import NAMESPACE, DaemonProcess, eventually, hashes


class Watcher:
    """Follows what it is told."""

    def __init__(self, daemon: DaemonProcess, namespace: Namespace = NAMESPACE) -> None:
        self.client = daemon.client()
        self.namespace = namespace
        self.readable: set[bytes] = set()
        self.on_disk: set[bytes] = set()
        self.complete: list[set[bytes]] = []
        """What was on the disk at the end of each snapshot."""
        self.notes: dict[bytes, bytes] = {}
        self.said: list[Residency] = []
        self.client.watch(namespace)

    def read(self) -> set[bytes]:
        for change in self.client.take_residency():
            self._take(change)
        return self.readable

    def _take(self, change: ResidencyChange) -> None:
        self.said.append(change.kind)
        width = self.namespace.hash_bytes
        names = [change.hashes[i : i + width] for i in range(0, len(change.hashes), width)]
        match change.kind:
            case Residency.STORED:
                self.readable |= set(names)
            case Residency.REMOVED:
                self.readable -= set(names)
            case Residency.NOTES:
                each = len(change.notes) // len(names)
                self.notes |= {name: change.notes[i * each : (i + 1) * each] for i, name in enumerate(names)}
            case Residency.TIER_STORED:
                self.on_disk |= set(names)
            case Residency.TIER_REMOVED:
                self.on_disk -= set(names)
            case Residency.TIER_CLEARED:
                self.on_disk.clear()
            case Residency.COMPLETE:
                self.complete.append(set(self.on_disk))
            case Residency.CLEARED:
                self.readable.clear()
            case Residency.RESET | Residency.LOST:
                self.readable.clear()
                self.on_disk.clear()

    def wait_for(self, *names: object) -> None:
        eventually(lambda: self.read() == set(hashes(*names)), lambda: f"{self.said}, {len(self.readable)} blocks")

    def wait_for_disk(self, *names: object) -> None:
        eventually(lambda: self.read() is not None and self.on_disk == set(hashes(*names)), lambda: f"{self.said}")

    def wait_complete(self) -> None:
        eventually(lambda: self.read() is None or Residency.COMPLETE in self.said, "no snapshot")

    def close(self) -> None:
        assert self.client.close()
