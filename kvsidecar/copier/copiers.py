"""The copiers of a daemon, one for each device: started side by side, watched, replaced when one ends.

A copier that has ended is replaced by one that pins the same chunks of the pool. It knows no ranks: its predecessor's
attach again, because a rank must know whose death proves that its copies are over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from kvsidecar.copier import PROGRAM
from kvsidecar.copier.link import CopierLink, Hello, Opened, PoolFile
from kvsidecar.copier.store_pacing import StorePacing
from kvsidecar.device.base import MemorySource
from kvsidecar.errors import DeviceError, DeviceLost, DeviceNotFound, KVSidecarError, PinFailed, TooManyProcesses
from kvsidecar.support.cpu_sleep import NO_GUARD, SleepGuard
from kvsidecar.support.steps import Steps
from kvsidecar.support.supervised_child import NOTHING, ChildSetup, ChildState, Supervised, launch
from kvsidecar.support.tasks import TaskSet
from kvsidecar.types import Direction, GroupLayout

START_ATTEMPTS: Final = 3
"""Processes of one device that may end while the daemon starts, before its start has failed."""


@dataclass(frozen=True, slots=True)
class Options:
    """How every copier is set up."""

    device: str
    """``auto``, ``cuda`` or ``host``."""
    devices: tuple[str, ...] = ()
    """The devices to use, by UUID or index; empty for all."""
    light_seconds: float = 0.0
    given: ChildSetup = NOTHING


class Copier(Supervised[CopierLink]):
    """One device's copier. Outlives its process: a dead one is replaced. Used from the event loop.

    Requests and replacement take turns under one lock, so a new process pins all that the one before had pinned.

    Args:
        on_change: called with this when it stops working, and when it works again.
    """

    NOT_STARTED = "the copier does not start: "
    # Not at once: after the machine was suspended, every copy looks old until its thread has had time to see that it is
    # over.
    HUNG_CHECKS = 8
    SETTLED_SECONDS = 5.0
    FREE_DEATHS = 1

    def __init__(
        self,
        uuid: str,
        numa_node: int | None,
        options: Options,
        on_change: Callable[[Copier], None],
        guard: SleepGuard,
        steps: Steps,
    ) -> None:
        super().__init__("copier", {"device": uuid}, options.given)
        self.uuid, self.numa_node = uuid, numa_node
        self._options, self._on_change, self._guard, self._steps = options, on_change, guard, steps
        self._lock = asyncio.Lock()
        self._changed = asyncio.Event()
        """Set when `down` changes."""
        self._pool: PoolFile | None = None
        self._chunks: list[tuple[int, int]] = []
        """Offset and bytes of the chunks that are pinned."""
        self._pace: int | None = None

    @property
    def pid(self) -> int:
        """Process id of its process; 0 if there is none."""
        return 0 if self._link is None else self._link.pid

    # -- the process ---------------------------------------------------------------------------------------------------

    def launch(self, first: CopierLink | None = None) -> CopierLink:
        """Start its process, which then waits to be set up by `run`.

        Args:
            first: a process that has answered `CopierLink.hello`.

        Raises:
            TooManyProcesses, OSError: no process can be started.
        """
        self._link = link = first or CopierLink(launch(PROGRAM), self._guard, self._steps)
        return link

    async def _start(self) -> CopierLink:
        """A process that is set up: open, with the pool mapped and its chunks pinned."""
        if (link := self.alive) is None:
            link = self.launch()
        async with self._lock:
            if link.state is ChildState.LAUNCHED:
                await link.hello(self._options.device, [self.uuid], self._given)
            await link.start(self.uuid, light_seconds=self._options.light_seconds)
            if self._pool is not None:
                await link.map(self._pool)
            for offset, nbytes in self._chunks:
                await link.pin(offset, nbytes)
            link.set_pace(self._pace)
        return link

    def _set_down(self, reason: str) -> None:
        if reason != self.down:
            super()._set_down(reason)
            self._on_change(self)
        self._changed.set()
        self._changed.clear()

    async def working(self) -> None:
        """Return when it works.

        Raises:
            DeviceError: it has not worked for `START_ATTEMPTS` processes, or ends with the daemon; the text says why.
        """
        if self._closing:
            raise DeviceLost(f"{self.uuid}: the daemon ends")
        while self.down:
            if self._failures >= START_ATTEMPTS:
                raise DeviceError(f"{self.uuid}: {self.down}")
            await self._changed.wait()

    async def tell_log_level(self, level: str) -> None:
        """Set the log level of this process and of its successors."""
        super().set_log_level(level)
        async with self._lock:
            if self._link is not None and self._link.state is ChildState.GREETED:
                with suppress(DeviceLost):
                    await self._link.set_log(self._given)

    def live(self) -> CopierLink:
        """The process, for copies.

        Raises:
            DeviceLost: it takes none now.
        """
        if (link := self.at_work) is None:
            raise DeviceLost(f"{self.uuid}: {self.down or 'the copier has ended'}")
        return link

    # -- the pool ------------------------------------------------------------------------------------------------------

    async def map(self, pool: PoolFile) -> None:
        """Map the pool. Copies may be handed over from then on."""
        async with self._lock:
            self._pool = pool
            with suppress(DeviceLost):  # the next process is told
                await self.live().map(pool)

    async def pin(self, offset: int, nbytes: int) -> None:
        """Pin one chunk of the pool. A process that dies meanwhile is replaced.

        Raises:
            PinFailed: nothing of this chunk is pinned.
        """
        while True:
            try:
                await self.working()
                async with self._lock:
                    await self.live().pin(offset, nbytes)
                    self._chunks.append((offset, nbytes))
                return
            except DeviceLost as error:
                if self._closing:
                    raise PinFailed(str(error)) from error
                await asyncio.sleep(0)  # `run` learns of it too
            except (KVSidecarError, OSError) as error:
                raise PinFailed(str(error) if self.uuid in str(error) else f"{self.uuid}: {error}") from error

    async def unpin(self, offset: int, nbytes: int) -> None:
        """Undo `pin` of exactly this chunk."""
        async with self._lock:
            if (offset, nbytes) in self._chunks:
                self._chunks.remove((offset, nbytes))
                with suppress(DeviceLost):  # a process that has ended has nothing pinned
                    await self.live().unpin(offset, nbytes)

    # -- sessions and copies -------------------------------------------------------------------------------------------

    async def open(
        self,
        session: int,
        sources: Sequence[MemorySource],
        layouts: Sequence[GroupLayout],
        events: Sequence[bytes],
        fence: int | None = None,
    ) -> tuple[Opened, int]:
        """Import a rank's memory. Waits for a process that starts, not for one that replaces another.

        Args:
            fence: as in `CopierLink.open`.

        Returns:
            What was imported, and the process that has it.

        Raises:
            ImportRefused, DeviceError: nothing was imported.
        """
        if not self.deaths:
            await self.working()
        async with self._lock:
            link = self.live()
            return await link.open(session, sources, layouts, events, fence), link.pid

    async def close_session(self, session: int, pid: int) -> None:
        """Give a session's memory back. None of its copies may be under way.

        Args:
            pid: of the process that has it: the memory of one that has ended is given back.
        """
        async with self._lock:
            if pid == self.pid:
                with suppress(DeviceLost):
                    await self.live().close_session(session)

    def copies(self, direction: Direction) -> tuple[int, int]:
        """How many copies wait for their turn, and how many are in flight."""
        return (0, 0) if self.down or self._link is None else self._link.copies(direction)

    def set_pace(self, nbytes: int | None) -> None:
        """Set the most bytes of stores in flight at a time; None for the whole link."""
        if nbytes != self._pace:
            self._pace = nbytes
            if (link := self.at_work) is not None:  # else the next process is told
                link.set_pace(nbytes)


class Copiers:
    """All copiers of a daemon. Used from the event loop.

    Args:
        hello: what the first process has found.
        first: that process, which becomes the copier of the first device.
        store_chunk: see `StorePacing`.
        steps: turns of the ends of copies; those of the link of ``first``.
        on_error: called with (task name, error) if the supervision of a copier fails.
    """

    def __init__(
        self,
        hello: Hello,
        first: CopierLink,
        options: Options,
        *,
        store_chunk: int | None = None,
        guard: SleepGuard = NO_GUARD,
        steps: Steps | None = None,
        on_error: Callable[[str, BaseException], None] = lambda *_: None,
    ) -> None:
        self.hello = hello
        self.on_change: Callable[[Copier], None] = lambda _: None
        """Called with a copier when it stops working, and when it works again."""
        self._first, self._guard = first, guard
        self.steps = Steps() if steps is None else steps
        """Turns of the steps of all jobs."""
        self._options = replace(options, device=hello.platform)
        self._tasks = TaskSet(on_error)
        self._copiers = {
            uuid: Copier(uuid, node, self._options, lambda copier: self.on_change(copier), guard, self.steps)
            for uuid, node in hello.devices.items()
        }
        self.pacing = StorePacing(store_chunk, self._set_paces)

    def __iter__(self) -> Iterator[Copier]:
        return iter(self._copiers.values())

    def copier(self, uuid: str) -> Copier:
        """The copier of a device.

        Raises:
            DeviceNotFound: the daemon does not use such a device; the text lists those that it does.
        """
        if uuid not in self._copiers:
            raise DeviceNotFound(f"device {uuid} is not visible to the daemon; visible: {', '.join(self._copiers)}")
        return self._copiers[uuid]

    def _set_paces(self) -> None:
        for copier in self:
            copier.set_pace(self.pacing.of(copier.uuid, Direction.STORE))

    def set_log_level(self, level: str) -> None:
        for copier in self:
            self._tasks.spawn(copier.tell_log_level(level), name=f"log-level-{copier.uuid}")

    # -- start and stop ------------------------------------------------------------------------------------------------

    def launch(self) -> None:
        """Start all processes, as far as the system has them now; `start` tries again."""
        first: CopierLink | None = self._first
        for copier in self:
            with suppress(OSError, TooManyProcesses):
                copier.launch(first)
            first = None

    def pidfds(self) -> dict[int, int]:
        """The process ids and pidfds of all that live. The descriptors are ours."""
        return {link.pid: link.pidfd for copier in self if (link := copier.alive) is not None}

    async def start(self) -> None:
        """Set all up, side by side.

        Raises:
            DeviceError: one cannot be used; the text names it.
        """
        for copier in self:
            self._tasks.keep(copier.run, name=f"copier-{copier.uuid}")
        await self._all(lambda copier: copier.working())

    async def map(self, pool: PoolFile) -> None:
        await self._all(lambda copier: copier.map(pool))

    async def pin(self, offset: int, nbytes: int) -> None:
        """Pin one chunk of the pool in all of them.

        Raises:
            PinFailed: nothing of this chunk is pinned.
        """
        try:
            await self._all(lambda copier: copier.pin(offset, nbytes))
        except PinFailed:
            await self.unpin(offset, nbytes)
            raise

    async def unpin(self, offset: int, nbytes: int) -> None:
        await self._all(lambda copier: copier.unpin(offset, nbytes))

    def check(self, stuck_seconds: float) -> None:
        """Kill those that hang."""
        for copier in self:
            copier.check(stuck_seconds)

    def unkillable(self, seconds: float) -> str:
        """The copiers that still live this long after they were killed, as text; empty if there are none."""
        return "; ".join(
            f"{copier.uuid}: the copier (pid {link.pid}) was killed and does not end"
            for copier in self
            if (link := copier.alive) is not None and link.killed_seconds > seconds
        )

    async def close(self) -> None:
        """End all processes, and with them all copies. Returns when they are dead."""
        await self._all(lambda copier: copier.close())
        self._first.kill()
        await asyncio.shield(self._first.ended)
        await self._tasks.cancel()

    async def _all(self, call: Callable[[Copier], Coroutine[Any, Any, None]]) -> None:
        """Call it for each, side by side; raise the first error when all have returned."""
        results = await asyncio.gather(*map(call, self), return_exceptions=True)
        for error in filter(None, results):
            raise error
