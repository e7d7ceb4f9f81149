"""The process of one GPU: maps and pins the pool, imports the ranks' memory, and copies.

It speaks with the daemon alone: over the socket that it inherits, and two rings for each direction. It ends when the
daemon closes the socket, and at the latest when the daemon dies.

The main thread answers the daemon's requests; each direction has a thread of its own.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvsidecar.copier.control import descriptor, layouts_of, source_of
from kvsidecar.copier.copy_plan import BlockCopies
from kvsidecar.copier.copy_queue import CopyQueue, CopyResult, QueuedCopy
from kvsidecar.copier.messages import (
    Copy,
    Done,
    Ended,
    Kind,
    Progress,
    kind_of,
    number_of,
    pack_last_words,
    pack_number,
)
from kvsidecar.copier.recipes import BoundGroup, bind
from kvsidecar.copier.ring import Receiver, Ring, Sender
from kvsidecar.copier.self_test import self_test
from kvsidecar.copier.slot_check import SlotCheck
from kvsidecar.device.base import Device, DeviceEvent, DeviceMemory, MemorySource, RangesSource, ScratchSource
from kvsidecar.device.platforms import open_platform
from kvsidecar.errors import CopyFailed, DeviceLost, ImportRefused, KVSidecarError
from kvsidecar.support import failpoints, host_memory, log
from kvsidecar.support.child_side import EXIT_FAILED, Control, prctl, run
from kvsidecar.support.cpu_sleep import NAP_SECONDS
from kvsidecar.support.fence import FenceLane, lanes
from kvsidecar.support.memory_limits import PageKind
from kvsidecar.support.polling import Sleeper
from kvsidecar.types import Direction

FULL_SECONDS: Final = 1e-3
"""Wait between attempts to write into a ring that the daemon does not empty."""

_PR_SET_NAME: Final = 15
_PR_SET_TIMERSLACK: Final = 29
_log = log.get("copier")


@dataclass(slots=True)
class Session:
    """A rank's memory and events, imported by this process."""

    memories: list[DeviceMemory]
    groups: dict[tuple[int, int], BoundGroup]
    """Bound groups by group and slice; slice 0 is all of the group."""
    events: list[DeviceEvent] = field(default_factory=list)
    lanes: Mapping[Direction, FenceLane] = field(default_factory=dict)
    """The copier's lanes of the engine's fence, if it has one."""


class Sessions:
    """The ranks whose memory is imported. The main thread opens and closes them, the threads of the directions read."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._sessions: dict[int, Session] = {}

    def __getitem__(self, number: int) -> Session:
        return self._sessions[number]

    def open(self, request: dict[str, Any], fds: Sequence[int]) -> dict[str, Any]:
        """Import a rank's memory and events: all of it, or nothing."""
        session = Session([], {})
        try:
            self._import(session, [source_of(each, fds) for each in request["allocations"]])
            bases = [memory.address for memory in session.memories]
            reservations = [memory.reservation for memory in session.memories]
            session.groups = {
                (layout.group, number): bind(layout, bases, number, reservations)
                for layout in layouts_of(request["groups"])
                for number in range(len(layout.slices) + 1)
            }
            refused = self._open_events(session, request["events"])
            if (fence := request["fence"]) is not None:
                session.lanes = lanes(descriptor(fds, fence))
        except BaseException:
            self._give_back(session)
            raise
        self._sessions[request["session"]] = session
        return {
            "memories": [[memory.key.hex(), memory.nbytes] for memory in session.memories],
            "kinds": [bound.fast.kinds for (_, number), bound in session.groups.items() if not number],
            "num_events": len(session.events),
            "events_refused": refused,
        }

    def _import(self, session: Session, sources: Sequence[MemorySource]) -> None:
        """Add the memories of all sources, in order; on an error, those imported so far."""
        ranges = [each for each in sources if isinstance(each, RangesSource)]
        side_by_side: Iterator[DeviceMemory] = iter(())
        ordered = []
        for source in sources:
            failpoints.hit("copier.import")
            if isinstance(source, RangesSource):
                if ranges:  # all of them together, with the first
                    imported = self._device.import_ranges(ranges)
                    session.memories += imported
                    side_by_side, ranges = iter(imported), []
                ordered.append(next(side_by_side))
                continue
            if isinstance(source, ScratchSource):
                memory = self._device.allocate(source.nbytes)
            else:
                memory = self._device.import_memory(source)
            session.memories.append(memory)
            ordered.append(memory)
        session.memories = ordered

    def _open_events(self, session: Session, handles: Sequence[str]) -> str:
        try:
            for handle in handles:
                session.events.append(self._device.import_event(bytes.fromhex(handle)))
        except ImportRefused as error:
            _close(session.events)
            session.events.clear()
            return str(error)
        return ""

    def close(self, request: dict[str, Any]) -> dict[str, Any]:
        """Give a session's memory back, if it is open. None of its copies may be under way."""
        if (session := self._sessions.pop(request["session"], None)) is not None:
            self._give_back(session)
        return {}

    def _give_back(self, session: Session) -> None:
        _close(session.events)
        for memory in session.memories:
            self._device.release_memory(memory)


def _close(events: Sequence[DeviceEvent]) -> None:
    for event in events:
        event.close()


@dataclass(eq=False)
class CopyLoop:
    """One direction, in a thread of its own, with rings of its own: takes the daemon's records, issues copies, and
    writes how they ended. Nothing is handed to another thread.

    Two threads, because a driver's call for a thousand copies takes half a millisecond of a core, and both directions
    together need more than one core (measured). The interpreter's lock is released during such a call.

    The same thread takes checksums, in slices between two steps of the queue: a store's when its copy is over, a load's
    before its copy is queued. So they delay other copies by a slice at most, and small ones not by large ones.

    Args:
        pool: where this process has mapped it.
        boundary: no copy spans a multiple of it.
        light_seconds: the thread sleeps in short naps for this long after a copy; 0 for no naps.
    """

    device: Device
    direction: Direction
    sessions: Sessions
    pool: npt.NDArray[np.uint8]
    boundary: int
    light_seconds: float
    receiver: Receiver
    sender: Sender

    def __post_init__(self) -> None:
        self._last_end = 0.0
        self._checking: deque[tuple[SlotCheck, QueuedCopy, Done | None]] = deque()
        """Loads before their copies, and stores after theirs with their answers; they take turns."""

    def run(self) -> None:
        """Copy until the process ends.

        Raises:
            CopyFailed, DeviceLost: copies may still run, and only the end of the process ends them.
        """
        stream = self.device.open_stream(self.direction)
        self._queue = queue = CopyQueue(stream, self.direction, self.pool.ctypes.data, self._ended)
        sleeper, progress = Sleeper(self.receiver.bell), self.receiver.ring.progress
        wait: float | None = None
        while True:
            progress[Progress.IN_FLIGHT] = queue.in_flight_since
            progress[Progress.WORKING] = 0.0
            rung = sleeper.sleep(wait)
            progress[Progress.WORKING] = time.monotonic()
            if rung:
                for record in self.receiver.take():
                    self._take(record)
            elif wait is not None and wait > NAP_SECONDS and self.light_seconds and queue.end_in_flight:
                # This thread slept until shortly before the end of a copy; the daemon's loop may sleep, too.
                self.sender.send(pack_number(Kind.SOON, 0))
            more = queue.step()
            if self._checking:
                self._check()
                more = True
            wait = 0.0 if more else queue.wait()
            self.sender.flush()
            if wait is None and time.monotonic() - self._last_end < self.light_seconds:
                wait = NAP_SECONDS
            if self.sender.waiting_bytes:
                wait = FULL_SECONDS if wait is None else min(wait, FULL_SECONDS)

    def run_to_the_end(self) -> None:
        """`run`, and end the process: its end is the daemon's proof that nothing moves any more."""
        prctl(_PR_SET_NAME, str(self.direction).encode(), 0, 0, 0)  # what top and gdb show
        prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)  # ns; the default of 50 us is as long as a copy of one block
        try:
            self.run()
        except BaseException as error:  # noqa: BLE001 - the daemon is told, whatever it was
            text = f"{type(error).__name__}: {error}"
            _log.error("the copier ends", direction=self.direction.value, error=text)
            self.sender.send(pack_last_words(str(error) if isinstance(error, KVSidecarError) else text))
        log.flush()
        os._exit(EXIT_FAILED)

    def _take(self, record: bytes) -> None:
        kind = kind_of(record)
        if kind is Kind.COPY:
            self._copy(Copy.unpack(record))
        elif kind is Kind.PACE:
            self._queue.pace = number_of(record) or None
        elif kind is Kind.PRIORITIZE:
            self._queue.prioritize(number_of(record))
        elif self._queue.cancel(number := number_of(record)) or self._stop_checking(number):
            self.sender.send(Done(number, Ended.CANCELLED).pack())

    def _copy(self, copy: Copy) -> None:
        try:
            session = self.sessions[copy.session]
            parts = [(session.groups[part.group, part.slice], part.block_ids, part.slots) for part in copy.parts]
            plan = BlockCopies(parts, boundary=self.boundary)
            after = None if copy.event is None else session.events[copy.event]
        except Exception as error:  # noqa: BLE001 - nothing was issued; the daemon is told, whatever it was
            self.sender.send(Done(copy.number, Ended.FAILED, error=f"{type(error).__name__}: {error}").pack())
            return
        started = None if after is None else partial(self.sender.send, pack_number(Kind.STARTED, copy.number))
        lane = session.lanes.get(self.direction)
        queued = QueuedCopy(copy.number, plan, after, started, copy.checks, lane, copy.session, copy.weight)
        if copy.checks is not None and self.direction is Direction.LOAD:
            self._checking.append((SlotCheck(self.pool, copy.checks), queued, None))
        else:
            self._queue.submit(queued)

    def _ended(self, copy: QueuedCopy, result: CopyResult | CopyFailed) -> None:
        if isinstance(result, CopyFailed):
            done = Done(copy.number, Ended.FAILED, error=str(result))
        else:
            self._last_end = result.ended
            done = Done(
                copy.number, Ended.COPIED, result.nbytes, result.copy_seconds, result.queue_seconds, result.ended
            )
            if copy.checks is not None and self.direction is Direction.STORE:
                self._checking.append((SlotCheck(self.pool, copy.checks), copy, done))
                return
        self.sender.send(done.pack())

    def _check(self) -> None:
        """Read one slice of the next copy's slots."""
        check, copy, done = self._checking[0]
        if check.step():
            self._checking.rotate(-1)
            return
        self._checking.popleft()
        if done is not None:
            self.sender.send(replace(done, values=check.values).pack())
        elif wrong := check.wrong:
            self.sender.send(Done(copy.number, Ended.CORRUPT, values=wrong).pack())
        else:
            self._queue.submit(copy)

    def _stop_checking(self, number: int) -> bool:
        """Forget a load whose slots are being checked. False: there is none of this number."""
        for each in self._checking:
            if each[1].number == number and each[2] is None:
                self._checking.remove(each)
                return True
        return False


class CopierProcess:
    """Answers the daemon's requests, one at a time, in the main thread."""

    def __init__(self) -> None:
        self._requests: dict[str, Callable[[dict[str, Any], Sequence[int]], dict[str, Any]]] = {
            "hello": self._hello,
            "start": self._start,
            "map": self._map,
            "pin": self._pin,
            "unpin": self._unpin,
            "open": lambda request, fds: self._sessions.open(request, fds),
            "close": lambda request, _: self._sessions.close(request),
        }

    def serve(self, control: Control) -> None:
        """Answer until the daemon has gone, or the device is lost."""
        while (reply := control.answer(self._requests)) is not None:
            if reply.get("error") == DeviceLost.__name__:
                return  # the context is gone: a new process gets a new one

    def _hello(self, request: dict[str, Any], _: Sequence[int]) -> dict[str, Any]:
        failpoints.hit("copier.hello")
        self._platform, why = open_platform(request["device"], devices=request["devices"])
        return {
            "platform": self._platform.name,
            "why": why,
            "devices": [[uuid, self._platform.numa_node(uuid)] for uuid in self._platform.device_uuids()],
            "pin_limit": self._platform.pin_limit(),
        }

    def _start(self, request: dict[str, Any], fds: Sequence[int]) -> dict[str, Any]:
        self._device = self._platform.device(request["uuid"])
        self_test(self._platform, self._device)
        self._sessions = Sessions(self._device)
        self._light_seconds = request["light_seconds"]
        ours = map(os.dup, fds)
        rings = [Ring(memory, bell, request["ring_bytes"]) for memory, bell in zip(ours, ours, strict=True)]
        self._rings = {direction: rings[2 * index : 2 * index + 2] for index, direction in enumerate(Direction)}
        return {}

    def _map(self, request: dict[str, Any], fds: Sequence[int]) -> dict[str, Any]:
        """Map the pool, and start to copy."""
        pool = host_memory.map_by_facts(fds[0], request["pool"])
        self._address = pool.ctypes.data
        for direction, (there, back) in self._rings.items():
            loop = CopyLoop(
                self._device, direction, self._sessions, pool, request["boundary"], self._light_seconds,
                Receiver(there), Sender(back),
            )  # fmt: skip
            threading.Thread(target=loop.run_to_the_end, name=str(direction), daemon=True).start()
        return {}

    def _pin(self, request: dict[str, Any], _: Sequence[int]) -> dict[str, Any]:
        """Pin one chunk. Its pages exist; this process's page tables are filled first."""
        failpoints.hit("copier.pin")
        address, nbytes = self._address + request["offset"], request["nbytes"]
        host_memory.populate(address, nbytes, PageKind.SMALL)
        self._platform.pin(address, nbytes)
        return {}

    def _unpin(self, request: dict[str, Any], _: Sequence[int]) -> dict[str, Any]:
        self._platform.unpin(self._address + request["offset"], request["nbytes"])
        return {}


if __name__ == "__main__":
    run("copier", CopierProcess().serve)
