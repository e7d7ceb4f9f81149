"""The machine under the daemon: devices, engines' memory, the pool, and copies that really move bytes, in pieces.

It checks what a real machine would not tell: every piece that moves must lie in memory that is mapped, in blocks that
a running job names, and in slots that nobody else's copy uses.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvsidecar.copier.hub import DeviceHub
from kvsidecar.copier.worker import CopyResult
from kvsidecar.device.base import CopyPlan, CopyStream, CudaIpcSource, Device, DeviceMemory, MemorySource
from kvsidecar.errors import CopyFailed, DeviceLost, DeviceNotFound, ImportRefused
from kvsidecar.types import Direction
from tests.plans import copies_of

HANDLE_BYTES = 64


class Violation(AssertionError):
    """A promise was broken. Remembered, since it may be raised where the daemon's code catches it."""

    seen: ClassVar[list[str]] = []

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.seen.append(text)


@dataclass(eq=False)
class Allocation:
    """One allocation of an engine, as the engine made it."""

    name: str
    handle: bytes
    address: int
    data: npt.NDArray[np.uint8]
    reading: npt.NDArray[np.bool_]
    """Bytes that a running store may read."""
    writing: npt.NDArray[np.bool_]
    """Bytes that a running load may write."""
    mappings: int = 0
    """Imports by the daemon that were not released."""


@dataclass(eq=False)
class Event:
    """An engine's interprocess event. Implements `kvsidecar.device.base.DeviceEvent`."""

    done: bool = True
    closed: bool = False

    def is_done(self) -> bool:
        if self.closed:
            raise Violation("an event was asked after it was closed")
        return self.done

    def close(self) -> None:
        if self.closed:
            raise Violation("an event was closed twice")
        self.closed = True


@dataclass(eq=False)
class Copy:
    """One submitted plan."""

    direction: Direction
    copies: npt.NDArray[np.void]
    nbytes: int
    after: Event | None
    on_start: Callable[[], None] | None
    future: Future[CopyResult]
    host: list[tuple[int, int]]
    """Extents in the pool: [start, end)."""
    pieces: list[tuple[int, int, int]] = field(default_factory=list)
    """(device address, pool offset, bytes) still to be moved."""
    uncertain: bool = False
    """It was reported as of unknown outcome: its remaining pieces may move at any time, or never."""


class Machine:
    """Everything of one simulated node that is no decision of the daemon."""

    def __init__(self, rng: random.Random, pool_bytes: int, note: Callable[[str], None]) -> None:
        self.rng = rng
        self.note = note
        self.pool = np.zeros(pool_bytes, np.uint8)
        self.by_handle: dict[bytes, Allocation] = {}
        self.events: dict[bytes, Event] = {}
        self.mapped: dict[int, Allocation] = {}
        """By address."""
        self.inflight: list[Copy] = []
        """Copies that a driver may still be working on, queued ones too."""
        self.ghosts: list[Copy] = []
        """Copies of unknown outcome with pieces left."""
        self._next_address = 0x10000

    # -- what engines do -------------------------------------------------------------------------------------------

    def allocate(self, name: str, nbytes: int, *, gap: bool) -> Allocation:
        """Memory of an engine. Without a gap it lies right behind the last one: a copy must still not span both."""
        if gap:
            self._next_address += 4096
        handle = len(self.by_handle).to_bytes(HANDLE_BYTES, "little")
        allocation = Allocation(
            name, handle, self._next_address, np.zeros(nbytes, np.uint8), np.zeros(nbytes, bool), np.zeros(nbytes, bool)
        )
        self._next_address += nbytes
        self.by_handle[handle] = allocation
        return allocation

    def event(self) -> tuple[bytes, Event]:
        handle = len(self.events).to_bytes(HANDLE_BYTES, "little")
        self.events[handle] = Event()
        return handle, self.events[handle]

    # -- what copies do --------------------------------------------------------------------------------------------

    def submitted(self, copy: Copy) -> None:
        """A copy is about to be queued: the slots it uses must be nobody else's.

        Two loads may read one slot at a time; everything else on the same slot is a torn block.
        """
        for other in self.inflight:
            if other.direction is Direction.LOAD and copy.direction is Direction.LOAD:
                continue
            if other.future.cancelled():
                continue  # it still queues, and will never start
            for start, end in copy.host:
                if any(start < other_end and other_start < end for other_start, other_end in other.host):
                    state = "is of unknown outcome" if other.uncertain else "is not over"
                    raise Violation(f"a {copy.direction} uses the slot at {start}; a {other.direction} of it {state}")
        self.inflight.append(copy)

    def move(self, copy: Copy) -> None:
        """Move the next piece."""
        address, offset, nbytes = copy.pieces.pop()
        found = self.find(address, nbytes)
        if found is None:
            raise Violation(f"a {copy.direction} touches {nbytes} bytes of device memory that is not mapped as one")
        allocation, start = found
        device = slice(start, start + nbytes)
        host = slice(offset, offset + nbytes)
        if copy.direction is Direction.STORE:
            # After a failure of unknown outcome the engine may have gone on: garbage, into a slot nobody will read.
            if not copy.uncertain and not allocation.reading[device].all():
                raise Violation(f"a store reads bytes of {allocation.name} that no running store names")
            self.pool[host] = allocation.data[device]
        else:
            if not allocation.writing[device].all():
                raise Violation(f"a load writes bytes of {allocation.name} that no running load names")
            allocation.data[device] = self.pool[host]

    def find(self, address: int, nbytes: int) -> tuple[Allocation, int] | None:
        """The mapped allocation that holds all of these bytes, and where in it."""
        for allocation in self.mapped.values():
            start = address - allocation.address
            if start >= 0 and start + nbytes <= len(allocation.data):
                return allocation, start
        return None

    def uses(self, copy: Copy, allocation: Allocation) -> bool:
        """Whether the plan names memory of this allocation."""
        addresses = copy.copies["device_address"].astype(np.int64)
        return bool(((addresses >= allocation.address) & (addresses < allocation.address + len(allocation.data))).any())

    def move_ghost(self) -> None:
        """A copy that was given up for lost goes on after all."""
        ghost = self.rng.choice(self.ghosts)
        if ghost.pieces:
            self.move(ghost)
        if not ghost.pieces:
            self.ghosts.remove(ghost)

    def haunt(self, copy: Copy) -> None:
        """From now on nobody knows what becomes of this copy. Its slots and its memory stay in use for ever."""
        copy.uncertain = True
        if copy.pieces:
            self.ghosts.append(copy)


class SimDevice:
    """Implements `kvsidecar.device.base.Device`."""

    numa_node = None

    def __init__(self, machine: Machine, uuid: str) -> None:
        self.uuid = uuid
        self.lost = False
        self._machine = machine

    def _check(self) -> None:
        if self.lost:
            raise DeviceLost(f"{self.uuid} has fallen off the bus")

    def import_memory(self, source: MemorySource) -> DeviceMemory:
        self._check()
        assert isinstance(source, CudaIpcSource)
        allocation = self._machine.by_handle.get(source.handle)
        if allocation is None:
            raise ImportRefused("the handle does not open")
        allocation.mappings += 1
        self._machine.mapped[allocation.address] = allocation
        return DeviceMemory(allocation.address, len(allocation.data), source.handle)

    def release_memory(self, memory: DeviceMemory) -> None:
        allocation = self._machine.by_handle[memory.key]
        if not allocation.mappings:
            raise Violation(f"{allocation.name} is unmapped more often than mapped")
        for copy in self._machine.inflight:
            never = copy.future.cancelled()  # it still queues
            if not never and allocation.mappings == 1 and self._machine.uses(copy, allocation):
                raise Violation(f"{allocation.name} is unmapped under a {copy.direction} that may not be over")
        allocation.mappings -= 1
        if not allocation.mappings:
            del self._machine.mapped[allocation.address]
        self._check()  # the context is gone, and the mapping with it

    def import_event(self, handle: bytes) -> Event:
        self._check()
        if handle not in self._machine.events:
            raise ImportRefused("the event does not open")
        return self._machine.events[handle]

    def allocate(self, nbytes: int) -> DeviceMemory:
        raise NotImplementedError

    def open_stream(self, direction: Direction) -> CopyStream:
        raise NotImplementedError


class SimPlatform:
    """Implements what a `DeviceHub` needs of `kvsidecar.device.base.Platform`."""

    name = "simulation"

    def __init__(self, machine: Machine, uuids: tuple[str, ...]) -> None:
        self.devices = {uuid: SimDevice(machine, uuid) for uuid in uuids}

    def device_uuids(self) -> tuple[str, ...]:
        return tuple(self.devices)

    def device(self, uuid: str) -> SimDevice:
        if uuid not in self.devices:
            raise DeviceNotFound(f"no device {uuid}")
        return self.devices[uuid]


class SimWorker:
    """What `kvsidecar.copier.worker.CopyWorker` promises, one step at a time and without a thread."""

    def __init__(
        self, machine: Machine, device: SimDevice, direction: Direction, on_failure: Callable[[BaseException], None]
    ) -> None:
        self.device = device
        self.direction = direction
        self.failure: BaseException | None = None
        self._machine = machine
        self._on_failure = on_failure
        self._queue: deque[Copy] = deque()
        self._current: Copy | None = None

    # -- CopyWorker ------------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return self.failure is None

    @property
    def running(self) -> bool:
        return self._current is not None

    @property
    def queued(self) -> int:
        return len(self._queue)

    def oldest_inflight_seconds(self) -> float:
        return 0.0

    def submit(
        self, plan: CopyPlan, *, after: Event | None = None, on_start: Callable[[], None] | None = None
    ) -> Future[CopyResult]:
        if self.failure is not None:
            raise DeviceLost(str(self.failure))
        copies = copies_of(plan, self._machine.rng.choice([None, 100, 1000]))
        host = [
            (row, row + width)
            for _, _, offset, pitch, width, rows in copies.tolist()
            for row in range(offset, offset + rows * pitch, pitch)
        ]
        copy = Copy(self.direction, copies, plan.nbytes, after, on_start, Future(), host)
        self._machine.submitted(copy)
        self._queue.append(copy)
        return copy.future

    def prioritize(self, future: Future[CopyResult]) -> None:
        for copy in self._queue:
            if copy.future is future:
                self._queue.remove(copy)
                self._queue.appendleft(copy)
                return

    # -- the scheduler ---------------------------------------------------------------------------------------------

    @property
    def can_step(self) -> bool:
        return self.alive and (self._current is not None or any(self._startable(copy) for copy in self._queue))

    def step(self, fault: str | None) -> None:
        """Start the next copy, move one piece of it, or end it; or let the fault happen."""
        if self.device.lost or fault == "lost":
            self._lose()
        elif self._current is None:
            self._start()
        elif fault is not None:
            self._fail(fault)
        elif self._current.pieces:
            for _ in range(self._machine.rng.randint(1, len(self._current.pieces))):
                self._machine.move(self._current)
        else:
            copy, self._current = self._current, None
            self._machine.inflight.remove(copy)
            copy.future.set_result(CopyResult(copy.nbytes, 0.0, 0.0, 0.0))

    def _startable(self, copy: Copy) -> bool:
        return copy.future.cancelled() or copy.after is None or copy.after.is_done()

    def _start(self) -> None:
        copy = next(copy for copy in self._queue if self._startable(copy))
        self._queue.remove(copy)
        if not copy.future.set_running_or_notify_cancel():
            self._machine.inflight.remove(copy)
            return
        copy.pieces = _pieces(copy.copies, self._machine.rng)
        self._current = copy
        if copy.on_start is not None:
            copy.on_start()

    def _fail(self, fault: str) -> None:
        copy, self._current = self._current, None
        assert copy is not None
        self._machine.note(f"{self.direction} on {self.device.uuid} fails, outcome {fault}")
        if fault == "known":
            self._machine.inflight.remove(copy)
        else:
            self._machine.haunt(copy)
        copy.future.set_exception(CopyFailed("injected", outcome_known=fault == "known"))

    def _lose(self) -> None:
        self._machine.note(f"{self.device.uuid} is lost")
        self.device.lost = True
        self.failure = DeviceLost("injected")
        running, self._current = self._current, None
        if running is not None:
            self._machine.haunt(running)
            running.future.set_exception(DeviceLost("injected", outcome_known=False))
        for copy in self._queue:
            self._machine.inflight.remove(copy)
            if not copy.future.cancelled():
                copy.future.set_exception(DeviceLost("injected", outcome_known=True))
        self._queue.clear()
        self._on_failure(self.failure)


class SimHub(DeviceHub):
    """The real hub with workers of the simulation."""

    machine: Machine

    def _start(self, device: Device, direction: Direction) -> SimWorker:  # type: ignore[override]
        assert isinstance(device, SimDevice)
        return SimWorker(
            self.machine, device, direction, lambda error: self._on_worker_failure(device.uuid, direction, error)
        )


def _pieces(copies: npt.NDArray[np.void], rng: random.Random) -> list[tuple[int, int, int]]:
    """Rows of all copies, some cut in two, in any order: DMA promises none."""
    pieces = []
    for address, pitch, offset, host_pitch, row_bytes, num_rows in copies.tolist():
        for row in range(num_rows):
            start, host = address + row * pitch, offset + row * host_pitch
            cut = rng.randrange(row_bytes)
            pieces += [(start, host, cut)] * (cut > 0) + [(start + cut, host + cut, row_bytes - cut)]
    rng.shuffle(pieces)
    return pieces
