"""The copies of one direction of one GPU: issued in order, so that the link stays busy. Never waits: `CopyLoop` of
`kvsidecar.copier.process` drives it.

A copy is planned slice by slice, and between two slices another session may have its turn (`turns`). The calls of a
slice, and those of the next copy, are issued while earlier ones run, up to `AHEAD_BYTES` and `AHEAD_SECONDS` in flight.
A paced direction has one call in flight, so that an engine's own copies pass between two.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kvsidecar.copier.fair_copies import FairCopies
from kvsidecar.copier.messages import Checks
from kvsidecar.copier.quiesce import after_quiescing
from kvsidecar.device.base import CopyCall, CopyMark, CopyPlan, CopyStream, DeviceEvent, PreparedCall
from kvsidecar.errors import CopyFailed, DeviceLost
from kvsidecar.support import failpoints
from kvsidecar.support.fence import FenceLane
from kvsidecar.types import Direction

POLL_SECONDS: Final = 50e-6
"""How often the event before a copy is asked while nothing else can run. A copy of one block takes about as long."""
AHEAD_BYTES: Final = 64 << 20
"""The most bytes in flight: more than a millisecond of copying, so that the link does not wait for the loop; not much
more, because an issued call cannot be cancelled or overtaken."""
SPIN_SECONDS: Final = 300e-6
"""The loop stops sleeping and starts to spin this long before a copy is expected to end: a sleeping thread wakes up to
200 us late where its core has gone into a deep sleep too (measured)."""
FIRST_RATE: Final = 100e9
"""Bytes per second, before anything was measured: more than any link, so that the loop does not sleep too long."""
RATE_SAMPLE_BYTES: Final = 16 << 20
"""Smaller calls say more about latency than about the rate."""
TIMED_CALLS: Final = 8
"""One in this many calls of a paced copy is timed: the two events around it take 5 us, a call of 2 MiB takes 45."""
AHEAD_SECONDS: Final = 1.25e-3
"""The most that is in flight on a slow link, in seconds of copying: what another session waits for before its turn."""
RATE_DECAY: Final = 0.95
"""The best rate seen counts, and decays slowly: a late look makes a sample too low, never too high."""


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
    """When it was seen to be over."""


@dataclass(slots=True, eq=False)
class QueuedCopy:
    """A copy, from its submission to its end.

    Args:
        number: names it in `CopyQueue.cancel` and `CopyQueue.prioritize`.
        after: the copy starts when this event is done; copies behind it may overtake it meanwhile.
        on_start: called just before the copy is issued: ``after`` is not needed any more.
        checks: not used here.
        lane: its session's lane of the fence; None for a session without one.
        session: sessions take turns.
        weight: a session of weight 2 gets twice as many bytes in its turns as one of weight 1.
    """

    number: int
    plan: CopyPlan
    after: DeviceEvent | None = None
    on_start: Callable[[], None] | None = None
    checks: Checks | None = None
    lane: FenceLane | None = None
    session: int = 0
    weight: int = 1
    submitted: float = field(default_factory=time.monotonic)
    failed: bool = False
    planned_bytes: int = 0
    """Bytes of the slices that were taken from its plan."""
    calls: int = 0
    """Number of issued calls."""
    timed: list[tuple[CopyMark, int]] = field(default_factory=list)
    """Finished calls that the device timed, and their bytes."""


@dataclass(slots=True, eq=False)
class _Flight:
    """One call in flight, which has entered the copy's lane; without a mark, the end of a copy that has not failed."""

    copy: QueuedCopy
    mark: CopyMark | None
    nbytes: int
    issued: float
    timed: bool = False


class CopyQueue:
    """Copies in the order of submission, sessions in turns. Used by one thread, which calls `step` again and again.

    One copy at a time is `_issuing`; at another session's turn it is put back. Its plan is taken slice by slice into
    `_calls`. The first of these is prepared and then `_ready`, while earlier calls run. An issued call is a flight.
    When the plan is used up, a flight without a mark follows: the end of the copy. The next copy is issued behind it.
    Flights end in order; the end of a copy is reported.

    Args:
        pool_address: where the plans' host offsets begin.
        on_end: called once for each copy that was not cancelled, with its result or its error. Either way the copy
            cannot move a byte any more.
    """

    def __init__(
        self,
        stream: CopyStream,
        direction: Direction,
        pool_address: int,
        on_end: Callable[[QueuedCopy, CopyResult | CopyFailed], None],
    ) -> None:
        self._stream, self._pool_address, self._on_end = stream, pool_address, on_end
        self._direction = direction
        self._failpoint = f"{direction}.in_flight"
        self.pace: int | None = None
        """The most bytes that may be in flight while an engine's own copies in this direction must pass; None while the
        whole link may be used."""
        self._queue: FairCopies[QueuedCopy] = FairCopies()
        self._issuing: QueuedCopy | None = None
        self._had_slice = False
        """`_issuing` has been given a slice since it was taken from the queue."""
        self._calls: deque[CopyCall] = deque()
        """Calls of `_issuing` that are planned and not prepared."""
        self._ready: tuple[int, PreparedCall] | None = None
        """The next call of `_issuing`, prepared, and its bytes."""
        self._flights: deque[_Flight] = deque()
        self._ahead = 0
        """Bytes of the calls in flight."""
        self._alone = False
        """The last call was issued ``alone``: no other is issued before it is over."""
        self._last_call_end = 0.0
        self._rate = FIRST_RATE

    def submit(self, copy: QueuedCopy) -> None:
        self._queue.add(copy)

    def cancel(self, number: int) -> bool:
        """Forget a queued copy. False: it has started, or is over."""
        self._put_back()
        copy = self._queue.find(number)
        if copy is None or copy.calls:
            return False
        self._queue.remove(copy)
        return True

    def prioritize(self, number: int) -> None:
        """Make a queued copy the next one of its session; does nothing if it has started or is over."""
        self._put_back()
        if (copy := self._queue.find(number)) is not None:
            self._queue.prioritize(copy)

    def _put_back(self) -> None:
        """Let the copy whose first call is prepared, and not issued, be the first one that is queued."""
        copy = self._issuing
        if copy is not None and not copy.calls:
            copy.plan.rewind()
            self._queue.charge(copy, -copy.planned_bytes)
            copy.planned_bytes = 0
            self._queue.put_back(copy)
            self._calls.clear()
            self._issuing = self._ready = None

    def step(self) -> bool:
        """Issue one call, if one may be issued now, and report the copies that have ended. Returns whether the next
        step may have something to do at once.

        Raises:
            CopyFailed, DeviceLost: the copies that were started may still move bytes, and only the end of the process
                ends them. The same holds for any other exception.
        """
        # The next call is prepared before it may be issued, so that the link never waits for planning.
        filled = self._fill()
        alone = self._alone or self.pace is not None
        issued = filled and (not self._ahead if alone else self._has_room)
        if issued:
            self._issue()
        return self._retire() or issued

    def wait(self) -> float | None:
        """How long `step` will have nothing to do, in seconds; None: until the next submission.

        0 near the end of a copy, and while a short call of a paced copy runs: a sleeping thread would be late
        (`SPIN_SECONDS`)."""
        if self._flights:
            if self.pace is not None:
                return 0.0
            seconds = max(0.0, self._first_end() - SPIN_SECONDS - time.monotonic())
            # A copy that is queued although there is room waits for its event, which does not wake this thread.
            return min(seconds, POLL_SECONDS) if self._queue and self._has_room else seconds
        return POLL_SECONDS if self._queue else None

    @property
    def _has_room(self) -> bool:
        return self._ahead < min(AHEAD_BYTES, AHEAD_SECONDS * self._rate)

    @property
    def in_flight_since(self) -> float:
        """Monotonic time since which no call in flight has ended; 0 if none is in flight."""
        return max(self._last_call_end, self._flights[0].issued) if self._flights else 0.0

    @property
    def end_in_flight(self) -> bool:
        """Whether a copy has nothing left to issue, and is not over."""
        return any(flight.mark is None for flight in self._flights)

    def _fill(self) -> bool:
        """Prepare the next call: of the copy that is being issued, or of the next copy once the end of that one is in
        flight. False if there is none now."""
        while self._ready is None:
            if self._calls:
                call = self._calls.popleft()
                self._ready = call.nbytes, self._stream.prepare(call, self._pool_address)
            elif self._issuing is None:
                self._issuing, self._had_slice = self._next(), False
                if self._issuing is None:
                    return False
            elif self._had_slice and self._queue.others_first(self._issuing.session):
                self._queue.put_back(self._issuing)
                self._issuing = None
            elif calls := self._issuing.plan.take(self.pace):
                self._calls.extend(calls)
                self._had_slice = True
                nbytes = sum([call.nbytes for call in calls])
                self._issuing.planned_bytes += nbytes
                self._queue.charge(self._issuing, nbytes)
            else:
                if failpoints.is_set(self._failpoint) and self._enter(self._issuing):
                    # In line as a call that nothing is issued behind, so that this thread goes on meanwhile.
                    self._flights.append(
                        _Flight(self._issuing, _HeldMark(self._direction), AHEAD_BYTES, time.monotonic())
                    )
                    self._ahead += AHEAD_BYTES
                if self._issuing is not None:
                    self._flights.append(_Flight(self._issuing, None, 0, 0.0))
                    self._issuing = None
                self._retire()
        return True

    def _next(self) -> QueuedCopy | None:
        """Take the first queued copy that may start. A copy whose event cannot be polled is reported."""
        for copy in self._queue:
            try:
                if copy.after is not None and not copy.after.is_done():
                    continue
            except CopyFailed as error:
                self._queue.remove(copy)
                self._on_end(copy, error)
                continue
            self._queue.remove(copy)
            if copy.planned_bytes:
                return copy
            try:
                failpoints.hit("copy.device_lost")
            except failpoints.FailpointError as error:
                raise DeviceLost(str(error)) from error
            if copy.on_start is not None:
                copy.on_start()
            copy.after = copy.on_start = None
            return copy
        return None

    def _issue(self) -> None:
        assert self._ready is not None
        assert self._issuing is not None
        nbytes, prepared = self._ready
        self._ready = None
        copy = self._issuing
        if not self._enter(copy):
            return
        self._alone = self.pace is not None
        timed = not self._alone or copy.calls % TIMED_CALLS == 0
        copy.calls += 1
        try:
            mark = self._stream.issue(prepared, alone=self._alone, timed=timed)
        except CopyFailed as error:
            self._fail_issuing(copy, error)
            _leave(copy)
            return
        self._flights.append(_Flight(copy, mark, nbytes, time.monotonic(), timed))
        self._ahead += nbytes

    def _enter(self, copy: QueuedCopy) -> bool:
        """Begin a call of the copy that is being issued. False: its engine has shut the fence, and the copy has
        failed."""
        if copy.lane is None or copy.lane.enter():
            return True
        self._fail_issuing(copy, CopyFailed("the engine has shut its fence", outcome_known=not copy.calls))
        return False

    def _fail_issuing(self, copy: QueuedCopy, error: CopyFailed) -> None:
        """Do not issue the rest of this copy. Its calls in flight, which move nothing any more, stay in line, but
        nothing is reported for them."""
        self._calls.clear()
        self._issuing = None
        copy.failed = True
        self._on_end(copy, after_quiescing(self._stream, error))

    def _retire(self) -> bool:
        """Take away the flights that are over, and report the copies that have ended. Returns whether any was over."""
        some = False
        while self._flights:
            flight = self._flights[0]
            if flight.mark is not None:
                try:
                    if not flight.mark.is_done():
                        return some
                except CopyFailed as error:
                    self._fail_flights(error)
                    return True
            self._flights.popleft()
            some = True
            now = time.monotonic()
            if flight.mark is not None:
                self._ahead -= flight.nbytes
                _leave(flight.copy)
                if flight.nbytes >= RATE_SAMPLE_BYTES:
                    seconds = max(1e-6, now - max(self._last_call_end, flight.issued))
                    self._rate = max(RATE_DECAY * self._rate, flight.nbytes / seconds)
                self._last_call_end = now
                if flight.timed:
                    flight.copy.timed.append((flight.mark, flight.nbytes))
            else:
                self._report(flight.copy, now)
        return some

    def _report(self, copy: QueuedCopy, now: float) -> None:
        # Not between two calls of a paced store, where the link would idle meanwhile.
        copying = sum([mark.seconds() for mark, _ in copy.timed])
        if len(copy.timed) != copy.calls:
            copying *= copy.plan.nbytes / sum([nbytes for _, nbytes in copy.timed])
        waited = max(0.0, now - copy.submitted - copying)
        self._on_end(copy, CopyResult(copy.plan.nbytes, copying, waited, now))

    def _first_end(self) -> float:
        """When the oldest copy is expected to end; or all that is in flight, if the end of that copy is not in flight
        yet. Monotonic seconds."""
        nbytes = 0
        for flight in self._flights:
            if flight.mark is None:
                break
            nbytes += flight.nbytes
        return max(self._last_call_end, self._flights[0].issued) + nbytes / self._rate

    def _fail_flights(self, error: CopyFailed) -> None:
        """Fail all copies in flight: an asynchronous error does not say which copy caused it."""
        error = after_quiescing(self._stream, error)
        for flight in self._flights:
            if flight.mark is not None:
                _leave(flight.copy)
        copies = dict.fromkeys(flight.copy for flight in self._flights)
        self._flights.clear()
        self._ahead = 0
        if self._issuing is not None:
            copies[self._issuing] = None
            self._calls.clear()
            self._issuing = self._ready = None
        for copy in self._queue:
            if copy in copies:
                self._queue.remove(copy)
        for copy in copies:
            if not copy.failed:
                self._on_end(copy, CopyFailed(str(error)))


def _leave(copy: QueuedCopy) -> None:
    if copy.lane is not None:
        copy.lane.leave()


class _HeldMark:
    """Keeps a copy in flight, in the place of a slow or failing device, for as long as a failpoint takes. Implements
    `kvsidecar.device.base.CopyMark`."""

    def __init__(self, direction: Direction) -> None:
        self._direction = direction
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._pass, name=f"{direction}-held", daemon=True)
        self._thread.start()

    def _pass(self) -> None:
        try:
            failpoints.hit("store.in_flight" if self._direction is Direction.STORE else "load.in_flight")
        except BaseException as error:  # noqa: BLE001 - raised where the copy is looked at
            self._error = error

    def is_done(self) -> bool:
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True

    def seconds(self) -> float:
        return 0.0
