"""The times of ticks: the blocks of a table know only the ticks of their last uses."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import numpy as np
import numpy.typing as npt

from kvsidecar.cache.arrays import Ints

Seconds = npt.NDArray[np.float64]

SPACING = 0.25
"""Seconds from a time to the next."""
IDLE_STEPS = 64
"""A time is known to `SPACING` plus one part in this many of how long ago it is."""
THIN_AFTER = 256


class UseTimes:
    """Recorded times, in seconds on the cache's clock, and the tick of the last request before each: the farther back,
    the fewer."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._ticks: list[int] = []
        self._indexed: tuple[Ints, Seconds] | None = None
        """Ticks and times as arrays; None: they have changed since."""

    def note(self, now: float, tick: int) -> None:
        """Record the time, and the tick of the last request."""
        if self._times and now < self._times[-1] + SPACING:
            return
        self._times.append(now)
        self._ticks.append(tick)
        self._indexed = None
        if len(self._times) % THIN_AFTER == 0:
            self._thin(now)

    def tick_at(self, time: float) -> int:
        """A tick that was not later than this time; -1 if none is known."""
        at = bisect_right(self._times, time)
        return self._ticks[at - 1] if at else -1

    def last_tick(self, time: float) -> int:
        """The last tick until this time, or one up to one part in `IDLE_STEPS` of its age and `SPACING` later; -1 if
        none is known."""
        at = bisect_right(self._times, time)
        return self._ticks[min(at, len(self._ticks) - 1)] if at else -1

    def latest(self, ticks: Ints, otherwise: int) -> Ints:
        """The second until which each of these ticks was: not earlier than the use, and up to one part in `IDLE_STEPS`
        of its age and two seconds later.

        Args:
            otherwise: for ticks since the last of the times.
        """
        known, times = self._arrays()
        seconds: Ints = np.ceil(np.append(times, otherwise)).astype(np.int64)
        found: Ints = seconds[np.searchsorted(known, ticks)]
        return found

    def earliest(self, ticks: Ints, otherwise: float) -> Seconds:
        """A time before each of these ticks, up to one part in `IDLE_STEPS` of its age and `SPACING` earlier.

        Args:
            otherwise: for ticks before the first of the times.
        """
        known, times = self._arrays()
        at = np.searchsorted(known, ticks) - 1
        found: Seconds = np.where(at >= 0, times[at], otherwise) if len(times) else np.full(len(ticks), otherwise)
        return found

    def before(self, tick: int, otherwise: float) -> float:
        """`earliest` of one tick."""
        at = bisect_left(self._ticks, tick)
        return self._times[at - 1] if at else otherwise

    def _arrays(self) -> tuple[Ints, Seconds]:
        if self._indexed is None:
            self._indexed = np.array(self._ticks, np.int64), np.array(self._times, np.float64)
        return self._indexed

    def _thin(self, now: float) -> None:
        kept: list[int] = []
        for i, time in enumerate(self._times):
            if not kept or time - self._times[kept[-1]] >= (now - time) / IDLE_STEPS:
                kept.append(i)
        self._times = [self._times[i] for i in kept]
        self._ticks = [self._ticks[i] for i in kept]
