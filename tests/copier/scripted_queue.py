"""A `CopyQueue` with a scripted stream and a clock that only the test moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from kvsidecar.copier.copy_queue import CopyQueue, CopyResult, QueuedCopy
from kvsidecar.device.base import COPY, CopyCall, CopyMark, CopyPlan, DeviceEvent, PreparedCall
from kvsidecar.errors import CopyFailed
from kvsidecar.support.fence import FenceLane
from kvsidecar.types import Direction
from tests.plans import CopyList

POOL = 1 << 20
CHUNK = 4096
TOOK = 1e-9
"""Seconds per byte that a scripted device says it took."""
STEPS = 1000
"""More than any test needs: a queue that has more to do spins for ever."""


def plan(nbytes: int) -> CopyList:
    return CopyList(np.zeros(1, COPY), nbytes)


class Calls:
    """A plan of several calls, each in a slice of its own, known by their ``nbytes``."""

    def __init__(self, *sizes: int) -> None:
        self.nbytes = sum(sizes)
        self.chunks: list[int | None] = []
        self._left = list(sizes)

    def take(self, chunk: int | None) -> list[CopyCall]:
        self.chunks.append(chunk)
        return [CopyCall(np.zeros(1, COPY), False, self._left.pop(0))] if self._left else []


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Stream:
    """Does what the test says; a call is known by its ``nbytes``. Implements `CopyStream`."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.prepare_errors: dict[int, BaseException] = {}
        self.issue_errors: dict[int, BaseException] = {}
        self.mark_errors: dict[int, BaseException] = {}
        self.held: set[int] = set()
        """Calls that are not over."""
        self.quiesced: Callable[[], bool] = lambda: True
        """What the stream says when it is asked whether all it was given is over."""
        self.alone: list[bool] = []
        self.timed: list[bool] = []
        self.marks: list[Mark] = []

    def prepare(self, call: CopyCall, pool_address: int) -> PreparedCall:
        assert pool_address == POOL
        if call.nbytes in self.prepare_errors:
            raise self.prepare_errors[call.nbytes]
        return call

    def issue(self, prepared: PreparedCall, *, alone: bool = False, timed: bool = True) -> CopyMark:
        call = prepared
        assert isinstance(call, CopyCall)
        self.log.append(f"issue {call.nbytes}")
        in_flight = [mark for mark in self.marks if not mark.ended]
        assert not (alone and in_flight), "a call that is alone was issued behind others"
        assert not any(mark.alone for mark in in_flight), "a call was issued behind one that is alone"
        self.alone.append(alone)
        self.timed.append(timed)
        if call.nbytes in self.issue_errors:
            raise self.issue_errors[call.nbytes]
        self.marks.append(Mark(self, call.nbytes, alone=alone, timed=timed))
        return self.marks[-1]

    def is_done(self) -> bool:
        done = self.quiesced()
        if done:
            self.log.append("quiesced")
        return done

    def close(self) -> None: ...


class Mark:
    def __init__(self, stream: Stream, nbytes: int, *, alone: bool, timed: bool) -> None:
        self._stream, self._nbytes, self._timed = stream, nbytes, timed
        self.alone = alone
        self.ended = False

    def is_done(self) -> bool:
        if self._nbytes in self._stream.held:
            return False
        if not self.ended:
            self.ended = True
            self._stream.log.append(f"over {self._nbytes}")
            if self._nbytes in self._stream.mark_errors:
                raise self._stream.mark_errors[self._nbytes]
        return True

    def seconds(self) -> float:
        assert self.ended
        assert self._timed
        return self._nbytes * TOOK


class Event:
    """An engine's event, in the test's hands."""

    def __init__(self, error: Exception | None = None) -> None:
        self.done = False
        self.error = error

    def is_done(self) -> bool:
        if self.error:
            raise self.error
        return self.done

    def close(self) -> None: ...


@dataclass
class Bench:
    clock: Clock
    log: list[str] = field(default_factory=list)
    """What was issued, was over and has ended, in order."""
    ended: dict[int, CopyResult | CopyFailed] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stream = Stream(self.log)
        self.queue = CopyQueue(self.stream, Direction.STORE, POOL, self._on_end)
        self._numbers = count(1)

    def _on_end(self, copy: QueuedCopy, result: CopyResult | CopyFailed) -> None:
        assert copy.number not in self.ended, "a copy has ended twice"
        self.ended[copy.number] = result
        self.log.append(f"end {copy.number}")

    def submit(
        self,
        plan: CopyPlan,
        after: DeviceEvent | None = None,
        on_start: Callable[[], None] | None = None,
        lane: FenceLane | None = None,
        session: int = 0,
    ) -> int:
        number = next(self._numbers)
        self.queue.submit(
            QueuedCopy(number, plan, after, on_start, lane=lane, session=session, submitted=self.clock.now)
        )
        return number

    def run(self) -> None:
        """Step until the queue is idle, or waits."""
        for _ in range(STEPS):
            if not self.queue.step():
                return
        raise AssertionError("the queue always has more to do")

    def release(self, *sizes: int) -> None:
        self.stream.held.difference_update(sizes)
        self.run()

    @property
    def issued(self) -> list[int]:
        return [int(line.split()[1]) for line in self.log if line.startswith("issue")]

    @property
    def copied(self) -> dict[int, int]:
        """Bytes of the copies that were copied."""
        return {number: each.nbytes for number, each in self.ended.items() if isinstance(each, CopyResult)}

    @property
    def failed(self) -> dict[int, str]:
        """Errors of the copies that have failed, of which nothing moves any more."""
        failed = {number: each for number, each in self.ended.items() if isinstance(each, CopyFailed)}
        assert all(each.outcome_known for each in failed.values())
        return {number: str(each) for number, each in failed.items()}
