"""Backoff between attempts, and a circuit breaker: a daemon that hangs costs an engine a few timeouts, not one per
step. No I/O, no threads."""

from __future__ import annotations

import random as random_module
import threading
import time
from collections.abc import Callable
from enum import Enum


class Backoff:
    """Exponential delays with jitter, so that the engines of a node do not all reconnect at once.

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
        """Begin again with the first delay."""
        self._delay = self._first


class BreakerState(Enum):
    CLOSED = "closed"
    """Calls are made."""
    OPEN = "open"
    """No call is made until a probe is due."""
    HALF_OPEN = "half_open"
    """A probe is under way; still no other call is made."""


SILENT_SECONDS = 0.25
"""Longer than other work mostly occupies a live daemon's loop, or a machine. A caller with a smaller budget continues
without its answer meanwhile."""


class CircuitBreaker:
    """Opens after consecutive waits without an answer; closes when a probe is answered. Thread-safe.

    It makes no calls itself. The user checks `allows` before each call, reports its outcome, and makes the probes in a
    background thread, never in an engine's step.

    Args:
        failures: number of consecutive waits without an answer that opens it.
        silence: seconds without any answer, from the first unanswered call, before such a wait counts: one that ends
            sooner only shows that the answer takes longer than the caller can wait.
        backoff: delays before the probes.
        clock: monotonic seconds.

    Attributes:
        state: whether calls are made.
    """

    def __init__(
        self,
        *,
        failures: int = 3,
        silence: float = SILENT_SECONDS,
        backoff: Backoff | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if failures < 1:
            raise ValueError("a breaker opens after at least one failure")
        self._threshold, self._silence = failures, silence
        self._backoff = backoff or Backoff(0.1, 2.0)
        self._clock = clock
        self._lock = threading.Lock()
        self.state = BreakerState.CLOSED
        self._failures = 0
        self._silent_since: float | None = None
        """When the first call after the last answer was made."""
        self._probe_at = 0.0

    @property
    def allows(self) -> bool:
        """Whether a call may be made now. Never waits."""
        return self.state is BreakerState.CLOSED

    def called(self) -> None:
        """A call was made."""
        if self._silent_since is None:
            self._silent_since = self._clock()

    def succeeded(self) -> bool:
        """A call or a probe was answered, be it late. Returns whether that closed the breaker."""
        with self._lock:
            self._failures = 0
            self._silent_since = None
            if self.state is BreakerState.OPEN:
                # This call began before the breaker opened. The probe decides: its answer is newer.
                return False
            closed = self.state is BreakerState.HALF_OPEN
            self.state = BreakerState.CLOSED
            self._backoff.reset()
            return closed

    def failed(self, *, surely: bool = False) -> bool:
        """A wait for a call or a probe ended without an answer. Returns whether that opened a closed breaker.

        Args:
            surely: it counts however short the silence was.
        """
        with self._lock:
            if self.state is BreakerState.OPEN:
                return False  # this call began before it opened
            if was_closed := self.state is BreakerState.CLOSED:
                now = self._clock()
                if self._silent_since is None:
                    self._silent_since = now  # others were answered meanwhile
                if now - self._silent_since < self._silence and not surely:
                    return False
                self._failures += 1
                if self._failures < self._threshold:
                    return False
            self.state = BreakerState.OPEN
            self._probe_at = self._clock() + self._backoff.next()
            return was_closed

    def probe_in(self) -> float | None:
        """Seconds until the next probe; None if the breaker is closed or a probe is under way."""
        with self._lock:
            if self.state is not BreakerState.OPEN:
                return None
            return max(0.0, self._probe_at - self._clock())

    def begin_probe(self) -> bool:
        """Become half-open if a probe is due. True: the caller makes one call and reports its outcome."""
        with self._lock:
            if self.state is not BreakerState.OPEN or self._clock() < self._probe_at:
                return False
            self.state = BreakerState.HALF_OPEN
            return True

    def reset(self) -> None:
        """Close: another daemon answers now."""
        with self._lock:
            self.state = BreakerState.CLOSED
            self._failures = 0
            self._silent_since = None
            self._backoff.reset()
