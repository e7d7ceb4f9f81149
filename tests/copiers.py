"""The daemon's own side of its copiers, over processes that are none: a test answers for them."""

from __future__ import annotations

import asyncio
import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsidecar.copier.copiers import Copier, Copiers, Options
from kvsidecar.copier.link import CopierLink, Hello
from kvsidecar.copier.messages import CHECK, Copy, Done, Ended, Kind, kind_of, number_of
from kvsidecar.copier.process import Sessions
from kvsidecar.copier.slot_check import SlotCheck
from kvsidecar.device.base import Device
from kvsidecar.device.host import HostDevice
from kvsidecar.errors import DeviceLost
from kvsidecar.support.cpu_sleep import NO_GUARD
from kvsidecar.support.loop_time import LoopTime
from kvsidecar.support.steps import Steps
from kvsidecar.support.supervised_child import ChildState
from kvsidecar.types import Direction

Answer = Callable[[dict[str, Any], Sequence[int]], dict[str, Any] | None]


class Records:
    """One way of one direction: what was sent and not taken. For a `Sender` and a `Receiver` both."""

    bell = 1 << 30
    """Nothing rings: a number that no descriptor has."""

    def __init__(self) -> None:
        self.sent: deque[bytes] = deque()

    def send(self, record: bytes) -> None:
        self.sent.append(record)

    def flush(self) -> None:
        """Nothing waits for room."""

    def take(self) -> list[bytes]:
        taken = list(self.sent)
        self.sent.clear()
        return taken


class NoProcess:
    """What a link needs of a `subprocess.Popen`."""

    def __init__(self, pid: int, on_kill: Callable[[], None]) -> None:
        self.pid = pid
        self.kill = on_kill

    def wait(self) -> int:
        return -9


class NoProcessLink(CopierLink):
    """The real link without a process at its other end: records wait in lists, a request is answered by a function.

    Args:
        answer: called in a thread with a request and its descriptors; None as its answer: the process has ended.
        on_kill: the process is killed. Its death is announced by `died`.
    """

    def __init__(self, pid: int, answer: Answer, on_kill: Callable[[], None]) -> None:
        # Not the constructor of the class: it wants a process.
        self.state = ChildState.LAUNCHED
        self.pid = pid
        self._process: Any = NoProcess(pid, on_kill)
        self._connection: Any = SimpleNamespace(close=lambda: None)
        self._guard = NO_GUARD
        self._steps = Steps(LoopTime(seconds=math.inf))
        self._records = {direction: deque() for direction in Direction}
        self._mapped = True
        self.pidfd = -1
        self._rings = []
        self.to_process = {direction: Records() for direction in Direction}
        self.from_process = {direction: Records() for direction in Direction}
        self._senders: Any = self.to_process
        self._receivers: Any = self.from_process
        self._taken = dict.fromkeys(Direction, (0, 0.0))
        self._asking = asyncio.Lock()
        self._copies = {}
        self._handed = dict.fromkeys(Direction, 0)
        self._numbers = iter(range(1, 1 << 62))
        self._loop = asyncio.get_running_loop()
        self._asked_at = 0.0
        self._last_words = ""
        self._killed_at = 0.0
        self.ended = self._loop.create_future()
        self._answer = answer

    async def start(self, uuid: str, *, light_seconds: float = 0.0, ring_bytes: int = 0) -> None:
        await self.ask({"do": "start", "uuid": uuid})

    async def ask(self, request: dict[str, Any], fds: Sequence[int] = ()) -> dict[str, Any]:
        async with self._asking:
            reply = None if self.ended.done() else await asyncio.to_thread(self._answer, request, fds)
        if reply is None:
            raise DeviceLost(await self.ended)
        return reply

    def say(self, direction: Direction, record: bytes) -> None:
        """The process says this, and the daemon reads it at once."""
        self.from_process[direction].send(record)
        self._rang(direction)

    def died(self) -> None:
        """The kernel says that the process has ended."""
        self.pidfd = os.eventfd(0)  # which the real link closes
        self._died()


class HeldCopies:
    """The copies of one direction that a link was given. They end when the test says so.

    Args:
        pool: of which checksums are taken; None if the test wants none.
    """

    def __init__(self, link: NoProcessLink, direction: Direction, pool: npt.NDArray[np.uint8] | None = None) -> None:
        self._link, self._direction, self._pool = link, direction, pool
        self._copies: list[Copy] = []
        self._cancelled: list[int] = []
        self.first: list[int] = []
        """Numbers of copies that were to be the next one, in order."""

    @property
    def copies(self) -> list[Copy]:
        for record in self._link.to_process[self._direction].take():
            if kind_of(record) is Kind.COPY:
                self._copies.append(Copy.unpack(record))
            elif kind_of(record) is Kind.CANCEL:
                self._cancelled.append(number_of(record))
            elif kind_of(record) is Kind.PRIORITIZE:
                self.first.append(number_of(record))
        return self._copies

    def nbytes(self, block_bytes: int, index: int = -1) -> int:
        return block_bytes * sum(len(part.block_ids) for part in self.copies[index].parts)

    def end(self, nbytes: int, index: int = -1) -> None:
        """It has copied so many bytes, in a millisecond."""
        copy = self.copies[index]
        values = self.checked(index).values if copy.direction is Direction.STORE else ()
        done = Done(copy.number, Ended.COPIED, nbytes, 0.001, 0.0, 1.0, values)
        self._link.say(self._direction, done.pack())

    def checked(self, index: int = -1) -> SlotCheck:
        """What the pool holds now in the slots that the copy wants to be checked."""
        checks = self.copies[index].checks
        if checks is None:
            return SlotCheck(np.empty(0, np.uint8), np.empty(0, CHECK))
        assert self._pool is not None
        check = SlotCheck(self._pool, checks)
        while check.step():
            pass
        return check

    def refuse(self, index: int = -1) -> None:
        """Its slots are not as expected."""
        wrong = self.checked(index).wrong
        assert wrong
        self._link.say(self._direction, Done(self.copies[index].number, Ended.CORRUPT, values=wrong).pack())

    def fail(self, error: str) -> None:
        self._link.say(self._direction, Done(self.copies[-1].number, Ended.FAILED, error=error).pack())

    def break_(self, error: Exception) -> None:
        """What no copier does: an exception that nobody expects."""
        self._link._copies.pop(self.copies[-1].number).set_end(error)  # type: ignore[arg-type]

    def cancel(self) -> None:
        """It has not started, and was cancelled by the daemon."""
        number = self.copies[-1].number
        assert number in self._cancelled
        self._link.say(self._direction, Done(number, Ended.CANCELLED).pack())


class NoProcessCopier(Copier):
    """The real copier of a device, over links without processes. The sessions of a process are the real ones, too."""

    pool: npt.NDArray[np.uint8] | None = None

    def __init__(self, uuid: str, first_pid: int = 1) -> None:
        super().__init__(uuid, None, Options("host"), lambda _: None, NO_GUARD, Steps())
        self.on_request: Callable[[str], None] = lambda _: None
        """Called in the thread of a request, with its name, before it is answered."""
        self.after_request: Callable[[str], None] = lambda _: None
        self.device: Device = HostDevice(uuid)
        self._next_pid = first_pid
        self.start_again()

    @property
    def link(self) -> NoProcessLink:
        assert isinstance(self._link, NoProcessLink)
        return self._link

    def start_again(self) -> None:
        """The next process works."""
        self._sessions = Sessions(self.device)
        self._link = NoProcessLink(self._next_pid, self._answer, lambda: None)
        self._next_pid += 1
        self.held = {direction: HeldCopies(self.link, direction, self.pool) for direction in Direction}
        self.down = ""

    def die(self, *, noticed: bool = True) -> None:
        """Its process ends, and with it all that it had mapped.

        Args:
            noticed: `down` says so.
        """
        self.device = HostDevice(self.uuid)
        self._sessions = Sessions(self.device)
        self.link.died()
        self.deaths += 1
        if noticed:
            self.down = self.link.ended.result()

    def _answer(self, request: dict[str, Any], fds: Sequence[int]) -> dict[str, Any] | None:
        link, sessions, device = self.link, self._sessions, self.device
        self.on_request(request["do"])
        if device is not self.device:
            return None
        reply = sessions.open(request, fds) if request["do"] == "open" else sessions.close(request)
        self.after_request(request["do"])
        return None if link is not self._link else reply

    @property
    def sessions(self) -> set[int]:
        """What its process has mapped for whom."""
        return set(self._sessions._sessions)


class NoProcessCopiers(Copiers):
    def __init__(self, *uuids: str, store_chunk: int | None = None) -> None:
        uuids = uuids or ("host",)
        nothing: Any = None
        super().__init__(
            Hello("host", "", dict.fromkeys(uuids), None), nothing, Options("host"), store_chunk=store_chunk
        )
        self.by_uuid = {uuid: NoProcessCopier(uuid, 1 + 1000 * index) for index, uuid in enumerate(uuids)}
        self._copiers = dict(self.by_uuid)
