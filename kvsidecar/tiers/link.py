"""The daemon's end of one process of a tier."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from kvsidecar.errors import TierFailed
from kvsidecar.protocol.framing import FrameReader
from kvsidecar.support.host_memory import FileInMemory, facts_of
from kvsidecar.support.supervised_child import NOTHING, Child, ChildSetup, Launched
from kvsidecar.support.tasks import heard
from kvsidecar.tiers.backend import BackendStats, ShardSpace, TierShare
from kvsidecar.tiers.messages import MAX_FRAME, REPORT, REPORTED, Do, Reply, Request, pack_shares, pack_space, stats_of
from kvsidecar.tiers.space_numbers import SpaceNumbers
from kvsidecar.types import Residency

OnEnd = Callable[[Reply | TierFailed], object]
"""Called once, when the backend's call has returned or its process is dead: nothing of it touches the pool any more. It
must not raise."""


@dataclass(frozen=True, slots=True)
class TierOptions:
    """How the processes of a tier are started."""

    backend: str
    """A name in `kvsidecar.tiers.backend.BACKENDS`."""
    options: dict[str, Any]
    """Options of the backend."""
    capacity_bytes: int
    """Capacity of the tier, for the size of its filter."""
    given: ChildSetup = NOTHING


class TierLink(Child, asyncio.Protocol):
    """One process, and the requests to it since it is open. Used from the event loop."""

    NOUN, LOST, FAILED = "its process", TierFailed, TierFailed

    def __init__(self, launched: Launched) -> None:
        super().__init__(launched)
        self._transport: asyncio.Transport | None = None
        self._frames = FrameReader(MAX_FRAME)
        self._waiting: dict[int, tuple[OnEnd, float]] = {}
        self._numbers = iter(range(1, 1 << 62))
        self._spaces = SpaceNumbers()
        self.on_report: Callable[[ShardSpace, Residency, bytes], object] = lambda *_: None
        """Called with the blocks of a watched space, as joined hashes. It must not raise."""

    async def open(self, options: TierOptions, pool: FileInMemory, filter_fd: int) -> BackendStats:
        """Make it open its backend, and fill its filter.

        Raises:
            TierFailed: the process has ended.
            KVSidecarError: the backend cannot be opened.
        """
        await self.greet(options.given)
        request = {"do": "open", "backend": options.backend, "options": options.options, "pool": facts_of(pool)}
        stats = stats_of(await self.ask(request, [pool.fd, filter_fd]))
        await self._loop.create_unix_connection(lambda: self, sock=socket.socket(fileno=self._connection.detach()))
        return stats

    def stuck(self, seconds: float) -> str:
        for _, asked in self._waiting.values():  # the oldest is the first
            waited = time.monotonic() - asked
            return f"a call has not returned for {waited:.0f} s" if waited > seconds else ""
        return super().stuck(seconds)

    def space(self, space: ShardSpace) -> int:
        """The number that names a space in the next request."""
        number, is_new = self._spaces.of(space)
        if is_new:
            self._write(pack_space(number, space))
        return number

    def set_shares(self, shares: Sequence[TierShare]) -> None:
        """Set what each share may have, from the next request on."""
        self._write(pack_shares(shares))

    def watch(self, space: ShardSpace, *, wanted: bool = True) -> None:
        """Get reports of a space's blocks, from the beginning, and of changes; or no more."""
        if not wanted:
            before = self._spaces.unwatch(space)
        else:
            number = self.space(space)
            before = self._spaces.watch(space, number)
        if before is not None:
            self._write(Request(Do.UNWATCH, space=before).pack())
        if wanted:
            self._write(Request(Do.WATCH, space=number).pack())

    def call(self, request: Request, on_end: OnEnd) -> None:
        """Send a request to the backend. It gets a number. Raises TierFailed: the process has ended."""
        if self.ended.done():
            raise TierFailed(self.ended.result())
        number = next(self._numbers)
        data = replace(request, number=number).pack()  # may raise: then nothing is sent
        self._waiting[number] = (on_end, time.monotonic())
        self._write(data)

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
        if reply.number & REPORT:
            if (space := self._spaces.watched(reply.number ^ REPORT)) is not None:
                self.on_report(space, REPORTED[reply.body[0]], reply.body[1:])
            return
        on_end, _ = self._waiting.pop(reply.number)
        on_end(TierFailed(reply.text) if reply.failed else reply)

    def _after_end(self, reason: str) -> None:
        if self._transport is not None:
            self._transport.abort()
        waiting, self._waiting = self._waiting, {}
        for on_end, _ in waiting.values():
            try:
                on_end(TierFailed(reason))
            except Exception as error:  # noqa: BLE001 - reported; the other calls are over, too
                heard("a call to a tier has not ended in order", error)
