"""A limit per user, and for all users together, on things held at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from kvsidecar.errors import LimitExceeded


class Quota:
    """Counts what holders have, and refuses more.

    Args:
        limit: the most that one holder may have.
        what: plural noun for the text of the refusal.
        total: the most that all holders together may have; None: no such limit.
    """

    def __init__(self, limit: int, what: str, total: int | None = None) -> None:
        self._limit = limit
        self._what = what
        self._total = total
        self.held = 0
        """Number held by all holders together."""
        self._peak = 0
        self._held_by: Counter[Hashable] = Counter()

    def take(self, holder: Hashable, count: int = 1) -> None:
        """Raises LimitExceeded, and takes nothing, if the holder, or all together, would then have too much."""
        if self._held_by.get(holder, 0) + count > self._limit:
            raise LimitExceeded(f"one user may have {self._limit} {self._what} at once")
        if self._total is not None and self.held + count > self._total:
            raise LimitExceeded(f"all users together may have {self._total} {self._what} at once")
        self._held_by[holder] += count
        self.held += count
        self._peak = max(self._peak, self.held)

    def peak(self) -> int:
        """The most that all holders together had since the last call."""
        peak, self._peak = self._peak, self.held
        return peak

    def give_back(self, holder: Hashable, count: int = 1) -> None:
        self._held_by[holder] -= count
        self.held -= count
        if not self._held_by[holder]:
            del self._held_by[holder]
