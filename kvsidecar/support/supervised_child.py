"""A child of the daemon: a process of its own that is started, asked, killed when it hangs, and replaced when it ends.

The death of a child is the proof that nothing of it touches the pool any more; its pidfd reports it. The child's own
side is `kvsidecar.support.child_side`. Imports little: the first child starts while the daemon still imports its own
modules.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Final, Generic, TypeVar

import kvsidecar
from kvsidecar import errors
from kvsidecar.errors import KVSidecarError, TooManyProcesses
from kvsidecar.support import log
from kvsidecar.support.child_process import how_ended, spawn
from kvsidecar.support.child_side import READ_BYTES, Message, pack, unpack
from kvsidecar.support.peer import MAX_FDS, send_fds

T = TypeVar("T")

ANSWER_SECONDS: Final = 60.0
"""A request that takes longer counts as stuck. The slowest ones pin a chunk, make a context or open a file system."""
FIRST_PAUSE_SECONDS: Final = 0.5
LONGEST_PAUSE_SECONDS: Final = 30.0
"""Longest wait between attempts to replace a child. Waits double each time."""
FULL_SECONDS: Final = 0.005
"""Wait between attempts to send descriptors while this user has too many in flight."""

_ROOT: Final = str(Path(kvsidecar.__file__).resolve().parents[1])


@dataclass(frozen=True, slots=True)
class Launched:
    """A process that was started, and the daemon's end of its socket."""

    process: subprocess.Popen[bytes]
    connection: socket.socket


@dataclass(frozen=True, slots=True)
class ChildSetup:
    """What every child gets before its first request."""

    kept: tuple[int, ...] = ()
    """Descriptors that stay open in it, such as the daemon's lock: the next daemon gets the lock when the last child
    has ended, too."""
    log_format: str = "json"
    log_level: str = "info"


NOTHING: Final = ChildSetup()


def launch(module: str) -> Launched:
    """Start a process that runs a module, and waits for requests.

    Call this in the main thread: the kernel kills the process when the thread that started it ends.

    It inherits no lock: stopped in its first instants, before it has asked the kernel to die with the daemon, it would
    hold it for ever. It is given the locks afterwards: see `Child.greet`.

    Raises:
        TooManyProcesses, OSError: no process can be started.
    """
    near, far = socket.socketpair()
    # -P: a module in the working directory must not take the place of one of ours.
    command = [sys.executable, "-P", "-m", module, str(far.fileno())]
    paths = [_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        with far:
            far.set_inheritable(True)
            process = spawn(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )
    except BaseException:
        near.close()
        raise
    return Launched(process, near)


async def exchange(connection: socket.socket, request: Message, fds: Sequence[int] = ()) -> Message | None:
    """Send one request, and wait for its answer. None: the other end has gone.

    Raises:
        OSError: nothing was sent: a descriptor is not open, or there are too many.
    """
    loop, received = asyncio.get_running_loop(), bytearray()
    data = memoryview(await asyncio.to_thread(pack, request))  # thousands of regions would hold up the loop
    try:
        sent = 0  # bytes; each that has descriptors goes at once: what was sent before is answered
        for first in range(0, len(fds), MAX_FDS):
            while not send_fds(connection, data[sent : sent + 1], fds[first : first + MAX_FDS]):  # noqa: ASYNC110 - no event
                await asyncio.sleep(FULL_SECONDS)
            sent += 1
        await loop.sock_sendall(connection, data[sent:])
        while (reply := unpack(received)) is None:
            if not (more := await loop.sock_recv(connection, READ_BYTES)):
                return None
            received += more
    except ConnectionError:
        return None
    return reply


async def to_the_end(work: Coroutine[Any, Any, T], on_cancel: Callable[[], object] = lambda: None) -> T:
    """Wait until it has ended, even if cancelled meanwhile; raises CancelledError then, after the end."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
            on_cancel()
    if cancelled is not None:
        task.exception()  # so that asyncio does not complain that nobody asked for it
        raise cancelled
    return task.result()


class ChildState(Enum):
    """The life of one child process."""

    LAUNCHED = "launched"
    """It holds nothing that another daemon waits for: the kernel may not kill it with this one yet."""
    GREETED = "greeted"
    KILLED = "killed"
    ENDED = "ended"


_NEXT: Final = {
    ChildState.LAUNCHED: {ChildState.GREETED, ChildState.KILLED, ChildState.ENDED},
    ChildState.GREETED: {ChildState.KILLED, ChildState.ENDED},
    ChildState.KILLED: {ChildState.ENDED},
    ChildState.ENDED: set[ChildState](),
}


class Child:
    """One process, and requests to it, one at a time. Used from the event loop."""

    NOUN: ClassVar[str]
    """What it is, at the beginning of a sentence about its end."""
    LOST: ClassVar[type[KVSidecarError]]
    """Raised by code that needs it after its end."""
    FAILED: ClassVar[type[KVSidecarError]]
    """Raised if it answers with an error that is not in `kvsidecar.errors`."""

    def __init__(self, launched: Launched) -> None:
        self.state = ChildState.LAUNCHED
        self._process, self._connection = launched.process, launched.connection
        self._connection.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._asking = asyncio.Lock()
        self._asked_at = 0.0
        """When the request being answered was sent; 0 if there is none."""
        self._last_words = ""
        self._killed_at = 0.0
        self.pid = launched.process.pid
        self.pidfd = os.pidfd_open(self.pid)
        """Ours; closed when the process has ended."""
        self._loop.add_reader(self.pidfd, self._died)
        self.ended: asyncio.Future[str] = self._loop.create_future()
        """Resolved with the reason when the process is dead."""

    @property
    def killed_seconds(self) -> float:
        """How long ago it was killed, if it still lives; else 0."""
        return time.monotonic() - self._killed_at if self.state is ChildState.KILLED else 0.0

    async def greet(self, given: ChildSetup) -> None:
        """Raises `LOST`: the process has ended."""
        # It answers when the kernel kills it with the daemon, whatever it does. Before that it may have no lock, nor a
        # descriptor of one that waits in its socket.
        await self.ask({"do": "bound"})
        await self.ask({"do": "keep"}, given.kept)
        await self.set_log(given)
        self._become(ChildState.GREETED)

    async def set_log(self, given: ChildSetup) -> None:
        """Raises `LOST`: the process has ended."""
        await self.ask({"do": "log", "log_format": given.log_format, "log_level": given.log_level})

    async def ask(self, request: Message, fds: Sequence[int] = ()) -> Message:
        """Send one request; requests are answered in order. A request that was sent is not cancelled: the cancellation
        takes effect when it is answered.

        Raises:
            LOST: the process has ended.
            KVSidecarError: the error that it answers with.
            OSError: nothing was sent: a descriptor cannot be passed.
        """
        async with self._asking:
            self._asked_at = time.monotonic()
            try:
                reply = None if self.ended.done() else await to_the_end(exchange(self._connection, request, fds))
            finally:
                self._asked_at = 0.0
                if self.ended.done():
                    self._connection.close()
        if reply is None:
            raise self.LOST(await asyncio.shield(self.ended))
        if (name := reply.get("error")) is not None:
            kind = getattr(errors, name, None)
            known = isinstance(kind, type) and issubclass(kind, KVSidecarError)
            raise (kind if known else self.FAILED)(reply["text"])  # type: ignore[misc]
        return reply

    def stuck(self, seconds: float) -> str:
        """What has made no progress for longer than this; empty if nothing has."""
        if self._asked_at and (waited := time.monotonic() - self._asked_at) > ANSWER_SECONDS:
            return f"a request has not been answered for {waited:.0f} s"
        return ""

    def kill(self, reason: str = "") -> None:
        """End the process at once, whatever it does."""
        if self._become(ChildState.KILLED):
            self._last_words, self._killed_at = reason, time.monotonic()
            self._process.kill()

    def _become(self, state: ChildState) -> bool:
        if possible := state in _NEXT[self.state]:
            self.state = state
        return possible

    def _died(self) -> None:
        self._become(ChildState.ENDED)
        self._loop.remove_reader(self.pidfd)
        os.close(self.pidfd)
        if not self._asking.locked():
            self._connection.close()  # else `ask` does, which still uses it
        code = self._process.wait()
        try:
            self._before_end()
        finally:  # whoever waits for its end must hear of it
            reason = f"{self.NOUN} has ended ({self._last_words or how_ended(code)})"
            self.ended.set_result(reason)
            self._after_end(reason)

    def _before_end(self) -> None:
        """Read what it sent before it died."""

    def _after_end(self, reason: str) -> None:
        """Settle all that it was asked for: nothing of it moves any more."""


C = TypeVar("C", bound=Child)


class Supervised(ABC, Generic[C]):
    """One child. Outlives its process: a dead one is replaced. Used from the event loop.

    Args:
        noun: what the log calls it.
        whose: values in each line of the log about it.
        given: to each of its processes.
    """

    NOT_STARTED: ClassVar[str] = ""
    """Prefix of the reason why a process does not start."""
    HUNG_CHECKS: ClassVar[int] = 1
    """A process hangs if it is stuck in this many checks in a row."""
    SETTLED_SECONDS: ClassVar[float]
    """A process that has worked for longer than this is replaced immediately."""
    FREE_DEATHS: ClassVar[int] = 0
    """This many deaths are replaced immediately, regardless of uptime."""

    def __init__(self, noun: str, whose: dict[str, str], given: ChildSetup) -> None:
        self.deaths = 0
        """How many of its processes have ended unexpectedly."""
        self.down = f"the {noun} has not started yet"
        """Why it has no process that works; empty while it has one."""
        self._noun, self._given = noun, given
        self._log = log.get(noun).bind(**whose)
        self._link: C | None = None
        self._failures = 0
        """Processes that failed to start since the last one that worked."""
        self._hung_checks = 0
        self._closing = False

    @abstractmethod
    async def _start(self) -> C:
        """A process that works, perhaps a new one. Raises KVSidecarError or OSError: none does."""

    def _set_down(self, reason: str) -> None:
        self.down = reason

    @property
    def alive(self) -> C | None:
        """Its process, while it lives."""
        return None if self._link is None or self._link.ended.done() else self._link

    @property
    def at_work(self) -> C | None:
        """Its process, while it works."""
        return None if self.down else self.alive

    async def run(self) -> None:
        """Start its process, and replace it whenever it ends; until `close`. An unexpected error is raised when it has
        no process any more; then this may be called again."""
        try:
            await self._run()
        except Exception as error:
            if self._link is not None:
                self._link.kill()
                await asyncio.shield(self._link.ended)
            self._set_down(f"{type(error).__name__}: {error}")
            raise

    async def _run(self) -> None:
        pause = 0.0
        while True:
            await asyncio.sleep(pause)
            if self._closing:
                return
            pause = min(LONGEST_PAUSE_SECONDS, max(FIRST_PAUSE_SECONDS, 2 * pause))
            try:
                link = await self._start()
            except (KVSidecarError, OSError) as error:
                self._failures += not isinstance(error, TooManyProcesses)  # which passes
                if self._link is not None:
                    self._link.kill()
                    await asyncio.shield(self._link.ended)
                self._set_down(f"{self.NOT_STARTED}{error}")
                continue
            self._failures, worked = 0, time.monotonic()
            self._set_down("")
            reason = await asyncio.shield(link.ended)
            if not self._closing:
                self.deaths += 1
                self._set_down(reason)
            if time.monotonic() - worked > self.SETTLED_SECONDS or self.deaths <= self.FREE_DEATHS:
                pause = 0.0

    def check(self, stuck_seconds: float) -> None:
        """Kill a process that hangs. Called again and again."""
        link = self.alive
        stuck = "" if link is None else link.stuck(stuck_seconds)
        self._hung_checks = self._hung_checks + 1 if stuck else 0
        if link is not None and self._hung_checks == self.HUNG_CHECKS:
            self._log.error(f"the {self._noun} hangs and is killed", pid=link.pid, reason=stuck)
            link.kill(stuck)

    def set_log_level(self, level: str) -> None:
        """Set the log level of processes that start from now on."""
        self._given = replace(self._given, log_level=level)

    async def close(self) -> None:
        """End its process. Returns when it is dead."""
        self._closing = True
        if self._link is not None:
            self._link.kill("the daemon ends")
            await asyncio.shield(self._link.ended)
