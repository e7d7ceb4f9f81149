"""CopyWorker: one thread for one direction of one device. It keeps the link busy: the next calls are issued while
earlier ones run, those of the next plan too."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final

from kvsidecar.copier.quiesce import after_quiescing, can_quiesce, quiesce
from kvsidecar.device.base import CopyCall, CopyMark, CopyPlan, CopyStream, Device, DeviceEvent, PreparedCall
from kvsidecar.errors import CopyFailed, DeviceLost
from kvsidecar.support import failpoints
from kvsidecar.support.cpu_sleep import NO_GUARD, SleepGuard
from kvsidecar.types import Direction

_PR_SET_NAME: Final = 15
_PR_SET_TIMERSLACK: Final = 29
_prctl = ctypes.CDLL(None).prctl


@dataclass(frozen=True, slots=True)
class CopyResult:
    """A copy that is over. Seconds are of the monotonic clock."""

    nbytes: int
    copy_seconds: float
    """Time in which the device moved its bytes, measured by the device itself: no planning, and no gap between calls.
    In a paced copy every `TIMED_CALLS`-th call is measured; the others count as equally fast."""
    queue_seconds: float
    """The rest of the time since it was submitted."""
    ended: float


POLL_SECONDS: Final = 50e-6
"""How often the event before a copy is asked while nothing else can run. A copy of one block takes about as long."""
AHEAD_BYTES: Final = 64 << 20
"""The most bytes in flight: more than a millisecond of copying, so that the link does not wait for this thread; not
much more, because an issued call cannot be cancelled or overtaken."""
SPIN_SECONDS: Final = 300e-6
"""The worker stops sleeping and starts to spin this long before a copy is expected to end: a sleeping thread wakes up
to 200 µs late where its core has gone into a deep sleep too (measured)."""
FIRST_RATE: Final = 100e9
"""Bytes per second, before anything was measured: more than any link, so that the worker does not sleep too long."""
RATE_SAMPLE_BYTES: Final = 16 << 20
"""Smaller calls say more about latency than about the rate."""
TIMED_CALLS: Final = 8
"""One in this many calls of a paced copy is timed: the two events around it take 5 us, a call of 2 MiB takes 45."""
RATE_DECAY: Final = 0.95
"""The best rate seen counts, and decays slowly: a late look makes a sample too low, never too high."""


@dataclass(slots=True, eq=False)
class _Copy:
    plan: CopyPlan
    after: DeviceEvent | None
    on_start: Callable[[], None] | None
    future: Future[CopyResult] = field(default_factory=Future)
    submitted: float = field(default_factory=time.monotonic)
    started: float = 0.0
    failed: bool = False
    calls: int = 0
    """Issued."""
    timed: list[tuple[CopyMark, int]] = field(default_factory=list)
    """Calls that are done and that the device timed, and their bytes."""
    slept: bool = False
    """This thread has slept while the copy ran, so other threads may be asleep too."""


@dataclass(slots=True, eq=False)
class _Flight:
    """One call in flight; without a mark, the end of its copy."""

    copy: _Copy
    mark: CopyMark | None
    nbytes: int
    issued: float
    timed: bool = False


class CopyWorker:
    """Copies in the order of submission. Every future it gives out is resolved, whatever happens.

    A future ends with its `CopyResult`, or with an error: `CopyFailed` (the worker goes on) or `DeviceLost` (it does
    not). An unexpected exception ends the worker too. Of copies that were started, ``outcome_known`` is True if the
    device soon confirms (see `quiesce`) that all its work is over; of queued ones it always is. A queued copy whose
    future is cancelled is never started; a running one cannot be cancelled.

    Args:
        pool_address: where the plans' host offsets begin.
        chunk: called in the worker's thread: the most bytes that may be in flight while an engine's own copies in this
            direction must pass, None while the whole link may be used.
        guard: keeps the loop awake from some 300 us before a longer copy is expected to end, for the thread that waits
            for it; and this thread for a while after a copy, so that it starts the next one at once.
        on_failure: called once with the error that ends this worker, in its thread, after all futures are resolved.

    Raises:
        DeviceError: the stream cannot be opened.
    """

    def __init__(
        self,
        device: Device,
        direction: Direction,
        pool_address: int,
        *,
        chunk: Callable[[], int | None] = lambda: None,
        guard: SleepGuard = NO_GUARD,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._device = device
        self._direction = direction
        self._pool_address = pool_address
        self._chunk = chunk
        self._guard = guard
        self._on_failure = on_failure
        # Only the worker's thread uses these.
        self._calls: deque[CopyCall] = deque()
        """Calls of `_issuing` that are planned and not issued."""
        self._issuing: _Copy | None = None
        self._ready: tuple[int, PreparedCall] | None = None
        """The next call of `_issuing`: its bytes, and its prepared form."""
        self._flights: deque[_Flight] = deque()
        self._ahead = 0
        """Bytes of the calls in flight."""
        self._last_call_end = 0.0
        self._last_copy_end = 0.0
        self._rate = FIRST_RATE

        self._changed = threading.Condition()
        # All below are guarded by _changed.
        self._queue: deque[_Copy] = deque()
        self._running: deque[_Copy] = deque()
        """Started and not resolved."""
        self._closing = False
        self._failure: BaseException | None = None
        """The error that has ended it."""

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
    def running(self) -> bool:
        """Whether a copy has been started and is not over."""
        return bool(self._running)

    @property
    def queued(self) -> int:
        """Copies that wait for their turn."""
        return len(self._queue)

    def oldest_inflight_seconds(self) -> float:
        """For how long the oldest running copy has made no progress; 0 if there is none. A stuck driver shows here."""
        with self._changed:
            if not self._running:
                return 0.0
            return time.monotonic() - max(self._running[0].started, self._last_call_end)

    def submit(
        self,
        plan: CopyPlan,
        *,
        after: DeviceEvent | None = None,
        on_start: Callable[[], None] | None = None,
    ) -> Future[CopyResult]:
        """Queue a plan.

        Args:
            after: the copy starts when this event is done; copies behind it may overtake it meanwhile.
            on_start: called in the worker's thread just before the copy is issued: ``after`` is not needed any more.

        Raises:
            DeviceLost: the device is lost.
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

    def prioritize(self, future: Future[CopyResult]) -> None:
        """Make a queued copy the next one; does nothing if it runs or is over."""
        with self._changed:
            for copy in self._queue:
                if copy.future is future:
                    self._queue.remove(copy)
                    self._queue.appendleft(copy)
                    return

    def close(self, timeout: float) -> bool:
        """Finish the queued copies, close the stream and end the thread. May be called more than once.

        Copies that are not over after ``timeout`` seconds fail: running ones with ``outcome_known=False``, queued
        ones, which then never start, with True.

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
            running = tuple(self._running)
        text = f"the {self._direction} worker was closed and did not finish in {timeout:g} s"
        for copy in running:
            _fail(copy, CopyFailed(text, outcome_known=False))
        for copy in queue:
            _fail(copy, CopyFailed(text, outcome_known=True))
        return False

    # -- in the worker's thread ------------------------------------------------------------------------------------
    #
    # One copy at a time is `_issuing`. Its plan is taken slice by slice into `_calls`. The first of these is prepared
    # and then `_ready`, while earlier calls run, so that the link never waits for planning. An issued call is a flight.
    # When the plan is used up, a flight without a mark follows: the end of the copy. The next copy is issued behind it.
    # Flights end in order; the end of a copy resolves its future.

    def _run(self, opened: Future[None], name: str) -> None:
        _prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)  # what top and gdb show; Python sets its own name only
        _prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)  # ns; the default of 50 µs is as long as a copy of one block
        try:
            stream = self._device.open_stream(self._direction)
        except BaseException as error:  # noqa: BLE001 - the constructor raises it
            opened.set_exception(error)
            return
        opened.set_result(None)
        try:
            self._serve(stream)
            quiesce(stream)
            stream.close()
        except BaseException as error:  # noqa: BLE001 - no thread ends unheard: every future and the owner get it
            self._fail_all(error, outcome_known=not isinstance(error, DeviceLost) and can_quiesce(stream))

    def _serve(self, stream: CopyStream) -> None:
        """Copy until closed and empty. Raises the errors that end the worker."""
        while True:
            chunk = self._chunk()
            # Filled before it may be issued, so that nothing is planned while the link is idle.
            filled = self._fill(stream, chunk)
            if filled and (self._ahead < AHEAD_BYTES if chunk is None else not self._ahead):
                self._issue(stream, alone=chunk is not None)
                if chunk is None:
                    self._retire(stream)
            elif self._flights:
                self._wait(stream, paced=chunk is not None)
                self._retire(stream)
            elif not filled:
                return

    def _fill(self, stream: CopyStream, chunk: int | None) -> bool:
        """Prepare the next call: of the copy that is being issued, or of the next copy once the end of that one is in
        flight. False if there is none: now, while calls are in flight; ever again, if not."""
        while self._ready is None:
            if self._calls:
                call = self._calls.popleft()
                self._ready = call.nbytes, stream.prepare(call, self._pool_address)
            elif self._issuing is None:
                self._issuing = self._next(wait=not self._flights)
                if self._issuing is None:
                    return False
            elif calls := self._issuing.plan.take(chunk):
                self._calls.extend(calls)
            else:
                failpoints.hit("store.in_flight" if self._direction is Direction.STORE else "load.in_flight")
                self._flights.append(_Flight(self._issuing, None, 0, 0.0))
                self._issuing = None
                self._retire(stream)
        return True

    def _issue(self, stream: CopyStream, *, alone: bool) -> None:
        assert self._ready is not None
        assert self._issuing is not None
        nbytes, prepared = self._ready
        self._ready = None
        copy = self._issuing
        timed = not alone or copy.calls % TIMED_CALLS == 0
        copy.calls += 1
        try:
            mark = stream.issue(prepared, alone=alone, timed=timed)
        except CopyFailed as error:
            # The rest of this copy is not issued. Its calls in flight stay in line, but nothing is reported for them:
            # the error says whether they may still move bytes, and if they may, its slots are never used again.
            self._calls.clear()
            self._issuing = None
            copy.failed = True
            error = after_quiescing(stream, error)
            self._end(copy)
            _fail(copy, error)
            return
        self._flights.append(_Flight(copy, mark, nbytes, time.monotonic(), timed))
        self._ahead += nbytes

    def _retire(self, stream: CopyStream) -> None:
        """Take away the flights that are over, and report the copies that have ended."""
        while self._flights:
            flight = self._flights[0]
            try:
                if flight.mark is not None and not flight.mark.is_done():
                    return
            except CopyFailed as error:
                self._fail_flights(stream, error)
                return
            self._flights.popleft()
            now = time.monotonic()
            if flight.mark is not None:
                self._ahead -= flight.nbytes
                if flight.nbytes >= RATE_SAMPLE_BYTES:
                    seconds = max(1e-6, now - max(self._last_call_end, flight.issued))
                    self._rate = max(RATE_DECAY * self._rate, flight.nbytes / seconds)
                self._last_call_end = now
                if flight.timed:
                    flight.copy.timed.append((flight.mark, flight.nbytes))
            elif not flight.copy.failed:
                self._report(flight.copy, now)

    def _report(self, copy: _Copy, now: float) -> None:
        # Not between two calls of a paced store, where the link would idle meanwhile.
        copying = sum([mark.seconds() for mark, _ in copy.timed])
        if len(copy.timed) != copy.calls:
            copying *= copy.plan.nbytes / sum([nbytes for _, nbytes in copy.timed])
        self._last_copy_end = now
        self._end(copy)
        # The future may be resolved already: `close` gave up on it.
        with suppress(InvalidStateError):
            waited = max(0.0, now - copy.submitted - copying)
            copy.future.set_result(CopyResult(copy.plan.nbytes, copying, waited, now))

    def _wait(self, stream: CopyStream, *, paced: bool) -> None:
        """Wait until the oldest call in flight may be done, or a copy is submitted.

        Long before the end of the oldest copy this thread sleeps, and a submission wakes it. Near the end, and between
        the short calls of a paced copy, it spins: a sleeping thread would be late (`SPIN_SECONDS`).
        """
        sleep = 0.0 if paced else self._first_end() - SPIN_SECONDS - time.monotonic()
        if sleep > 0:
            self._sleep(sleep)
        else:
            self._spin(stream)

    def _first_end(self) -> float:
        """When the oldest copy is expected to end; or all that is in flight, if the end of that copy is not issued
        yet. Monotonic seconds."""
        calls = takewhile(lambda flight: flight.mark is not None, self._flights)
        nbytes = sum([flight.nbytes for flight in calls])
        return max(self._last_call_end, self._flights[0].issued) + nbytes / self._rate

    def _sleep(self, seconds: float) -> None:
        self._flights[0].copy.slept = True
        with self._changed:
            # A copy that is queued although there is room waits for its event, which does not wake this thread.
            waits_for_event = self._queue and self._ahead < AHEAD_BYTES
            self._changed.wait(min(seconds, POLL_SECONDS) if waits_for_event else seconds)

    def _spin(self, stream: CopyStream) -> None:
        flight = self._flights[0]
        assert flight.mark is not None
        if flight.copy.slept and any(each.mark is None for each in self._flights):
            flight.copy.slept = False
            self._guard.keep_awake_from_thread()
        try:
            flight.mark.wait()
        except CopyFailed as error:
            self._fail_flights(stream, error)

    def _fail_flights(self, stream: CopyStream, error: CopyFailed) -> None:
        """Fail all copies in flight: an asynchronous error does not say which copy caused it."""
        error = after_quiescing(stream, error)
        copies = dict.fromkeys(flight.copy for flight in self._flights)
        self._flights.clear()
        self._ahead = 0
        if self._issuing is not None:
            copies[self._issuing] = None
            self._calls.clear()
            self._issuing = self._ready = None
        for copy in copies:
            if not copy.failed:
                self._end(copy)
                _fail(copy, CopyFailed(str(error), outcome_known=error.outcome_known))

    def _next(self, *, wait: bool) -> _Copy | None:
        """The next copy, marked as running. None if none can start now, or with ``wait``, if none ever will."""
        with self._changed:
            while (copy := self._take_startable()) is None:
                if not wait or (self._closing and not self._queue):
                    return None
                if self._queue:  # their events must be polled
                    self._changed.wait(POLL_SECONDS)
                else:
                    self._changed.wait(self._guard.longest_wait(self._last_copy_end))
            copy.started = time.monotonic()
            self._running.append(copy)
        try:
            failpoints.hit("copy.device_lost")
        except failpoints.FailpointError as error:
            raise DeviceLost(str(error)) from error
        if copy.on_start is not None:
            copy.on_start()
        return copy

    def _take_startable(self) -> _Copy | None:
        """The first queued copy that may start. Copies that were cancelled, or cannot start, are resolved."""
        for copy in tuple(self._queue):
            try:
                if copy.after is not None and not copy.future.cancelled() and not copy.after.is_done():
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

    def _end(self, copy: _Copy) -> None:
        """Called before the copy's future is resolved, so that its callbacks see ``running`` False."""
        with self._changed:
            self._running.remove(copy)

    def _fail_all(self, error: BaseException, *, outcome_known: bool) -> None:
        """End the worker. ``outcome_known`` is that of the copies that were started."""
        with self._changed:
            self._failure = error
            running, self._running = self._running, deque()
            queue, self._queue = self._queue, deque()
        for copy in running:
            _fail(copy, self._refusal(error, outcome_known=outcome_known), error)
        for copy in queue:
            _fail(copy, self._refusal(error), error)
        if self._on_failure is not None:
            self._on_failure(error)

    def _refusal(self, failure: BaseException, *, outcome_known: bool = True) -> DeviceLost | CopyFailed:
        """The error of one copy; a new object each, because a raised exception collects its tracebacks."""
        if isinstance(failure, DeviceLost):
            return DeviceLost(str(failure), outcome_known=outcome_known)
        text = f"the {self._direction} worker has ended: {type(failure).__name__}: {failure}"
        return CopyFailed(text, outcome_known=outcome_known)


def _fail(copy: _Copy, error: BaseException, cause: BaseException | None = None) -> None:
    if cause is not None and cause is not error:
        error.__cause__ = cause
    with suppress(InvalidStateError):  # resolved already, or cancelled while it waited
        copy.future.set_exception(error)
