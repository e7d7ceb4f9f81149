"""The pacing of stores: how much of them may be in flight, so that they do not delay an engine's own copies."""

from __future__ import annotations

from collections.abc import Callable

from kvsidecar.types import Direction


class StorePacing:
    """Bounds the stores on devices whose engines compute. Elsewhere they may use the whole link, and loads may
    everywhere: copies to the device do not delay those from it (measured).

    Args:
        chunk: bytes of stores in flight at a time on such a device; None for no bound.
        on_change: called when `of` may give another answer.
    """

    def __init__(self, chunk: int | None, on_change: Callable[[], None]) -> None:
        self._chunk, self._on_change = chunk, on_change
        self._busy: frozenset[str] = frozenset()

    def set_chunk(self, nbytes: int | None) -> None:
        self._chunk = nbytes
        self._on_change()

    @property
    def busy(self) -> frozenset[str]:
        """UUIDs of the devices on which an engine computes: its own small copies, such as those of sampled tokens, must
        pass the stores there."""
        return self._busy

    def set_busy(self, uuids: frozenset[str]) -> None:
        if uuids != self._busy:
            self._busy = uuids
            self._on_change()

    def of(self, uuid: str, direction: Direction) -> int | None:
        """The most bytes in flight at a time now; None for the whole link."""
        return self._chunk if direction is Direction.STORE and uuid in self._busy else None
