"""CUDA streams that copy, and the events around them.

Sources: CUDA Driver API, "Stream Management", "Event Management"; CUDA C++ Programming Guide, "Interprocess
Communication". No kernel is ever launched here: it would be time-sliced against the engine's.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

from cuda.bindings import driver

from kvsidecar.device.base import CopyCall, CopyMark, PreparedCall
from kvsidecar.device.cuda_status import OK, STICKY, check, describe
from kvsidecar.device.driver_calls import SUCCESS, CopyCalls, DriverCall
from kvsidecar.errors import CopyFailed, DeviceLost
from kvsidecar.types import Direction


class Context(Protocol):
    """What a stream needs of its device."""

    @property
    def uuid(self) -> str: ...

    @property
    def ordinal(self) -> int: ...

    @property
    def max_pitch(self) -> int: ...

    def make_current(self) -> None: ...


class CudaEvent:
    """An engine's interprocess event. Implements `kvsidecar.device.base.DeviceEvent`.

    It is asked, never waited for with cuStreamWaitEvent: a wait for an event whose process has died never ends, and
    cuIpcCloseMemHandle then hangs in this process, for ever (``benchmarks/dead_event.py``, measured with driver 580).
    A question costs about a microsecond and leaves nothing behind on the device.
    """

    def __init__(self, device: Context, event: Any) -> None:
        self._device = device
        self._event = event
        self._lock = threading.Lock()
        self._closed = False

    def over(self) -> bool:
        # A copy that was cancelled may still lie in its worker's queue when its session closes the event.
        with self._lock:
            if self._closed:
                return True
            (status,) = driver.cuEventQuery(self._event)
        if status == driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        check((status,), "asking an engine's event", lambda text: CopyFailed(text, outcome_known=True))
        return True

    def close(self) -> None:
        self._device.make_current()
        with self._lock:
            self._closed = True
            driver.cuEventDestroy(self._event)


class CudaCopyStream:
    """One non-blocking stream. Implements `kvsidecar.device.base.CopyStream`; made in the thread that uses it.

    A store's copies are issued only when the compute that wrote its blocks is over (`CudaEvent`, or the client
    waited); what the driver may read when is told in `kvsidecar.device.driver_calls`.
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
        self._idle_events: list[tuple[Any, Any]] = []
        """Pairs: before a call and after it."""

    def prepare(self, call: CopyCall, pool_address: int) -> PreparedCall:
        return self._calls.prepare(call.copies, pool_address, batched=call.batched)

    def issue(self, prepared: PreparedCall, *, alone: bool = False) -> CopyMark:
        assert isinstance(prepared, DriverCall)
        events = self._idle_events.pop() if self._idle_events else (self._new_event(), self._new_event())
        try:
            self._record(events[0], alone=alone)
            status = self._calls.issue(prepared, self._number)
            if status != SUCCESS:
                self._refuse(driver.CUresult(status), f"issuing {prepared.count} copies")
            self._record(events[1], alone=alone)
        except CopyFailed as error:
            if error.outcome_known:
                self._idle_events.append(events)
            raise
        return CudaMark(self, events)

    def over(self) -> bool:
        (status,) = driver.cuStreamQuery(self._stream)
        if status != driver.CUresult.CUDA_ERROR_NOT_READY:
            self.check(status)
        return bool(status == OK)

    def check(self, status: Any) -> None:
        """Raise for what the driver says of a call in flight, unless it is over."""
        if status != OK:
            text = f"{self._name}: {describe(status)}"
            raise DeviceLost(text) if status.name in STICKY else CopyFailed(text, outcome_known=False)

    def seconds_between(self, events: tuple[Any, Any]) -> float:
        """What the device took for a call that is over. Its events may be used again."""
        self._idle_events.append(events)
        # A driver that does not say: the copy is right all the same, and what ails the device shows at the next one.
        return self._calls.seconds_between(*map(int, events)) or 0.0

    def close(self) -> None:
        for events in self._idle_events:
            for event in events:
                driver.cuEventDestroy(event)
        driver.cuStreamDestroy(self._stream)

    def _record(self, event: Any, *, alone: bool) -> None:
        if alone:
            status = driver.CUresult(self._calls.record(int(event), self._number))
        else:
            (status,) = driver.cuEventRecord(event, self._stream)
        if status != OK:
            self._refuse(status, "recording an event")

    def _new_event(self) -> Any:
        # Without BLOCKING_SYNC a wait spins, which answers tens of microseconds sooner than an interrupt: the worker
        # sleeps until just before the end, and waits for that. Without DISABLE_TIMING the device notes the time.
        flags = driver.CUevent_flags.CU_EVENT_DEFAULT
        status, event = driver.cuEventCreate(int(flags))
        if status != OK:
            self._refuse(status, "creating an event")
        return event

    def _refuse(self, status: Any, doing: str) -> None:
        """Raise for a call that failed while issuing, after what was started is over if that is possible."""
        text = f"{self._name}, {doing}: {describe(status)}"
        if status.name in STICKY:
            raise DeviceLost(text)
        # Slots and blocks may be used again only when no byte can move any more, and nobody knows which copies of a
        # batch were started before the one that the driver refused.
        (drained,) = driver.cuStreamSynchronize(self._stream)
        if drained.name in STICKY:
            raise DeviceLost(f"{text}; then {describe(drained)}")
        raise CopyFailed(text, outcome_known=drained == OK)


class CudaMark:
    """The end of one call. Implements `kvsidecar.device.base.CopyMark`.

    Args:
        events: before it and after it.
    """

    __slots__ = ("_events", "_over", "_stream")

    def __init__(self, stream: CudaCopyStream, events: tuple[Any, Any]) -> None:
        self._stream = stream
        self._events = events
        self._over = False

    def over(self) -> bool:
        if self._over:
            return True
        (status,) = driver.cuEventQuery(self._events[1])
        return status != driver.CUresult.CUDA_ERROR_NOT_READY and self._ended(status)

    def wait(self) -> None:
        if not self._over:
            self._ended(driver.cuEventSynchronize(self._events[1])[0])

    def seconds(self) -> float:
        return self._stream.seconds_between(self._events)

    def _ended(self, status: Any) -> bool:
        self._over = True
        self._stream.check(status)
        return True


def _driver_function(name: str, version: int) -> int:
    """Address of a driver function with the signature of this CUDA version; 0 if this driver has none."""
    status, address, _ = driver.cuGetProcAddress(name.encode(), version, 0)
    return int(address) if status == OK and address is not None else 0
