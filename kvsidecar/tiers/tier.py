"""One tier of a daemon. Outlives its processes, which are started, watched, asked and replaced.

Nobody waits for a tier. A request that is not answered in time is over for its caller; its slots stay with it until the
backend's call returns or its process is dead.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from kvsidecar.cache.arrays import Bools, Ints, Words
from kvsidecar.errors import TierFailed
from kvsidecar.support.breaker import Backoff, CircuitBreaker
from kvsidecar.support.host_memory import FileInMemory
from kvsidecar.support.supervised_child import (
    FIRST_PAUSE_SECONDS,
    LONGEST_PAUSE_SECONDS,
    ChildState,
    Supervised,
    launch,
    to_the_end,
)
from kvsidecar.tiers.backend import BackendStats, ReadEnd, ShardSpace, TierShare, WriteEnd
from kvsidecar.tiers.key_filter import KeyFilter, create_filter
from kvsidecar.tiers.link import TierLink, TierOptions
from kvsidecar.tiers.messages import Do, Reply, Request, pack_namespace, stats_of
from kvsidecar.tiers.policy import ReadRate
from kvsidecar.types import Namespace, Residency

FAILURES: Final = 3
"""Calls in a row that fail or are late before the tier is off."""
STATS_SECONDS: Final = 1.0
"""Time between requests for its gauges."""
MAX_TO_FORGET: Final = 1024
"""Namespaces that wait to be forgotten."""
OnReport = Callable[[Residency, bytes], object]
"""Called with reports on a watched space: one of `REPORTED` and joined block hashes; `Residency.COMPLETE`: all that was
there has been reported. It must not raise."""


@dataclass(slots=True)
class TierCounts:
    """What a tier has done since the daemon started."""

    copied: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Totals by ``read`` or ``write``, and ``blocks``, ``bytes`` or ``seconds``."""
    corrupt_blocks: int = 0
    failures: int = 0
    """Calls that failed or were late."""

    def count(self, direction: str, blocks: int, nbytes: int, seconds: float) -> None:
        for unit, value in ("blocks", blocks), ("bytes", nbytes), ("seconds", seconds):
            self.copied[direction, unit] += value  # type: ignore[assignment]  # seconds are no whole number


class Tier(Supervised[TierLink]):
    """Used from the event loop.

    Args:
        name: for people, logs and metrics.
        deadline: seconds after which a call is late: its caller goes on without it.
    """

    SETTLED_SECONDS = LONGEST_PAUSE_SECONDS

    def __init__(self, name: str, options: TierOptions, pool: FileInMemory, *, deadline: float = 2.0) -> None:
        super().__init__("tier", {"tier": name}, options.given)
        self.name = name
        self.counts = TierCounts()
        self.stats: BackendStats | None = None
        """Its last report; None before it has opened."""
        self._read_rate = ReadRate()
        self._options, self._pool = options, pool
        self.on_change: Callable[[Tier], object] = lambda _: None
        """Called when its process works, before it is asked for anything, and when it does not any more."""
        self._deadline = deadline
        # No silence is needed: a call that is late has had all the time that an operator gives it.
        self._breaker = CircuitBreaker(
            failures=FAILURES, silence=0.0, backoff=Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
        )
        self._last_failure = ""
        self._filter_fd = create_filter(options.capacity_bytes)
        self._filter = KeyFilter(self._filter_fd)
        self.may_have: Final = self._filter.may_have
        """False: it does not have this block. Asks nobody. Takes the digest of a shard space and a block hash."""
        self._asked_stats = 0.0
        """When its process was last asked for its gauges."""
        self._shares: Sequence[TierShare] = ()
        self._watched: dict[ShardSpace, OnReport] = {}
        self._to_forget: list[Namespace | None] = []
        """Namespaces that it must forget before it is asked for anything else."""
        self._forgetting = False

    @property
    def off(self) -> str:
        """Why it is not asked for anything; empty while it is."""
        if self._to_forget:
            return self.down or "it has not yet removed what was cleared"
        return self.down or ("" if self._breaker.allows else self._last_failure)

    @property
    def read_rate(self) -> float:
        """Bytes a second that it reads."""
        return self._read_rate.value

    @property
    def pid(self) -> int:
        """Process id of its process; 0 if there is none."""
        return 0 if self.at_work is None else self.at_work.pid

    # -- the process -----------------------------------------------------------------------------------------------

    async def _start(self) -> TierLink:
        self._link = link = TierLink(launch("kvsidecar.tiers.process"))
        opening = link.open(replace(self._options, given=self._given), self._pool, self._filter_fd)
        self.stats = await to_the_end(opening, on_cancel=link.kill)
        self._breaker.reset()
        link.set_shares(self._shares)
        link.on_report = self._reported
        for space in self._watched:
            link.watch(space)
        return link

    def check(self, stuck_seconds: float) -> None:
        """Called again and again: kill a process that hangs, probe a tier that is off, and ask for its gauges."""
        super().check(stuck_seconds)
        if (link := self.at_work) is None or link.state is ChildState.KILLED:
            return
        if self._breaker.begin_probe():
            link.call(Request(Do.PROBE), self._probed)
        elif self._to_forget:
            self._forget_next()
        elif time.monotonic() - self._asked_stats >= STATS_SECONDS:
            self._asked_stats = time.monotonic()
            link.call(Request(Do.STATS), self._take_stats)

    async def close(self) -> None:
        await super().close()
        os.close(self._filter_fd)

    def set_shares(self, shares: Sequence[TierShare]) -> None:
        """Set what each of the tenants' shares may have, for this process and its successors."""
        self._shares = shares
        if self.at_work is not None:
            self.at_work.set_shares(shares)

    def _set_down(self, reason: str) -> None:
        if reason == self.down:
            return
        worked = not self.down
        super()._set_down(reason)
        if reason:
            self._log.warning("tier off", reason=reason)
        else:
            assert self.stats is not None
            self._log.info(
                "tier on",
                pid=self.pid,
                kept_blocks=self.stats.kept_blocks,
                dropped_blocks=self.stats.dropped_blocks,
                capacity_bytes=self.stats.capacity_bytes,
            )
        self.on_change(self)
        if worked:
            for tell in tuple(self._watched.values()):
                tell(Residency.CLEARED, b"")
        self._forget_next()

    # -- what it has -----------------------------------------------------------------------------------------------

    def watch(self, space: ShardSpace, tell: OnReport) -> None:
        """Report what is there of a space, from the beginning, and what changes. The blocks of a process that has ended
        are not there; the next one begins with what it finds."""
        self._watched[space] = tell
        if not self.down and self._link is not None:
            self._link.watch(space)
        else:
            tell(Residency.CLEARED, b"")

    def unwatch(self, space: ShardSpace) -> None:
        if self._watched.pop(space, None) is not None and self.at_work is not None:
            self.at_work.watch(space, wanted=False)

    def _reported(self, space: ShardSpace, kind: Residency, hashes: bytes) -> None:
        if (tell := self._watched.get(space)) is not None:
            tell(kind, hashes)

    # -- what it is asked for --------------------------------------------------------------------------------------

    def may_have_each(self, digest: bytes, words: Words) -> Bools:
        """`may_have` of many at once; False for all while it is off.

        Args:
            words: the first eight bytes of each block hash, little endian.
        """
        return self._filter.may_have_each(digest, words) & (not self.off)

    def find(self, space: ShardSpace, hashes: bytes, on_end: Callable[[list[bool]], None]) -> None:
        """Ask which of these are there: none, if it fails or is late.

        Args:
            hashes: block hashes, joined; at most `messages.MAX_BLOCKS`.
            on_end: called once.

        Raises:
            TierFailed: it is off.
        """
        waits = True

        def ended(answer: Reply | None) -> None:
            nonlocal waits
            if waits:
                waits = False
                on_end([] if answer is None else list(map(bool, answer.body)))

        self._ask(Do.FIND, space, hashes, ended, lambda: ended(None))

    def read(
        self,
        space: ShardSpace,
        hashes: bytes,
        slots: Ints,
        on_end: Callable[[list[ReadEnd]], None],
        on_late: Callable[[], None],
    ) -> None:
        """Fill slots.

        Args:
            on_end: called once. Nothing else may touch the slots before. Empty: the call failed, their bytes are
                undefined.
            on_late: called at the deadline if the call has not ended; ``on_end`` follows later.

        Raises:
            TierFailed: it is off.
        """

        began = time.monotonic()

        def ended(answer: Reply | None) -> None:
            if answer is None:
                on_end([])
                return
            ends = [ReadEnd(end) for end in answer.body]
            done = ends.count(ReadEnd.DONE)
            nbytes = done * space.shard_bytes
            self.counts.count("read", done, nbytes, answer.seconds)
            self.counts.corrupt_blocks += ends.count(ReadEnd.CORRUPT)
            if nbytes:
                self._read_rate.ended(nbytes, began, time.monotonic())
            on_end(ends)

        self._ask(Do.READ, space, hashes, ended, on_late, slots)

    def write(
        self,
        space: ShardSpace,
        hashes: bytes,
        slots: Ints,
        checksums: Sequence[int | None],
        on_end: Callable[[list[WriteEnd]], None],
    ) -> None:
        """Keep the bytes of slots.

        Args:
            on_end: called once. The slots must not change before. Empty: the call failed.

        Raises:
            TierFailed: it is off.
        """

        def ended(answer: Reply | None) -> None:
            if answer is None:
                on_end([])
                return
            ends = [WriteEnd(end) for end in answer.body]
            done = ends.count(WriteEnd.DONE)
            self.counts.count("write", done, done * space.shard_bytes, answer.seconds)
            on_end(ends)

        values: Words = np.array([value or 0 for value in checksums], np.uint64)
        known: Words = np.array([value is not None for value in checksums], np.uint64)
        self._ask(Do.WRITE, space, hashes, ended, None, slots, (values, known))

    def forget(self, namespace: Namespace | None) -> None:
        """Forget the blocks of a namespace, or all. It is off until it has; one that is down forgets when it is back,
        if this daemon still runs then."""
        begun = 1 if self._forgetting else 0
        waiting = self._to_forget[begun:]
        if namespace not in waiting and None not in waiting:
            self._to_forget.append(namespace)
        if len(self._to_forget) > MAX_TO_FORGET:
            self._to_forget[begun:] = [None]  # a tier that has been off for long, and clients that clear: forget all
        self._forget_next()

    def _forget_next(self) -> None:
        if not self._to_forget or self._forgetting or (link := self.at_work) is None:
            return

        def ended(answer: Reply | TierFailed) -> None:
            self._forgetting = False
            if isinstance(answer, TierFailed):
                self._count_failure(str(answer))  # `check` tries again
                return
            self._to_forget.remove(namespace)
            self._forget_next()

        self._forgetting, namespace = True, self._to_forget[0]
        link.call(Request(Do.FORGET, hashes=pack_namespace(namespace)), ended)

    def _ask(
        self,
        do: Do,
        space: ShardSpace,
        hashes: bytes,
        on_end: Callable[[Reply | None], None],
        on_late: Callable[[], None] | None = None,
        slots: Ints | None = None,
        checksums: tuple[Words, Words] | None = None,
    ) -> None:
        if (off := self.off) or self._link is None:
            raise TierFailed(off)

        in_time = True

        def late() -> None:
            nonlocal in_time
            in_time = False
            self._count_failure(f"a {do.name.lower()} was not answered in {self._deadline:g} s")
            if on_late is not None:
                on_late()

        def ended(answer: Reply | TierFailed) -> None:
            timer.cancel()
            if isinstance(answer, TierFailed):
                self._count_failure(str(answer))
                on_end(None)
                return
            if in_time:
                self._breaker.succeeded()
            on_end(answer)

        self._link.call(Request(do, 0, self._link.space(space), hashes, slots, checksums), ended)
        timer = asyncio.get_running_loop().call_later(self._deadline, late)

    def _count_failure(self, reason: str) -> None:
        if self._closing:
            return
        self.counts.failures += 1
        self._last_failure = reason
        if self._breaker.failed():
            self._log.warning("tier off", reason=reason)

    def _probed(self, answer: Reply | TierFailed) -> None:
        if isinstance(answer, TierFailed):
            self._count_failure(str(answer))
        elif self._breaker.succeeded():
            self._log.info("tier on", pid=self.pid)

    def _take_stats(self, answer: Reply | TierFailed) -> None:
        if isinstance(answer, Reply):
            self.stats = stats_of(json.loads(answer.body))
