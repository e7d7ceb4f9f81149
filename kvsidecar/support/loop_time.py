"""Divides an iteration of the event loop among everything that can wait for the next one."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Final, Generic, Protocol, TypeVar

T = TypeVar("T")

SECONDS: Final = 0.0002
"""How long steps begin in one iteration of the loop."""


def as_step(call: Callable[[], T]) -> tuple[Callable[[], None], asyncio.Future[T]]:
    """A step that makes the call, and what it returns or raises. If the future is cancelled before, it does nothing."""
    result: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def step() -> None:
        if result.done():
            return  # nobody waits for it any more
        try:
            result.set_result(call())
        except Exception as error:  # noqa: BLE001 - for whoever waits for the result
            result.set_exception(error)

    return step, result


class Lane(Protocol):
    """Steps of one kind, in an order of their own."""

    @property
    def waits(self) -> bool:
        """True while it has a step that may begin."""

    def step(self) -> None:
        """Take the next step. Called only while it waits."""


class LoopTime:
    """Time for steps in each iteration of the event loop.

    An iteration of the loop reads every socket that has something to read. Jobs, what users of gRPC cause, news for
    watchers and texts that are rendered each come in steps of some tenths of a millisecond; if all of them took theirs
    in the same iteration, a scheduler's lookup would wait for their sum. With this it waits for `SECONDS` and the last
    step.

    A lane that has a step joins. Lanes that wait take one step each, in turns, when all sockets have been read: a step
    that began while they are read would hold up a lookup that has arrived with its message.

    Args:
        seconds: how long steps begin in an iteration; 0: one step per iteration.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, seconds: float = SECONDS) -> None:
        self.clock = clock
        self._seconds = seconds
        self._lanes: deque[Lane] = deque()
        self._over = False
        """Whether this iteration begins no more steps."""
        self._scheduled = False
        self.at_end_of_iteration: Callable[[], None] = lambda: None
        """Called when the steps of an iteration have been taken."""
        self._calls: deque[Callable[[], None]] = deque()

    def end(self) -> None:
        """Make the running step the last one of this iteration: it has made work for others."""
        self._over = True

    def join(self, lane: Lane) -> None:
        """A lane waits from now on, until it has no step any more. May be called again meanwhile."""
        if lane not in self._lanes:
            self._lanes.append(lane)
        self._schedule()

    # -- a lane of its own ---------------------------------------------------------------------------------------------

    def later(self, call: Callable[[], None]) -> None:
        """Call it in one of the next iterations, after those that wait."""
        self._calls.append(call)
        self.join(self)

    async def turn(self) -> None:
        """Wait for a step in one of the next iterations, and be its last one: what follows takes as long as a step."""
        step, came = as_step(self.end)
        self.later(step)
        await came

    async def run(self, steps: Generator[None, None, T]) -> T:
        """Run a long computation, a step at a time, and return the generator's return value. Many at the same time take
        turns, so that a short one need not wait for the end of a long one."""
        computation = _Computation(self, steps)
        self.later(computation.step)
        try:
            return await computation.result
        finally:
            steps.close()

    @property
    def waits(self) -> bool:
        return bool(self._calls)

    def step(self) -> None:
        self._calls.popleft()()

    # -- iterations ----------------------------------------------------------------------------------------------------

    def _iterate(self) -> None:
        self._scheduled = self._over = False
        until = self.clock() + self._seconds
        while self._lanes and not self._over:
            lane = self._lanes.popleft()
            try:
                if lane.waits:
                    lane.step()
            finally:
                if lane.waits:
                    self.join(lane)
                self._schedule()
            if self.clock() >= until:
                self._over = True
        self.at_end_of_iteration()

    def _schedule(self) -> None:
        if self._lanes and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._iterate)


class _Computation(Generic[T]):
    """A long computation. No closure that calls itself: it would be garbage that only a collection finds."""

    __slots__ = ("_steps", "_time", "result")

    def __init__(self, loop_time: LoopTime, steps: Generator[None, None, T]) -> None:
        self._time, self._steps = loop_time, steps
        self.result: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def step(self) -> None:
        if self.result.done():
            return  # nobody waits for it any more
        try:
            next(self._steps)
        except StopIteration as end:
            self.result.set_result(end.value)
        except Exception as error:  # noqa: BLE001 - for whoever waits for the result
            self.result.set_exception(error)
        else:
            self._time.later(self.step)
