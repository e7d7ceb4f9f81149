"""Stores of nodes of SGLang's tree, whose ends SGLang takes in the order in which it has offered them.

Every store goes through `Offloads.submit`, and nothing is left to confirm there: SGLang puts pages into its tree when
it has processed the result of the forward that computed them or, those of a chunk or of a last token, when it has
launched that forward and all loads for it have arrived (`Loads.finish`); and they are read behind its kernels
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
from kvsidecar.integrations.sglang.loads import MAX_JOB_BLOCKS, Pages, split
from kvsidecar.integrations.sglang.shared import Shared
from kvsidecar.integrations.sglang.transfers import PageIds
from kvsidecar.integrations.stored_filter import Tags, tags_of

_log = logging.getLogger("kvsidecar.sglang")

HUNG_SECONDS = 5.0
"""While a store runs for longer, none is sent: the daemon hangs, and would keep those pages from SGLang as well."""
FINISH_SECONDS = 1.0
"""How long a reset lets stores run that have not started; then it cancels them."""
HELD_FRACTION = 0.5
"""Most of a pool's pages that offloads may keep from SGLang, which frees none before it has taken the end."""


@dataclass(frozen=True, slots=True)
class Offered:
    """Pages of one pool, at least one."""

    pool: str
    keys: bytes
    """Of their blocks, joined."""
    count: int
    ids: Callable[[int], PageIds]
    """Starts to read where the pages are on the GPU, from this one on."""


@dataclass(slots=True)
class _Offload:
    began: float = inf
    """When it was sent."""
    held: int = 0
    """Pages that it keeps from SGLang until `pop`."""
    sent: bool = False
    """Or to be sent."""
    unsent: list[tuple[int, Pages]] = field(default_factory=list)
    """By group: what is sent when its pages are known."""
    ok: bool = True
    admitted: bool = True
    """False: the daemon keeps other blocks instead."""
    jobs: list[int] = field(default_factory=list)
    known_at: int = -1
    """`StoredFilter.age` when it was sent."""
    tags: list[Tags] = field(default_factory=list)
    """Of the pages that it sends, in the filter of known ones."""


class Offloads:
    """
    Args:
        notes: of a group's blocks with these keys, joined.
        num_pages: of the pool of full attention.
        rank: among those that split a page. Of what is the same on several, the first one stores it.
    """

    def __init__(self, shared: Shared, notes: Callable[[int, bytes], bytes], num_pages: int, *, rank: int) -> None:
        self._jobs, self._groups = shared.jobs, shared.groups
        self._notes, self._rank = notes, rank
        self._most_held = max(1, int(num_pages * HELD_FRACTION))
        self._known, self._counters, self._clock = shared.known, shared.counters, shared.clock
        self._pending: deque[_Offload] = deque()
        self._unsent: deque[_Offload] = deque()
        self._held = 0

    def may_hold(self, pages: int) -> bool:
        """Whether so many more pages may be kept from SGLang. False: offloads keep too many already, whatever becomes
        of them, because their ends are taken in order. All ranks say the same: they are offered the same, and SGLang
        takes the same ends from each."""
        if not self._held or self._held + pages <= self._most_held:
            return True
        self._counters.held_back_offloads += 1
        return False

    def submit(self, offered: Sequence[Offered]) -> None:
        """Store these pages, as soon as they are known on the host: `completed` sees to it. `pop` will tell, also when
        they are not stored at all: every rank must count the same offloads.

        Those at the beginning that the daemon has are not sent: SGLang offers what it has loaded together with what it
        has computed behind it.
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
                offload.unsent.append((group.index, Pages(keys, pages.ids(first))))
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
        """In the order in which they were offered."""
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
        """Store none of so many pages; `pop` will tell so."""
        self._hold(_Offload(held=pages, ok=False))

    def _hangs(self) -> bool:
        return bool(self._pending) and self._clock() - self._pending[0].began > HUNG_SECONDS

    def _ended(self, offload: _Offload, done: JobDone) -> None:
        offload.ok &= done.outcome is Outcome.DONE
        offload.admitted &= done.reason != Refusal.NOT_ADMITTED

    def completed(self) -> int:
        """How many of the oldest have ended. Never waits."""
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
        """Remove the oldest, which has ended. Returns whether all of it was stored."""
        offload = self._pending.popleft()
        self._held -= offload.held
        if offload.sent:
            self._counters.failed_offloads += not offload.ok and offload.admitted
            self._counters.not_admitted_offloads += not offload.admitted
            for tags in offload.tags if offload.ok else ():
                self._known.add(tags, begun=offload.known_at)
        return offload.ok

    def reset(self, timeout: float) -> None:
        """Wait until no store reads the GPU any more, or will, and forget all. After ``timeout`` seconds the daemon is
        given up."""
        jobs = [job for each in self._pending for job in each.jobs]
        left = self._jobs.stop(jobs, min(FINISH_SECONDS, timeout), cancel=False)
        self._jobs.end(left, timeout, f"a store has not ended within {timeout:g} s")
        self._jobs.poll()
        self._pending.clear()
        self._unsent.clear()
        self._held = 0
