"""The daemon's end of one process of a tier."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, cast

import kvsidecar
from kvsidecar.errors import TierFailed
from kvsidecar.protocol.framing import FrameReader
from kvsidecar.support.child_process import how_ended
from kvsidecar.support.memory_limits import Pages
from kvsidecar.tiers.engine import EngineStats, ShardSpace, TierShare
from kvsidecar.tiers.messages import MAX_FRAME, TOLD, Do, Reply, Request, pack_shares, pack_space, stats_of
from kvsidecar.tiers.telling import Told

_ROOT: Final = str(Path(kvsidecar.__file__).resolve().parents[1])
START_SECONDS: Final = 60.0
"""A tier that has not opened in this time is replaced: its file system may hang."""

OnEnd = Callable[[Reply | TierFailed], object]
"""Called once, when the engine's call has returned or its process is dead: nothing of it touches the pool any more. It
must not raise."""


class PoolMemory(Protocol):
    """What a tier's process has to know of the pool."""

    @property
    def fd(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def pages(self) -> Pages: ...


@dataclass(frozen=True, slots=True)
class TierOptions:
    """How the processes of a tier are started."""

    engine: str
    """A name in `kvsidecar.tiers.process.ENGINES`."""
    options: dict[str, Any]
    """Of the engine."""
    capacity_bytes: int
    """Of the tier, for the size of its filter."""
    reads: int = 8
    writes: int = 4
    """Calls of the engine at a time."""
    kept: tuple[int, ...] = ()
    """Descriptors that stay open in the process, such as the daemon's lock, which the next one gets at its end."""
    log_format: str = "json"
    log_level: str = "info"


class TierLink(asyncio.Protocol):
    """A process that was started. Used from the event loop; see `start`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._pidfd = os.pidfd_open(process.pid)
        self._loop.add_reader(self._pidfd, self._died)
        self._transport: asyncio.Transport | None = None
        self._frames = FrameReader(MAX_FRAME)
        self._waiting: dict[int, tuple[OnEnd, float]] = {}
        self._numbers = iter(range(1, 1 << 62))
        self._spaces: dict[ShardSpace, int] = {}
        self._told_spaces: dict[int, ShardSpace] = {}
        self.on_told: Callable[[ShardSpace, Told, bytes], object] = lambda *_: None
        """Called with what a watched space has: block hashes, joined. It must not raise."""
        self._opened: asyncio.Future[EngineStats] = self._loop.create_future()
        self._why = ""
        self.ended: asyncio.Future[str] = self._loop.create_future()
        """Resolved with the reason when the process is dead."""

    @classmethod
    async def start(cls, options: TierOptions, pool: PoolMemory, filter_fd: int) -> tuple[TierLink, EngineStats]:
        """Start a process and wait until its engine is open, and its filter made. Call it in the main thread: the
        kernel kills the process when the thread that started it ends.

        Raises:
            TierFailed: the engine cannot be opened; the process is dead.
            OSError: no process can be started.
        """
        process, near = _launch(options, pool, filter_fd)
        link = cls(process)
        try:
            await asyncio.wait_for(link._give(near, options.kept), START_SECONDS)
            await link._loop.create_unix_connection(lambda: link, sock=near)
            return link, await asyncio.wait_for(asyncio.shield(link._opened), START_SECONDS)
        except TimeoutError:
            link.kill(f"it has not opened in {START_SECONDS:.0f} s")
            raise TierFailed(await asyncio.shield(link.ended)) from None
        except BaseException:
            link.kill()
            await asyncio.shield(link.ended)
            raise

    async def _give(self, near: socket.socket, kept: Sequence[int]) -> None:
        """Give the process descriptors to keep, once the kernel kills it with the daemon: stopped before that, it would
        hold a lock for ever. Raises TierFailed."""
        near.setblocking(False)
        if not await self._loop.sock_recv(near, 1):
            raise TierFailed("its process has ended before it was ready")
        socket.send_fds(near, [b"k"], kept)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def calls(self) -> int:
        """Requests that have not been answered."""
        return len(self._waiting)

    @property
    def oldest_seconds(self) -> float:
        """Age of the oldest request that has not been answered; 0 if there is none."""
        oldest = next(iter(self._waiting.values()), None)
        return 0.0 if oldest is None else time.monotonic() - oldest[1]

    def space(self, space: ShardSpace) -> int:
        """The number by which requests name a space."""
        number = self._spaces.get(space)
        if number is None:
            number = self._spaces[space] = len(self._spaces) + 1
            self._told_spaces[number] = space
            self._write(pack_space(number, space))
        return number

    def set_shares(self, shares: Sequence[TierShare]) -> None:
        """What each share may have, of what is asked from now on."""
        self._write(pack_shares(shares))

    def watch(self, space: ShardSpace, *, wanted: bool = True) -> None:
        """Be told what is there of a space, from the beginning, and what changes; or no more."""
        self._write(Request(Do.WATCH if wanted else Do.UNWATCH, space=self.space(space)).pack())

    def ask(self, make: Callable[[int], Request], on_end: OnEnd) -> None:
        """Send a request.

        Args:
            make: with its number.

        Raises:
            TierFailed: the process has ended.
        """
        if self.ended.done():
            raise TierFailed(self.ended.result())
        number = next(self._numbers)
        self._write(make(number).pack())
        self._waiting[number] = (on_end, time.monotonic())

    def kill(self, reason: str = "") -> None:
        """End the process at once, whatever it does. Its calls end with it."""
        if not self.ended.done():
            self._why = self._why or reason
            self._process.kill()

    def _write(self, data: bytes) -> None:
        # Its buffer holds what a stopped process does not take: bounded, because the callers bound their requests.
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    # -- what arrives ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        self._frames.feed(data)
        while (payload := self._frames.next()) is not None:
            self._answered(Reply.unpack(payload))

    def connection_lost(self, error: Exception | None) -> None:
        self.kill()

    def _answered(self, reply: Reply) -> None:
        if reply.number == 0:
            if reply.failed:
                self._why = reply.text
            elif not self._opened.done():
                self._opened.set_result(stats_of(reply.body))
            return
        if reply.number & TOLD:
            space = self._told_spaces[reply.number ^ TOLD]
            self.on_told(space, Told(reply.body[0]), reply.body[1:])
            return
        on_end, _ = self._waiting.pop(reply.number)
        on_end(TierFailed(reply.text) if reply.failed else reply)

    def _died(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        reason = self._why or f"its process has ended ({how_ended(self._process.wait())})"
        self._process.wait()
        if self._transport is not None:
            self._transport.abort()
        self.ended.set_result(reason)
        if not self._opened.done():
            self._opened.set_exception(TierFailed(reason))
            self._opened.exception()  # nobody may wait for it any more
        waiting, self._waiting = self._waiting, {}
        for on_end, _ in waiting.values():
            on_end(TierFailed(reason))


def _launch(options: TierOptions, pool: PoolMemory, filter_fd: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A process, and our end of its socket. Raises OSError."""
    near, far = socket.socketpair()
    told = {
        "engine": options.engine,
        "options": options.options,
        "reads": options.reads,
        "writes": options.writes,
        "pool_bytes": pool.nbytes,
        "page_kind": pool.pages.kind.value,
        "page_bytes": pool.pages.nbytes,
        "log_format": options.log_format,
        "log_level": options.log_level,
        "parent": os.getpid(),
    }
    # -P: a module in the working directory must not take the place of one of ours.
    given = (far.fileno(), pool.fd, filter_fd)
    command = [sys.executable, "-P", "-m", "kvsidecar.tiers.process", *map(str, given)]
    paths = [_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        with far:
            process = subprocess.Popen(
                [*command, json.dumps(told)],
                pass_fds=given,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )
    except BaseException:
        near.close()
        raise
    return process, near
