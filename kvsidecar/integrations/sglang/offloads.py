"""Stores of nodes of SGLang's tree, whose ends SGLang takes in the order in which it has offered them.

Every store passes through `Offloads.submit`, and nothing is left to confirm there: SGLang puts pages into its tree when
it has processed the result of the forward that computed them or, those of a chunk or of a last token, when it has
launched that forward and all loads for it have arrived (`BatchLoads.finish`); and they are read after its kernels
(`SlotReader`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf

import numpy as np

from kvsidecar.client import Blocks, JobDone, Outcome
from kvsidecar.errors import Refusal
from kvsidecar.integrations.sglang.loads import MAX_JOB_BLOCKS, PoolPages, split
from kvsidecar.integrations.sglang.shared import RankState
from kvsidecar.integrations.sglang.transfers import PageIds
from kvsidecar.integrations.stored_filter import Tags, tags_of

_log = logging.getLogger("kvsidecar.sglang")

HUNG_SECONDS = 5.0
"""While a store runs for longer than this, none is sent: the daemon hangs, and would hold those pages as well."""
FINISH_SECONDS = 1.0
"""How long a reset lets stores run that have not started; then it cancels them."""
HELD_FRACTION = 0.5
"""Largest share of a pool's pages that offloads may hold. SGLang frees none before it has taken the offload's end."""


@dataclass(frozen=True, slots=True)
class Offered:
    """Pages of one pool, at least one."""

    pool: str
    keys: bytes
    """The keys of their blocks, joined."""
    count: int
    ids: Callable[[int], PageIds]
    """Starts to read the pages' places on the GPU, from this one on."""


@dataclass(slots=True)
class _Offload:
    began: float = inf
    """When it was sent."""
    held: int = 0
    """Pages that SGLang cannot free until `pop`."""
    sent: bool = False
    """Sent, or waiting to be sent."""
    unsent: list[tuple[int, PoolPages]] = field(default_factory=list)
    """Pages, with their group, that are sent when their places are known."""
    ok: bool = True
    admitted: bool = True
    """False: the daemon keeps other blocks instead."""
    jobs: list[int] = field(default_factory=list)
    known_at: int = -1
    """`StoredFilter.age` when it was sent."""
    tags: list[Tags] = field(default_factory=list)
    """Tags of the pages that it sends, for the filter of known ones."""


class Offloads:
    """The stores of one rank.

    Args:
        notes: returns the joined notes on a group's blocks with these keys.
        num_pages: number of pages in the pool of full attention.
        rank: this rank's index among those that split a page. KV that is equal on several is stored by the first.
    """

    def __init__(self, shared: RankState, notes: Callable[[int, bytes], bytes], num_pages: int, *, rank: int) -> None:
        self._jobs, self._groups = shared.jobs, shared.groups
        self._notes, self._rank = notes, rank
        self._most_held = max(1, int(num_pages * HELD_FRACTION))
        self._known, self._counters, self._clock = shared.known, shared.counters, shared.clock
        self._pending: deque[_Offload] = deque()
        self._unsent: deque[_Offload] = deque()
        self._held = 0

    def may_hold(self, pages: int) -> bool:
        """Whether offloads may hold this many more pages. False: they hold too many already, however they end, because
        their ends are taken in order. All ranks return the same: they are offered the same, and SGLang takes the same
        ends from each."""
        if not self._held or self._held + pages <= self._most_held:
            return True
        self._counters.held_back_offloads += 1
        return False

    def submit(self, offered: Sequence[Offered]) -> None:
        """Store these pages as soon as their places are known on the host, which `completed` checks. `pop` returns the
        result, even if they are not stored at all: every rank must count the same offloads.

        Pages at the beginning that the daemon has are not sent: SGLang offers loaded pages together with those that it
        has computed after them.
        """
        offload, known = _Offload(held=sum(pages.count for pages in offered)), False
        for pages in offered:
            group = self._groups.of(pages.pool)
            if group is None or not group.is_stored_by(self._rank):
                continue
            tags = tags_of(group.index, pages.keys, pages.count)
            missing = np.flatnonzero(~self._known.find(tags))
            if len(missing):
                first = int(missing[0])
                keys = pages.keys[first * len(pages.keys) // pages.count :]
                offload.unsent.append((group.index, PoolPages(keys, pages.ids(first))))
                offload.tags.append(tags[first:])
            else:
                known = True
        if not offload.unsent:
            self._counters.known_offloads += known
        elif self._hangs():
            self._counters.held_back_offloads += 1
            offload.unsent, offload.ok = [], False
        else:
            self._counters.offloads += 1
            offload.sent = True
            self._unsent.append(offload)
        self._hold(offload)
        self._send_arrived()

    def _hold(self, offload: _Offload) -> None:
        self._held += offload.held
        self._pending.append(offload)

    def _send_arrived(self) -> None:
        """Send the offloads whose pages' places are known, in the order in which they were offered."""
        while self._unsent and all(pages.ids.arrived() for _, pages in self._unsent[0].unsent):
            self._send(self._unsent.popleft())

    def _send(self, offload: _Offload) -> None:
        unsent, offload.unsent = offload.unsent, []
        try:
            parts = [Blocks(group, each.keys, each.ids.take(), self._notes(group, each.keys)) for group, each in unsent]
        except ValueError as error:
            offload.ok = False
            _log.error("kvsidecar: pages are not stored: %s", error)
            return
        offload.began, offload.known_at = self._clock(), self._known.age
        for blocks in split(parts, MAX_JOB_BLOCKS):
            offload.jobs.append(self._jobs.add(self._jobs.client.store(blocks), partial(self._ended, offload)))

    def decline(self, pages: int) -> None:
        """Store none of these pages; `pop` will report them as not stored."""
        self._hold(_Offload(held=pages, ok=False))

    def _hangs(self) -> bool:
        return bool(self._pending) and self._clock() - self._pending[0].began > HUNG_SECONDS

    def _ended(self, offload: _Offload, done: JobDone) -> None:
        offload.ok &= done.outcome is Outcome.DONE
        offload.admitted &= done.reason != Refusal.NOT_ADMITTED

    def completed(self) -> int:
        """How many of the oldest offloads have ended. Never waits."""
        if not self._pending:
            return 0
        self._send_arrived()
        self._jobs.poll()
        count = 0
        for each in self._pending:
            if each.unsent or self._jobs.outstanding(each.jobs):
                break
            count += 1
        return count

    def pop(self) -> bool:
        """Remove the oldest offload, which has ended. Returns whether all of it was stored."""
        offload = self._pending.popleft()
        self._held -= offload.held
        if offload.sent:
            self._counters.failed_offloads += not offload.ok and offload.admitted
            self._counters.not_admitted_offloads += not offload.admitted
            for tags in offload.tags if offload.ok else ():
                self._known.add(tags, begun=offload.known_at)
        return offload.ok

    def reset(self, timeout: float) -> None:
        """Wait until no store reads the GPU, now or later, and forget all. After ``timeout`` seconds, give the daemon
        up."""
        jobs = [job for each in self._pending for job in each.jobs]
        left = self._jobs.stop(jobs, min(FINISH_SECONDS, timeout), cancel=False)
        self._jobs.end(left, timeout, f"a store has not ended within {timeout:g} s")
        self._jobs.poll()
        self._pending.clear()
        self._unsent.clear()
        self._held = 0
