"""How long to wait before the next attempt. Pure: no clock, no sleep."""

from __future__ import annotations

import random as random_module
from collections.abc import Callable


class Backoff:
    """Exponential delays with jitter, so that a node's engines do not all come at once when their daemon is back.

    Args:
        first: seconds before the second attempt, without jitter.
        longest: seconds; delays stop growing there.
        factor: each delay is this many times the one before.
        jitter: part of a delay that is random: 0 for none, 1 for anything between nothing and the whole delay
            ("equal" and "full" jitter of the AWS Architecture Blog, "Exponential Backoff And Jitter", 2015).
        random: uniform numbers in [0, 1).
    """

    def __init__(
        self,
        first: float = 0.05,
        longest: float = 2.0,
        *,
        factor: float = 2.0,
        jitter: float = 0.5,
        random: Callable[[], float] = random_module.random,
    ) -> None:
        if not (0 < first <= longest and factor >= 1 and 0 <= jitter <= 1):
            raise ValueError("a backoff needs 0 < first <= longest, factor >= 1 and 0 <= jitter <= 1")
        self._first = first
        self._longest = longest
        self._factor = factor
        self._jitter = jitter
        self._random = random
        self._delay = first

    def next(self) -> float:
        """Seconds to wait before the next attempt; the one after that waits longer."""
        delay = self._delay
        self._delay = min(self._longest, delay * self._factor)
        return delay * (1 - self._jitter * self._random())

    def reset(self) -> None:
        """An attempt succeeded: begin again with the first delay."""
        self._delay = self._first
