"""The daemon's side of one copier's process: requests, copies, and the end of both."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from kvsidecar.copier.control import pack_layouts, pack_source
from kvsidecar.copier.messages import (
    Checks,
    Copy,
    CopyPart,
    Done,
    Ended,
    Kind,
    Progress,
    kind_of,
    last_words_of,
    number_of,
    pack_number,
)
from kvsidecar.copier.ring import RING_BYTES, Receiver, Ring, RingFull, Sender
from kvsidecar.device.base import MemorySource
from kvsidecar.errors import CopyFailed, DeviceError, DeviceLost, ImportRefused
from kvsidecar.support.cpu_sleep import NO_GUARD, SleepGuard
from kvsidecar.support.host_memory import facts_of
from kvsidecar.support.memory_limits import Pages
from kvsidecar.support.steps import Steps
from kvsidecar.support.supervised_child import NOTHING, Child, ChildSetup, Launched, to_the_end
from kvsidecar.support.tasks import heard
from kvsidecar.types import Direction, GroupLayout


@dataclass(frozen=True, slots=True)
class Hello:
    """What a copier's process finds on this machine."""

    platform: str
    """``cuda`` or ``host``."""
    why: str
    """Why it is this platform, in a sentence."""
    devices: dict[str, int | None]
    """The devices to use, in the driver's order, and the host NUMA node nearest to each."""
    pin_limit: int | None
    """Bytes that a process may pin; None if there is no limit of the platform's own."""


@dataclass(frozen=True, slots=True)
class PoolFile:
    """The pool, as a copier maps it."""

    fd: int
    nbytes: int
    pages: Pages
    boundary: int
    """Each chunk that is pinned begins at a multiple of it: no copy spans one."""


@dataclass(frozen=True, slots=True)
class Imported:
    """An engine's allocation, as a copier knows it."""

    key: bytes
    """Identifies the allocation on its device."""
    nbytes: int
    """Size of the whole allocation, as the driver or kernel knows it, not as the client claims."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A rank's memory and events, imported."""

    memories: tuple[Imported, ...]
    kinds: tuple[tuple[str, ...], ...]
    """The kinds of copies of each group, for a trace."""
    num_events: int
    events_refused: str
    """Why its events are not used, if they are not."""


class Copying:
    """A copy that was handed to a copier.

    It ends once, when nothing of it moves any more: `on_end` is called with the copier's answer, or with DeviceLost if
    its process has ended.
    """

    __slots__ = ("_copy", "_ended", "_link", "end", "on_end", "on_start")

    def __init__(
        self,
        link: CopierLink,
        copy: Copy,
        on_start: Callable[[], None] | None,
        on_end: Callable[[Done | DeviceLost], None] | None,
    ) -> None:
        self._link, self._copy, self.on_start, self.on_end = link, copy, on_start, on_end
        self.end: Done | DeviceLost | None = None
        self._ended: asyncio.Future[Done] | None = None

    def set_end(self, end: Done | DeviceLost) -> None:
        """Called by the link when it is over."""
        # Let go of what is called: it refers to this, and only the garbage collector would free both, in one go with
        # those of many other copies.
        on_end, self.on_end, self.on_start = self.on_end, None, None
        self.end = end
        if self._ended is not None:
            _resolve(self._ended, end)
        if on_end is not None:
            on_end(end)

    @property
    def ended(self) -> asyncio.Future[Done]:
        """A future for coroutines that wait: resolved with `Done` (copied, or a corrupt load), CopyFailed or
        DeviceLost; cancelled, if the copy never started."""
        if self._ended is None:
            self._ended = asyncio.get_running_loop().create_future()
            if self.end is not None:
                _resolve(self._ended, self.end)
        return self._ended

    @property
    def direction(self) -> Direction:
        return self._copy.direction

    def cancel(self) -> None:
        """Do not start it, if it has not started yet."""
        self._tell(Kind.CANCEL)

    def prioritize(self) -> None:
        """Make it the next one of its direction, if it has not started yet."""
        self._tell(Kind.PRIORITIZE)

    def _tell(self, kind: Kind) -> None:
        if self.end is None:
            self._link.tell(self._copy.direction, kind, self._copy.number)


def _resolve(ended: asyncio.Future[Done], end: Done | DeviceLost) -> None:
    if ended.done():
        return  # cancelled by who waited
    if isinstance(end, DeviceLost):
        ended.set_exception(end)
    elif end.ended is Ended.CANCELLED:
        ended.cancel()
    elif end.ended is Ended.FAILED:
        ended.set_exception(CopyFailed(end.error))
    else:
        ended.set_result(end)


class CopierLink(Child):
    """One process, and the copies that it was handed. Used from the event loop.

    A copy that was sent ends exactly once: by the copier's answer, or with the process. The death of the process proves
    that none of its DMA runs any more (measured: docs/benchmarks.md), so its copies are over then.

    Args:
        guard: keeps the loop awake for a copy that is about to end.
    """

    NOUN, LOST, FAILED = "the copier", DeviceLost, DeviceError

    def __init__(self, launched: Launched, guard: SleepGuard = NO_GUARD, steps: Steps | None = None) -> None:
        super().__init__(launched)
        self._steps, self._guard = Steps() if steps is None else steps, guard
        self._rings: list[Ring] = []
        self._senders: dict[Direction, Sender] = {}
        self._receivers: dict[Direction, Receiver] = {}
        self._records: dict[Direction, deque[bytes]] = {direction: deque() for direction in Direction}
        """Records that it has written and that have not been handled; the first one waits for its turn."""
        self._mapped = False
        """The pool is mapped: its threads take records."""
        self._taken = dict.fromkeys(Direction, (-1, 0.0))
        """Bytes that it has taken from each ring, and when that was last seen to have grown, or to be all."""
        self._copies: dict[int, Copying] = {}
        self._handed = dict.fromkeys(Direction, 0)
        self._numbers = iter(range(1, 1 << 62))

    # -- requests ------------------------------------------------------------------------------------------------------

    async def hello(self, device: str, devices: Sequence[str], given: ChildSetup = NOTHING) -> Hello:
        """Make it examine the machine.

        Args:
            device: ``auto``, ``cuda`` or ``host``.
            devices: which to use, by UUID or index; empty for all.

        Raises:
            ConfigError, DriverUnusable, DeviceNotFound: see `kvsidecar.device.platforms.open_platform`.
            DeviceLost: the process has ended.
        """
        await self.greet(given)
        reply = await self.ask({"do": "hello", "device": device, "devices": list(devices)})
        return Hello(reply["platform"], reply["why"], dict(reply["devices"]), reply["pin_limit"])

    async def start(self, uuid: str, *, light_seconds: float = 0.0, ring_bytes: int = RING_BYTES) -> None:
        """Make it open its device and test it. It copies once the pool is mapped.

        Raises:
            DeviceError: the device cannot be used.
        """
        pairs = [(direction, Ring.create(ring_bytes), Ring.create(ring_bytes)) for direction in Direction]
        for direction, there, back in pairs:
            self._rings += (there, back)
            self._senders[direction], self._receivers[direction] = Sender(there), Receiver(back)
            self._loop.add_reader(back.bell, self._rang, direction)
        fds = [fd for ring in self._rings for fd in (ring.memory, ring.bell)]
        await self.ask({"do": "start", "uuid": uuid, "light_seconds": light_seconds, "ring_bytes": ring_bytes}, fds)

    async def map(self, pool: PoolFile) -> None:
        """Make it map the pool."""
        await self.ask({"do": "map", "pool": facts_of(pool), "boundary": pool.boundary}, [pool.fd])
        self._mapped = True

    async def pin(self, offset: int, nbytes: int) -> None:
        """Pin one chunk of the pool. Raises PinFailed: nothing of it is pinned."""
        await self.ask({"do": "pin", "offset": offset, "nbytes": nbytes})

    async def unpin(self, offset: int, nbytes: int) -> None:
        await self.ask({"do": "unpin", "offset": offset, "nbytes": nbytes})

    async def open(
        self,
        session: int,
        sources: Sequence[MemorySource],
        layouts: Sequence[GroupLayout],
        events: Sequence[bytes],
        fence: int | None = None,
    ) -> Opened:
        """Import a rank's memory.

        Args:
            fence: descriptor of its engine's `kvsidecar.support.fence`, if it has one.

        Raises:
            ImportRefused, DeviceError: nothing was imported.
        """
        groups = await asyncio.to_thread(pack_layouts, layouts)  # thousands of regions would hold up the loop
        fds: list[int] = []
        request = {
            "do": "open",
            "session": session,
            "allocations": [pack_source(each, fds) for each in sources],
            "groups": groups,
            "events": [each.hex() for each in events],
            "fence": None if fence is None else len(fds),
        }
        if fence is not None:
            fds.append(fence)
        try:
            reply = await self.ask(request, fds)
        except OSError as error:
            raise ImportRefused(f"the memory cannot be passed to the copier: {error.strerror}") from error
        except asyncio.CancelledError:
            with suppress(DeviceLost):  # a process that has ended holds no memory
                await to_the_end(self.close_session(session))  # the caller does not know that it is open
            raise
        memories = tuple(Imported(bytes.fromhex(key), nbytes) for key, nbytes in reply["memories"])
        return Opened(memories, tuple(map(tuple, reply["kinds"])), reply["num_events"], reply["events_refused"])

    async def close_session(self, session: int) -> None:
        """Give a session's memory back, if it is open. None of its copies may be under way."""
        await self.ask({"do": "close", "session": session})

    # -- copies --------------------------------------------------------------------------------------------------------

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
        """Hand over a copy.

        Args:
            checks, weight: see `Copy`.
            event: index of the session's event that must be done before the copy starts.
            on_start: called when that event is not needed any more.
            on_end: called once, when nothing of it moves any more. It must not raise.

        Raises:
            DeviceLost: the process has ended.
            CopyFailed: the copy has too many blocks for a ring.
        """
        if self.ended.done():
            raise DeviceLost(self.ended.result())
        copy = Copy(next(self._numbers), session, direction, parts, event, checks, weight)
        try:
            self._senders[direction].send(copy.pack())
        except RingFull as error:
            raise CopyFailed(str(error)) from error
        copying = self._copies[copy.number] = Copying(self, copy, on_start, on_end)
        self._handed[direction] += 1
        return copying

    def tell(self, direction: Direction, kind: Kind, number: int) -> None:
        """Send a record that has no answer of its own."""
        if not self.ended.done():
            self._senders[direction].send(pack_number(kind, number))

    def set_pace(self, nbytes: int | None) -> None:
        """Set the most bytes of stores in flight at a time; None for the whole link."""
        self.tell(Direction.STORE, Kind.PACE, nbytes or 0)

    def copies(self, direction: Direction) -> tuple[int, int]:
        """How many copies wait for their turn, and how many are in flight: one, or none."""
        handed = self._handed[direction]
        running = handed > 0 and self._senders[direction].ring.progress[Progress.IN_FLIGHT] > 0
        return handed - running, int(running)

    def stuck(self, seconds: float) -> str:
        """What has made no progress for longer than this; empty if nothing has.

        Called again and again: that a direction takes nothing is seen by comparison with earlier calls.
        """
        now = time.monotonic()
        if self.ended.done():
            return ""
        for direction, sender in self._senders.items() if self._mapped else ():
            taken, seen = sender.taken_bytes, self._taken[direction]
            if taken != seen[0] or not sender.untaken_bytes:
                self._taken[direction] = seen = taken, now
            since = {
                f"a {direction} has been in flight": sender.ring.progress[Progress.IN_FLIGHT],
                f"the thread of {direction}s has been in one call": sender.ring.progress[Progress.WORKING],
                f"the thread of {direction}s has taken nothing": seen[1],
            }
            for what, when in since.items():
                if when and now - when > seconds:
                    return f"{what} for {now - when:.0f} s"
        return super().stuck(seconds)

    def _rang(self, direction: Direction) -> None:
        records = self._records[direction]
        if not records:  # else all that come meanwhile are taken at once, when these have had their turns
            records += self._receivers[direction].take()
            self._take_records(direction)
        self._senders[direction].flush()

    def _take_records(self, direction: Direction, *, at_once: bool = False) -> None:
        """Handle the records, up to the end of a copy that must wait for its turn."""
        records = self._records[direction]
        while records:
            kind = kind_of(records[0])
            if kind is Kind.DONE and not at_once and not self._steps.may_begin():
                self._steps.later(partial(self._step, direction))
                return
            self._take(kind, records.popleft())

    def _take(self, kind: Kind, record: bytes) -> None:
        try:
            match kind:
                case Kind.DONE:
                    self._done(Done.unpack(record))
                case Kind.STARTED:
                    copying = self._copies.get(number_of(record))
                    if copying is not None and copying.on_start is not None:
                        copying.on_start()
                case Kind.SOON:
                    self._guard.keep_awake()
                case Kind.LAST_WORDS:
                    self._last_words = last_words_of(record)
        except Exception as error:  # noqa: BLE001 - reported; the records behind it are of other copies
            heard("a copier's record was not handled", error)

    def _step(self, direction: Direction) -> None:
        """Handle the end of a copy, at its turn, and the records after it."""
        if self._records[direction]:  # else the process has ended meanwhile
            self._take(Kind.DONE, self._records[direction].popleft())
            self._take_records(direction)

    def _done(self, done: Done) -> None:
        copying = self._copies.pop(done.number)
        self._handed[copying.direction] -= 1
        copying.set_end(done)

    # -- the end -------------------------------------------------------------------------------------------------------

    def _before_end(self) -> None:
        # The records that it wrote before are taken first: a copy that was done stays done.
        for direction, receiver in self._receivers.items():
            self._records[direction] += receiver.take()
            self._take_records(direction, at_once=True)
            self._loop.remove_reader(receiver.bell)

    def _after_end(self, reason: str) -> None:
        copies, self._copies = self._copies, {}
        self._handed = dict.fromkeys(Direction, 0)
        for copying in copies.values():
            try:
                copying.set_end(DeviceLost(reason))
            except Exception as error:  # noqa: BLE001 - reported; the other copies are over, too
                heard("a copy has not ended in order", error)
        for ring in self._rings:
            ring.close()
