"""A limit per user on things held at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from kvsidecar.errors import LimitExceeded


class Quota:
    """Counts what holders have, and refuses more.

    Args:
        limit: the most that one holder may have.
        what: plural noun for the text of the refusal.
    """

    def __init__(self, limit: int, what: str) -> None:
        self._limit = limit
        self._what = what
        self._held: Counter[Hashable] = Counter()

    def take(self, holder: Hashable, count: int = 1) -> None:
        """Raises LimitExceeded, and takes nothing, if the holder would then have more than the limit."""
        if self._held[holder] + count > self._limit:
            raise LimitExceeded(f"one user may have {self._limit} {self._what} at once")
        self._held[holder] += count

    def give_back(self, holder: Hashable, count: int = 1) -> None:
        self._held[holder] -= count
        if not self._held[holder]:
            del self._held[holder]
