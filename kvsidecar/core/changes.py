"""The updates that watchers are sent."""

from __future__ import annotations

from dataclasses import dataclass

from kvsidecar.types import Residency


@dataclass(frozen=True, slots=True)
class Change:
    kind: Residency
    group: int
    hashes: bytes = b""
    """Joined."""
    notes: bytes = b""
    """Joined; as many bytes for each hash."""

    @property
    def nbytes(self) -> int:
        return len(self.hashes) + len(self.notes)


@dataclass(frozen=True, slots=True)
class Update:
    """One message to a watcher."""

    sequence: int
    """1, 2, 3, ..."""
    changes: tuple[Change, ...]
    reset: bool = False
    """A snapshot begins before the changes."""
    complete: bool = False
    """The snapshot ends after the changes."""
