"""Copiers of the simulation: the daemon's own side of them, over processes that go step by step, and may die."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.simulation.loop import SimLoop
from benchmarks.simulation.machine import Copy, Machine, OpenEvent, SimDevice, Violation
from kvsidecar.copier import messages
from kvsidecar.copier.copiers import Copier, Copiers, Options
from kvsidecar.copier.copy_plan import BlockCopies
from kvsidecar.copier.link import CopierLink, Copying, Hello
from kvsidecar.copier.messages import (
    Checks,
    CopyPart,
    Done,
    Ended,
    Kind,
    kind_of,
    number_of,
    pack_last_words,
    pack_number,
)
from kvsidecar.copier.process import Sessions
from kvsidecar.copier.slot_check import SlotCheck
from kvsidecar.errors import DeviceLost
from kvsidecar.support.cpu_sleep import NO_GUARD
from kvsidecar.support.loop_time import LoopTime
from kvsidecar.support.steps import Steps
from kvsidecar.support.supervised_child import ChildState
from kvsidecar.types import Direction
from tests.copiers import NoProcessLink
from tests.plans import copies_of

FIRST_PID = 100


class SimLink(NoProcessLink):
    """The real link. The machine is told of every copy."""

    def __init__(self, process: SimProcess) -> None:
        super().__init__(process.pid, process.answer, process.kill)
        self._steps = Steps(LoopTime(lambda: 0.0, 0.0))  # one per iteration
        self._steps.called()
        self._at = process

    def submit(
        self,
        session: int,
        direction: Direction,
        parts: Sequence[CopyPart],
        *,
        event: int | None = None,
        on_start: Callable[[], None] | None = None,
        checks: Checks | None = None,
        weight: int = 1,
        on_end: Callable[[Done | DeviceLost], None] | None = None,
    ) -> Copying:
        copying = super().submit(
            session, direction, parts, event=event, on_start=on_start, checks=checks, weight=weight, on_end=on_end
        )
        slots = [
            (slot, slot + self._at.shard_bytes[session, part.group, part.slice])
            for part in parts
            for slot in part.slots.tolist()
        ]
        copy = messages.Copy.unpack(self.to_process[direction].sent[-1])
        self._at.machine.submitted(Copy(self, copy.number, session, direction, slots))
        return copying

    def _done(self, done: Done) -> None:
        self._at.machine.over(self, done.number)
        super()._done(done)

    def died(self) -> None:
        super().died()
        self._at.machine.over(self)


class SimProcess:
    """One process of a copier: what `kvsidecar.copier.process` promises, one step at a time and without a thread."""

    def __init__(self, machine: Machine, loop: SimLoop, uuid: str, pid: int, slab_bytes: int) -> None:
        self.machine, self.uuid, self.pid, self.slab_bytes = machine, uuid, pid, slab_bytes
        self.device = SimDevice(machine, uuid, pid)
        self.sessions = Sessions(self.device)
        self.shard_bytes: dict[tuple[int, int, int], int] = {}
        """Of every session that it has ever opened, by group and slice."""
        self.link = SimLink(self)
        self.workers = [SimWorker(self, direction) for direction in Direction]
        self._loop = loop

    def answer(self, request: dict[str, Any], fds: Sequence[int]) -> dict[str, Any] | None:
        """In a thread of the daemon. None: the process has ended."""
        if not self.device.alive:
            return None
        match request["do"]:
            case "hello":
                return {"platform": "simulation", "why": "", "devices": [], "pin_limit": None}
            case "bound" | "keep" | "log" | "start":
                return {}
            case "open":
                reply = self.sessions.open(request, fds)
                for (group, number), bound in self.sessions[request["session"]].groups.items():
                    self.shard_bytes[request["session"], group, number] = bound.nbytes
                return reply
            case "close":
                if any(copy.link is self.link and copy.session == request["session"] for copy in self.machine.inflight):
                    raise Violation("a session is closed while a copy of it may not be over")
                return self.sessions.close(request)
        raise NotImplementedError(request)

    def kill(self) -> None:
        """It is dead at once, with all it had mapped; the daemon hears of it when its loop gets to it."""
        if self.device.alive:
            self.machine.note(f"the copier of {self.uuid} dies")
            self.device.die()
            self._loop.call_soon(self.link.died)


class SimWorker:
    """What `kvsidecar.copier.process.CopyLoop` and the queue below it promise, for one direction."""

    def __init__(self, process: SimProcess, direction: Direction) -> None:
        self.direction = direction
        self._process = process
        self._machine = process.machine
        self._inbox = process.link.to_process[direction].sent
        self._outbox = process.link.from_process[direction].sent
        self._queue: deque[tuple[messages.Copy, OpenEvent | None, npt.NDArray[np.void], int]] = deque()
        self._checking: list[tuple[messages.Copy, SlotCheck, Callable[[SlotCheck], None]]] = []
        """Loads before their copies, stores behind them."""
        self._current: Copy | None = None
        self._record: messages.Copy | None = None
        """What asked for it."""
        self._nbytes = 0

    @property
    def can_step(self) -> bool:
        if self._outbox and not self._process.link.ended.done():
            return True
        return self._process.device.alive and bool(self._inbox or self._current or self._checking or self._startable())

    def step(self, fault: str | None) -> None:
        """Let the daemon read, take a record, start a copy, move pieces of it, or end it; or let the fault happen."""
        choices = []
        if self._process.device.alive:
            if fault == "death":
                self._outbox.append(pack_last_words("injected"))
                self._process.kill()
                return
            choices += [self._take] * bool(self._inbox) + [self._check] * bool(self._checking)
            if self._current is not None:
                choices.append(self._fail if fault else self._go_on)
            elif self._startable():
                choices.append(self._start)
        if self._outbox and not self._process.link.ended.done():
            choices.append(lambda: self._process.link._rang(self.direction))
        self._machine.rng.choice(choices)()

    def _take(self) -> None:
        record = self._inbox.popleft()
        match kind_of(record):
            case Kind.COPY:
                self._plan(messages.Copy.unpack(record))
            case Kind.CANCEL:
                for each in [each for each in self._queue if each[0].number == number_of(record)]:
                    self._queue.remove(each)
                    self._outbox.append(Done(each[0].number, Ended.CANCELLED).pack())
                for check in [check for check in self._checking if check[0].number == number_of(record)]:
                    if check[0].direction is Direction.LOAD:
                        self._checking.remove(check)
                        self._outbox.append(Done(check[0].number, Ended.CANCELLED).pack())
            case Kind.PRIORITIZE:
                for each in [each for each in self._queue if each[0].number == number_of(record)]:
                    self._queue.remove(each)
                    self._queue.appendleft(each)

    def _plan(self, copy: messages.Copy) -> None:
        """As `CopyLoop._copy`."""
        try:
            session = self._process.sessions[copy.session]
            parts = [(session.groups[part.group, part.slice], part.block_ids, part.slots) for part in copy.parts]
            plan = BlockCopies(parts, boundary=self._process.slab_bytes)
            after: Any = None if copy.event is None else session.events[copy.event]
        except Exception as error:
            raise Violation(f"a copier was given a {copy.direction} that it cannot make: {error!r}") from error
        copies = copies_of(plan, self._machine.rng.choice([None, 100, 1000]))
        queued = copy, after, copies, plan.nbytes
        if copy.checks is None or copy.direction is Direction.STORE:
            self._queue.append(queued)
            return

        def compared(check: SlotCheck) -> None:
            if check.wrong:
                self._outbox.append(Done(copy.number, Ended.CORRUPT, values=check.wrong).pack())
            else:
                self._queue.append(queued)

        self._checking.append((copy, SlotCheck(self._machine.pool, copy.checks), compared))

    def _check(self) -> None:
        """Read a slice of some copy's slots."""
        index = self._machine.rng.randrange(len(self._checking))
        _, check, over = self._checking[index]
        if not check.step(self._machine.rng.choice((1, 100, 1000, 1 << 20))):
            del self._checking[index]
            over(check)

    def _startable(self) -> list[int]:
        return [index for index, (_, after, _, _) in enumerate(self._queue) if after is None or after.is_done()]

    def _start(self) -> None:
        index = self._startable()[0]
        copy, after, copies, self._nbytes = self._queue[index]
        del self._queue[index]
        self._record = copy
        (self._current,) = [
            each for each in self._machine.inflight if each.link is self._process.link and each.number == copy.number
        ]
        self._current.pieces = _pieces(copies, self._machine.rng)
        if after is not None:
            self._outbox.append(pack_number(Kind.STARTED, copy.number))

    def _go_on(self) -> None:
        copy = self._current
        assert copy is not None
        if copy.pieces:
            for _ in range(self._machine.rng.randint(1, len(copy.pieces))):
                self._machine.move(copy, self._process.device)
        else:
            done = Done(copy.number, Ended.COPIED, self._nbytes)
            record = self._record
            assert record is not None
            if record.checks is None or record.direction is Direction.LOAD:
                self._end(done)
                return
            self._current = None

            def taken(check: SlotCheck) -> None:
                self._outbox.append(replace(done, values=check.values).pack())

            self._checking.append((record, SlotCheck(self._machine.pool, record.checks), taken))

    def _fail(self) -> None:
        assert self._current is not None
        self._machine.note(f"{self.direction} on {self._process.uuid} fails")
        self._end(Done(self._current.number, Ended.FAILED, error="injected"))

    def _end(self, done: Done) -> None:
        self._current = None
        self._outbox.append(done.pack())


class SimCopier(Copier):
    """The real copier, whose processes are of the simulation."""

    def __init__(self, copiers: SimCopiers, uuid: str, options: Options) -> None:
        super().__init__(uuid, None, options, lambda copier: copiers.on_change(copier), NO_GUARD, copiers.steps)
        self._copiers = copiers

    def launch(self, first: CopierLink | None = None) -> CopierLink:
        self._link = first or self._copiers.process(self.uuid).link
        return self._link


class SimCopiers(Copiers):
    """The real copiers, whose processes are of the simulation."""

    def __init__(self, machine: Machine, loop: SimLoop, uuids: Sequence[str], slab_bytes: int) -> None:
        self._machine, self._loop, self._slab_bytes = machine, loop, slab_bytes
        self.processes: list[SimProcess] = []
        """All that have ever been."""
        hello, options = Hello("simulation", "", dict.fromkeys(uuids), None), Options("simulation")
        first = self.process(uuids[0]).link
        first.state = ChildState.GREETED
        super().__init__(hello, first, options)
        self._copiers: dict[str, Copier] = {uuid: SimCopier(self, uuid, options) for uuid in uuids}

    def process(self, uuid: str) -> SimProcess:
        """A new one."""
        pid = FIRST_PID + len(self.processes)
        self.processes.append(SimProcess(self._machine, self._loop, uuid, pid, self._slab_bytes))
        return self.processes[-1]

    @property
    def living(self) -> list[SimProcess]:
        return [process for process in self.processes if process.device.alive]

    def workers(self) -> list[SimWorker]:
        """Those that have something to do."""
        return [
            worker
            for process in self.processes
            if not process.link.ended.done()
            for worker in process.workers
            if worker.can_step
        ]


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
