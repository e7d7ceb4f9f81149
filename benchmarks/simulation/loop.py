"""An asyncio event loop whose every choice comes from a seed: time is virtual, threads run when they are told to."""

from __future__ import annotations

import asyncio
import random
from asyncio import events
from collections.abc import Callable, Coroutine
from contextvars import Context
from heapq import heappop, heappush
from typing import Any

_KEPT: list[object] = []


class SimLoop(asyncio.AbstractEventLoop):
    """Runs one ready callback at a time, and only when `run_one` is called.

    What asyncio itself leaves open is what the caller decides: when a thread (`asyncio.to_thread`) gets to run, when
    time passes, what happens between two callbacks. With ``shuffled`` the order of ready callbacks is open too: asyncio
    promises first come first served, but code that is right only because of it breaks at the next added ``await``.

    Nothing else of an event loop is here: a call that needs more raises NotImplementedError.
    """

    def __init__(self, rng: random.Random, *, shuffled: bool) -> None:
        self._rng = rng
        self._shuffled = shuffled
        self._now = 1000.0
        self._ready: list[events.Handle] = []
        self._timers: list[tuple[float, int, events.TimerHandle]] = []
        self._threads: list[Callable[[], None]] = []
        self._serial = 0
        self.errors: list[str] = []
        """What nobody caught."""

    # -- what the scheduler uses -----------------------------------------------------------------------------------

    @property
    def num_ready(self) -> int:
        """Callbacks that could run now."""
        return len(self._ready)

    @property
    def num_threads(self) -> int:
        """Calls in threads that have not run yet."""
        return len(self._threads)

    def run_one(self) -> None:
        """Run one ready callback."""
        index = self._rng.randrange(len(self._ready)) if self._shuffled else 0
        handle = self._ready.pop(index)
        if not handle.cancelled():
            handle._run()

    def run_thread(self) -> None:
        """Let one thread do all it has to do."""
        self._threads.pop(self._rng.randrange(len(self._threads)))()

    def advance(self, seconds: float) -> None:
        """Time passes; timers that are due become ready."""
        self._now += seconds
        while self._timers and self._timers[0][0] <= self._now:
            _, _, timer = heappop(self._timers)
            if not timer.cancelled():
                self._ready.append(timer)

    # -- what asyncio uses -----------------------------------------------------------------------------------------

    def time(self) -> float:
        return self._now

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> events.Handle:
        handle = events.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> events.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> events.TimerHandle:
        timer = events.TimerHandle(when, callback, args, self, context)
        self._serial += 1
        heappush(self._timers, (when, self._serial, timer))
        return timer

    def _timer_handle_cancelled(self, handle: events.TimerHandle) -> None:
        """A cancelled timer stays in the heap until its time comes."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], **options: Any
    ) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=self, **options)

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """The call of ``asyncio.to_thread``: runs as a whole, at a moment of the scheduler's choice."""
        future = self.create_future()

        def thread() -> None:
            try:
                result = func(*args)
            except Exception as error:  # noqa: BLE001 - it belongs to whoever awaits the thread
                if not future.cancelled():
                    future.set_exception(error)
                return
            if not future.cancelled():
                future.set_result(result)

        self._threads.append(thread)
        return future

    def remove_reader(self, fd: Any) -> bool:
        """No descriptor is ever watched."""
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.errors.append(f"{context.get('message')}: {context.get('exception')!r}")

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    # -- being the running loop ------------------------------------------------------------------------------------

    def __enter__(self) -> SimLoop:
        events._set_running_loop(self)
        return self

    def __exit__(self, *_: object) -> None:
        events._set_running_loop(None)

    def keep(self) -> None:
        """A run was given up half way: its tasks must not be collected, which would run their ``finally`` clauses."""
        _KEPT.append((self, asyncio.all_tasks(self)))
