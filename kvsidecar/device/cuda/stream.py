"""CUDA streams that copy, and the events around them.

Sources: CUDA Driver API, "Stream Management", "Event Management"; CUDA C++ Programming Guide, "Interprocess
Communication". No kernel is ever launched here: it would be time-sliced against the engine's.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

from cuda.bindings import driver

from kvsidecar.device.base import CopyCall, CopyMark, PreparedCall
from kvsidecar.device.cuda.calls import SUCCESS, CopyCalls, DriverCall
from kvsidecar.device.cuda.status import OK, STICKY, check, describe
from kvsidecar.errors import CopyFailed, DeviceLost
from kvsidecar.types import Direction


class Context(Protocol):
    """The part of a device that a stream needs."""

    uuid: str
    ordinal: int
    max_pitch: int

    def make_current(self) -> None: ...


class CudaEvent:
    """An engine's interprocess event. Implements `kvsidecar.device.base.DeviceEvent`.

    It is polled, never waited for with cuStreamWaitEvent: a wait for an event whose process has died never ends, and
    cuIpcCloseMemHandle then hangs in this process, for ever (``benchmarks/dead_event.py``, measured with driver 580).
    A poll costs about a microsecond and leaves nothing behind on the device.
    """

    def __init__(self, device: Context, event: Any) -> None:
        self._device = device
        self._event = event
        self._lock = threading.Lock()
        self._closed = False

    def is_done(self) -> bool:
        # A cancelled copy may still be in its worker's queue when its session closes the event.
        with self._lock:
            if self._closed:
                return True
            (status,) = driver.cuEventQuery(self._event)
        if status == driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        check((status,), "asking an engine's event", lambda text: CopyFailed(text))
        return True

    def close(self) -> None:
        self._device.make_current()
        with self._lock:
            self._closed = True
            driver.cuEventDestroy(self._event)


class _TimedEvent:
    """An event of a stream's own. The device records the time when it reaches the event."""

    __slots__ = ("event", "number", "users")

    def __init__(self, event: Any) -> None:
        self.event = event
        self.number = int(event)
        self.users = 0
        """Marks that still need it: the end of one call may be the start of the next."""


class CudaCopyStream:
    """One non-blocking stream. Implements `kvsidecar.device.base.CopyStream`; made in the thread that uses it.

    A store's copies are issued only when the compute that wrote its blocks is over (`CudaEvent`, or the client
    waited); `kvsidecar.device.cuda.calls` says when the driver may read.

    A timed event takes 1.3 us of the stream's time, in which it could copy 64 KiB (H200), and a driver call that
    releases the GIL takes longer than that if another thread wants it. So a call that follows another one uses the end
    event of that one as its start, and driver calls that cannot block keep the GIL.
    """

    def __init__(self, device: Context, direction: Direction) -> None:
        device.make_current()
        self._name = f"{direction} copy on {device.uuid}"
        self._calls = CopyCalls(
            _driver_function, store=direction is Direction.STORE, ordinal=device.ordinal, max_pitch=device.max_pitch
        )
        # Non-blocking: no implicit order with the legacy default stream.
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        self._stream = check(driver.cuStreamCreate(int(flags)), "creating a stream")
        self._number = int(self._stream)
        self._idle_events: list[_TimedEvent] = []
        self._last_end: _TimedEvent | None = None
        """The end event of the last call; None if that has none."""

    def prepare(self, call: CopyCall, pool_address: int) -> PreparedCall:
        return self._calls.prepare(call.copies, pool_address, batched=call.batched)

    def issue(self, prepared: PreparedCall, *, alone: bool = False, timed: bool = True) -> CopyMark:
        assert isinstance(prepared, DriverCall)
        last_end, self._last_end = self._last_end, None
        start = end = None
        try:
            if timed and last_end is not None and last_end.users and not self._calls.reached(last_end.number):
                start = last_end  # the device is still before it: this call begins when that one ends
                start.users += 1
            elif timed:
                start = self._event()
                self._record(start, may_block=False)
            if timed or not alone:
                end = self._event()
            status = self._calls.issue(prepared, self._number)
            if status != SUCCESS:
                self._refuse(driver.CUresult(status), f"issuing {prepared.count} copies")
            if end is not None:
                self._record(end, may_block=not alone)
        except CopyFailed as error:
            if error.outcome_known:
                self.release(start, end)
            raise
        self._last_end = end
        return CudaMark(self, start, end)

    def is_done(self) -> bool:
        (status,) = driver.cuStreamQuery(self._stream)
        if status != driver.CUresult.CUDA_ERROR_NOT_READY:
            self.check(status)
        return bool(status == OK)

    def ask(self, end: _TimedEvent | None) -> Any:
        """The driver's status of an event, or of the stream if there is none."""
        (status,) = driver.cuStreamQuery(self._stream) if end is None else driver.cuEventQuery(end.event)
        return status

    def check(self, status: Any) -> None:
        """Raise for the driver's status of a call in flight, unless the call is over."""
        if status != OK:
            text = f"{self._name}: {describe(status)}"
            raise DeviceLost(text) if status.name in STICKY else CopyFailed(text, outcome_known=False)

    def seconds_between(self, start: _TimedEvent, end: _TimedEvent) -> float:
        """The device's time for a call that is over."""
        # 0 if the driver does not say: the copy is right all the same, and a fault of the device shows at the next one.
        return self._calls.seconds_between(start.number, end.number) or 0.0

    def release(self, *events: _TimedEvent | None) -> None:
        """A mark no longer needs these events."""
        for event in events:
            if event is not None:
                event.users -= 1
                if not event.users:
                    self._idle_events.append(event)

    def close(self) -> None:
        for event in self._idle_events:
            driver.cuEventDestroy(event.event)
        driver.cuStreamDestroy(self._stream)

    def _event(self) -> _TimedEvent:
        """An event that no mark uses, for the caller."""
        event = self._idle_events.pop() if self._idle_events else self._new_event()
        event.users = 1
        return event

    def _record(self, event: _TimedEvent, *, may_block: bool) -> None:
        if may_block:
            (status,) = driver.cuEventRecord(event.event, self._stream)
        else:
            status = driver.CUresult(self._calls.record(event.number, self._number))
        if status != OK:
            self._refuse(status, "recording an event")

    def _new_event(self) -> _TimedEvent:
        # Without DISABLE_TIMING the device records the time.
        flags = driver.CUevent_flags.CU_EVENT_DEFAULT
        status, event = driver.cuEventCreate(int(flags))
        if status != OK:
            self._refuse(status, "creating an event")
        return _TimedEvent(event)

    def _refuse(self, status: Any, doing: str) -> None:
        """Raise for a call that failed while issuing; wait first for the copies that were started, if possible."""
        text = f"{self._name}, {doing}: {describe(status)}"
        if status.name in STICKY:
            raise DeviceLost(text)
        # Slots and blocks may be used again only when no byte can move any more, and it is unknown which copies of a
        # batch were started before the one that the driver refused.
        (drained,) = driver.cuStreamSynchronize(self._stream)
        if drained.name in STICKY:
            raise DeviceLost(f"{text}; then {describe(drained)}")
        raise CopyFailed(text, outcome_known=drained == OK)


class CudaMark:
    """The end of one call. Implements `kvsidecar.device.base.CopyMark`.

    Args:
        start: None for a call that is not timed.
        end: None: the call is the stream's last one until it is over, and the stream itself is polled.
    """

    __slots__ = ("_end", "_over", "_start", "_stream")

    def __init__(self, stream: CudaCopyStream, start: _TimedEvent | None, end: _TimedEvent | None) -> None:
        self._stream = stream
        self._start = start
        self._end = end
        self._over = False

    def is_done(self) -> bool:
        if self._over:
            return True
        status = self._stream.ask(self._end)
        return status != driver.CUresult.CUDA_ERROR_NOT_READY and self._ended(status)

    def seconds(self) -> float:
        assert self._start is not None
        assert self._end is not None
        seconds = self._stream.seconds_between(self._start, self._end)
        self._stream.release(self._start, self._end)
        return seconds

    def _ended(self, status: Any) -> bool:
        self._over = True
        self._stream.check(status)
        return True


def _driver_function(name: str, version: int) -> int:
    """Address of a driver function with the signature of this CUDA version; 0 if this driver has none."""
    status, address, _ = driver.cuGetProcAddress(name.encode(), version, 0)
    return int(address) if status == OK and address is not None else 0
