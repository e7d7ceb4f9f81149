"""CopyWorker: one thread for one direction of one device. It issues a plan, waits for it, reports, takes the next."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from kvsidecar import failpoints
from kvsidecar.device.base import CopyPlan, CopyStream, Device, DeviceEvent
from kvsidecar.errors import CopyFailed, DeviceLost
from kvsidecar.types import Direction

_PR_SET_NAME: Final = 15
_prctl = ctypes.CDLL(None).prctl


@dataclass(frozen=True, slots=True)
class CopyResult:
    """A copy that is over. Seconds are of the monotonic clock."""

    nbytes: int
    copy_seconds: float
    """From the first issue to the end of the last byte."""
    queue_seconds: float
    """Waited behind other copies."""


POLL_SECONDS = 50e-6
"""How often a copy's event is asked while nothing else can run. A copy of one block takes about as long."""


@dataclass(slots=True, eq=False)
class _Copy:
    plan: CopyPlan
    after: DeviceEvent | None
    on_start: Callable[[], None] | None
    future: Future[CopyResult] = field(default_factory=Future)
    submitted: float = field(default_factory=time.monotonic)


class CopyWorker:
    """Copies in the order of submission, one plan at a time. Every future it gives out is resolved, whatever happens.

    A future ends with its `CopyResult`, or with what the copy ended with: `CopyFailed` (the worker goes on) or
    `DeviceLost` (it does not). An exception that nobody expected ends the worker too: the running copy then fails with
    ``outcome_known=False``, because some of it may still be moving, and the queued ones with True, because nothing of
    them was started. A queued copy whose future is cancelled is never started; a running one cannot be cancelled.

    Args:
        device: copies go to and from its memory.
        direction: store or load.
        pool_address: what the plans' host offsets count from.
        on_failure: told once why this worker can copy no more, in its thread, after all futures are resolved.

    Raises:
        DeviceError: the stream cannot be opened.
    """

    def __init__(
        self,
        device: Device,
        direction: Direction,
        pool_address: int,
        *,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._device = device
        self._direction = direction
        self._pool_address = pool_address
        self._on_failure = on_failure
        self._changed = threading.Condition()
        # All below are guarded by _changed.
        self._queue: deque[_Copy] = deque()
        self._current: _Copy | None = None
        self._started = 0.0
        self._closing = False
        self._failure: BaseException | None = None

        opened: Future[None] = Future()
        name = f"{direction}-{device.uuid.removeprefix('GPU-')}"
        # A daemon thread: a driver call that never returns must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, args=(opened, name), name=name, daemon=True)
        self._thread.start()
        opened.result()

    @property
    def alive(self) -> bool:
        """Whether it takes copies."""
        return self._failure is None and not self._closing

    @property
    def failure(self) -> BaseException | None:
        """Why it can copy no more; None while it can, and after an ordinary `close`."""
        return self._failure

    @property
    def running(self) -> bool:
        """Whether a copy is in flight."""
        return self._current is not None

    @property
    def queued(self) -> int:
        """Copies that wait for their turn."""
        return len(self._queue)

    def oldest_inflight_seconds(self) -> float:
        """How long the copy in flight has been in flight; 0 if there is none. A stuck driver shows here."""
        with self._changed:
            return 0.0 if self._current is None else time.monotonic() - self._started

    def submit(
        self,
        plan: CopyPlan,
        *,
        after: DeviceEvent | None = None,
        on_start: Callable[[], None] | None = None,
    ) -> Future[CopyResult]:
        """Queue a plan.

        Args:
            after: the copy starts when this is over; copies behind it may overtake it meanwhile.
            on_start: called in the worker's thread just before the copy is issued; ``after`` is not needed any more.

        Raises:
            DeviceLost: the device can copy no more.
            CopyFailed: with ``outcome_known=True``: the worker has ended, by `close` or by an unexpected error.
        """
        copy = _Copy(plan, after, on_start)
        with self._changed:
            if self._failure is not None:
                raise self._refusal(self._failure)
            if self._closing:
                raise CopyFailed(f"the {self._direction} worker is closed", outcome_known=True)
            self._queue.append(copy)
            self._changed.notify_all()
        return copy.future

    def hurry(self, future: Future[CopyResult]) -> None:
        """Let a queued copy be the next one; nothing happens if it runs or is over."""
        with self._changed:
            for copy in self._queue:
                if copy.future is future:
                    self._queue.remove(copy)
                    self._queue.appendleft(copy)
                    return

    def close(self, timeout: float) -> bool:
        """Finish what is queued, close the stream and end the thread. May be called more than once.

        What is not finished after ``timeout`` seconds fails: the copy in flight with ``outcome_known=False``, the
        queued ones, which then never start, with True.

        Returns:
            Whether the thread has ended. If not, the device does not answer, and only the end of the process helps.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout)
        if not self._thread.is_alive():
            return True
        with self._changed:
            queue, self._queue = self._queue, deque()
            current = self._current
        text = f"the {self._direction} worker was closed and did not finish in {timeout:g} s"
        if current is not None:
            _fail(current, CopyFailed(text, outcome_known=False))
        for copy in queue:
            _fail(copy, CopyFailed(text, outcome_known=True))
        return False

    # -- in the worker's thread ------------------------------------------------------------------------------------

    def _run(self, opened: Future[None], name: str) -> None:
        _prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)  # what top and gdb show; Python sets its own name only
        try:
            stream = self._device.open_stream(self._direction)
        except BaseException as error:  # noqa: BLE001 - the constructor raises it
            opened.set_exception(error)
            return
        opened.set_result(None)
        try:
            self._serve(stream)
            stream.close()
        except BaseException as error:  # noqa: BLE001 - no thread ends unheard: every future and the owner get it
            self._fail_all(error)

    def _serve(self, stream: CopyStream) -> None:
        """Copy until closed and empty. Raises what the worker does not survive."""
        while (copy := self._next()) is not None:
            try:
                try:
                    failpoints.hit("copy.device_lost")
                except failpoints.FailpointError as error:
                    raise DeviceLost(str(error)) from error
                stream.issue(copy.plan, self._pool_address)
                failpoints.hit("store.in_flight" if self._direction is Direction.STORE else "load.in_flight")
                stream.wait()
            except CopyFailed as error:
                self._end()
                _fail(copy, error)
                continue
            now = time.monotonic()
            result = CopyResult(copy.plan.nbytes, now - self._started, self._started - copy.submitted)
            self._end()
            # The future may be resolved already: `close` gave up on it.
            with suppress(InvalidStateError):
                copy.future.set_result(result)

    def _next(self) -> _Copy | None:
        """The next copy, marked as in flight; None when there will be none."""
        with self._changed:
            while True:
                if (copy := self._take_startable()) is not None:
                    self._current = copy
                    self._started = time.monotonic()
                    break
                if self._closing and not self._queue:
                    return None
                # Those in the queue wait for their events, which nobody tells us about.
                self._changed.wait(POLL_SECONDS if self._queue else None)
        if copy.on_start is not None:
            copy.on_start()
        return copy

    def _take_startable(self) -> _Copy | None:
        """The first queued copy that may start; those that were cancelled, or can never start, are resolved."""
        for copy in tuple(self._queue):
            try:
                if copy.after is not None and not copy.future.cancelled() and not copy.after.over():
                    continue
            except CopyFailed as error:
                self._queue.remove(copy)
                if copy.future.set_running_or_notify_cancel():
                    _fail(copy, error)
                continue
            self._queue.remove(copy)
            if copy.future.set_running_or_notify_cancel():  # False: cancelled while it waited
                return copy
        return None

    def _end(self) -> None:
        """Nothing is in flight. Before the future is resolved: who hears of the end sees ``running`` False."""
        with self._changed:
            self._current = None

    def _fail_all(self, error: BaseException) -> None:
        with self._changed:
            self._failure = error
            current, self._current = self._current, None
            queue, self._queue = self._queue, deque()
        if current is not None:
            lost = isinstance(error, DeviceLost)
            _fail(current, error if lost else CopyFailed(self._ended_by(error), outcome_known=False), error)
        for copy in queue:
            _fail(copy, self._refusal(error), error)
        if self._on_failure is not None:
            self._on_failure(error)

    def _refusal(self, failure: BaseException) -> DeviceLost | CopyFailed:
        """What a copy gets that was never started. A new object each: a raised exception collects its tracebacks."""
        if isinstance(failure, DeviceLost):
            return DeviceLost(str(failure))
        return CopyFailed(self._ended_by(failure), outcome_known=True)

    def _ended_by(self, failure: BaseException) -> str:
        return f"the {self._direction} worker has ended: {type(failure).__name__}: {failure}"


def _fail(copy: _Copy, error: BaseException, cause: BaseException | None = None) -> None:
    if cause is not None and cause is not error:
        error.__cause__ = cause
    with suppress(InvalidStateError):  # resolved already, or cancelled while it waited
        copy.future.set_exception(error)
