"""The machine under the daemon: devices, engines' memory, the pool, and copies that really move bytes, in pieces.

It checks what a real machine would not tell: every piece that moves must lie in memory that its copier has mapped, in
blocks that a running job names, and in slots that nobody else's copy uses; and nothing moves for a copier that is dead.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvsidecar.copier.link import CopierLink
from kvsidecar.device.base import CopyStream, CudaIpcSource, DeviceMemory, MemorySource
from kvsidecar.errors import ImportRefused
from kvsidecar.types import Direction

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
    mapped_by: set[int] = field(default_factory=set)
    """The processes of copiers that have it mapped."""


@dataclass(eq=False)
class Event:
    """An engine's interprocess event."""

    done: bool = True


@dataclass(eq=False)
class OpenEvent:
    """An event as one process has opened it. Implements `kvsidecar.device.base.DeviceEvent`."""

    event: Event
    closed: bool = False

    def is_done(self) -> bool:
        if self.closed:
            raise Violation("an event was asked after it was closed")
        return self.event.done

    def close(self) -> None:
        if self.closed:
            raise Violation("an event was closed twice")
        self.closed = True


@dataclass(eq=False)
class Copy:
    """A copy that a link was given, until the daemon has heard of its end."""

    link: CopierLink
    number: int
    session: int
    direction: Direction
    slots: list[tuple[int, int]]
    """Extents in the pool: [start, end)."""
    pieces: list[tuple[int, int, int]] = field(default_factory=list)
    """(device address, pool offset, bytes) still to be moved."""


class Machine:
    """Everything of one simulated node that is no decision of the daemon."""

    def __init__(self, rng: random.Random, pool_bytes: int, note: Callable[[str], None]) -> None:
        self.rng = rng
        self.note = note
        self.pool = np.zeros(pool_bytes, np.uint8)
        self.by_handle: dict[bytes, Allocation] = {}
        self.events: dict[bytes, Event] = {}
        self.inflight: list[Copy] = []
        """Copies of whose end the daemon has not heard, queued ones too."""
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
        """A copy is handed over: the slots it uses must be nobody else's.

        Two loads may read one slot at a time; everything else on the same slot is a torn block.
        """
        for other in self.inflight:
            if other.direction is Direction.LOAD and copy.direction is Direction.LOAD:
                continue
            for start, end in copy.slots:
                if any(start < other_end and other_start < end for other_start, other_end in other.slots):
                    raise Violation(
                        f"a {copy.direction} uses the slot at {start}; a {other.direction} of it is not over"
                    )
        self.inflight.append(copy)

    def over(self, link: CopierLink, number: int | None = None) -> None:
        """The daemon has heard of the end of a copy, or of all copies of this link."""
        self.inflight = [copy for copy in self.inflight if copy.link is not link or number not in (None, copy.number)]

    def move(self, copy: Copy, device: SimDevice) -> None:
        """Move the next piece."""
        address, offset, nbytes = copy.pieces.pop()
        if not device.alive:
            raise Violation(f"a {copy.direction} moves bytes for a copier that is dead")
        found = device.find(address, nbytes)
        if found is None:
            raise Violation(f"a {copy.direction} touches {nbytes} bytes of device memory that is not mapped as one")
        allocation, start = found
        there = slice(start, start + nbytes)
        host = slice(offset, offset + nbytes)
        if not any(start <= offset and offset + nbytes <= end for start, end in copy.slots):
            raise Violation(f"a {copy.direction} touches bytes of the pool that are in none of its slots")
        if copy.direction is Direction.STORE:
            if not allocation.reading[there].all():
                raise Violation(f"a store reads bytes of {allocation.name} that no running store names")
            self.pool[host] = allocation.data[there]
        else:
            if not allocation.writing[there].all():
                raise Violation(f"a load writes bytes of {allocation.name} that no running load names")
            allocation.data[there] = self.pool[host]


class SimDevice:
    """A device as one process sees it. Implements `kvsidecar.device.base.Device`.

    Args:
        pid: of the process.
    """

    def __init__(self, machine: Machine, uuid: str, pid: int) -> None:
        self.uuid = uuid
        self.alive = True
        self._machine = machine
        self._pid = pid
        self._mapped: dict[bytes, int] = {}
        """How often each allocation is mapped, by handle."""

    def import_memory(self, source: MemorySource) -> DeviceMemory:
        assert isinstance(source, CudaIpcSource)
        allocation = self._machine.by_handle.get(source.handle)
        if allocation is None:
            raise ImportRefused("the handle does not open")
        self._mapped[source.handle] = self._mapped.get(source.handle, 0) + 1
        allocation.mapped_by.add(self._pid)
        return DeviceMemory(allocation.address, len(allocation.data), source.handle)

    def release_memory(self, memory: DeviceMemory) -> None:
        allocation = self._machine.by_handle[memory.key]
        if not self._mapped.get(memory.key):
            raise Violation(f"{allocation.name} is unmapped more often than mapped")
        self._mapped[memory.key] -= 1
        if not self._mapped[memory.key]:
            self._unmap(memory.key)

    def _unmap(self, handle: bytes) -> None:
        del self._mapped[handle]
        self._machine.by_handle[handle].mapped_by.remove(self._pid)

    def die(self) -> None:
        """The process ends: nothing is mapped any more."""
        self.alive = False
        for handle in tuple(self._mapped):
            self._unmap(handle)

    def find(self, address: int, nbytes: int) -> tuple[Allocation, int] | None:
        """The mapped allocation that holds all of these bytes, and where in it."""
        for handle in self._mapped:
            allocation = self._machine.by_handle[handle]
            start = address - allocation.address
            if start >= 0 and start + nbytes <= len(allocation.data):
                return allocation, start
        return None

    def import_event(self, handle: bytes) -> OpenEvent:
        if handle not in self._machine.events:
            raise ImportRefused("the event does not open")
        return OpenEvent(self._machine.events[handle])

    def allocate(self, nbytes: int) -> DeviceMemory:
        raise NotImplementedError

    def open_stream(self, direction: Direction) -> CopyStream:
        raise NotImplementedError
