"""Loads of a batch: one job per chunk of layers, waited for layer by layer, with a deadline."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvsidecar.client import Blocks, JobDone, LeaseRenewal, Outcome
from kvsidecar.integrations.sglang.groups import KV, PoolGroup
from kvsidecar.integrations.sglang.shared import RankState
from kvsidecar.integrations.sglang.staged_load import StagedLoad, Staging, Tile
from kvsidecar.integrations.sglang.transfers import Ids, PageIds
from kvsidecar.integrations.stored_filter import tags_of
from kvsidecar.integrations.waited_jobs import WaitedJobs

_log = logging.getLogger("kvsidecar.sglang")

STOP_SECONDS = 2.0
"""How long a load that has missed its deadline may take to end, or to be cancelled. Then its daemon is given up."""
PAUSE_SECONDS = 1.0
"""How long nothing is offered after a failed load, which costs requests; doubled after each further one."""
MAX_PAUSE_SECONDS = 30.0
MAX_JOB_BLOCKS = 65536
"""Most blocks of one job: its message, with their hashes and ids, stays below the limit."""


@dataclass(frozen=True, slots=True)
class PoolPages:
    """Pages of one pool: the keys of their blocks, joined, and their places on the GPU."""

    keys: bytes
    ids: PageIds

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(slots=True)
class _Queued:
    pages: Mapping[str, PoolPages]
    """The pages of each pool."""
    lease: LeaseRenewal


@dataclass(slots=True)
class _Batch:
    """Loads that were started together."""

    requests: Mapping[str, _Queued]
    deadline: float = 0.0
    jobs: list[list[int]] | None = None
    """The jobs of each chunk; None: they have not been sent."""
    staged: StagedLoad | None = None
    """The owner of the jobs, if the load passes through the staging memory."""
    failed: bool = False
    begun: int = -1
    """`StoredFilter.age` when it was sent."""

    @property
    def all_jobs(self) -> list[int]:
        return [job for jobs in self.jobs or () for job in jobs] if self.staged is None else self.staged.jobs


@dataclass(frozen=True, slots=True)
class Detour:
    """The staging memory, and the jobs of the client that has registered it."""

    staging: Staging
    jobs: WaitedJobs


class BatchLoads:
    """The loads of one rank. Also SGLang's layer counter: `set_consumer` and `wait_until` are called by the forward.

    Args:
        timeout: seconds from the start of a batch to its deadline.
        detour: the way of the loads if pieces of a page are too small to be loaded directly.
    """

    def __init__(self, shared: RankState, timeout: float, detour: Detour | None = None) -> None:
        self._detour = detour
        self._jobs, self._groups, self._timeout = shared.jobs, shared.groups, timeout
        self._gains = shared.gains
        self._known, self._counters, self._clock = shared.known, shared.counters, shared.clock
        self._queued: dict[str, _Queued] = {}
        self._batches: dict[int, _Batch] = {}
        self._next = 0
        self._pause, self._resume_at = PAUSE_SECONDS, 0.0
        self.consumer_index = -1
        """Number of the batch to wait for, which SGLang's pools read; below 0: none."""

    # -- for the linker --------------------------------------------------------------------------------------------

    @property
    def may_fail(self) -> bool:
        """Whether loads should not be offered: the last one has failed just now."""
        return self._clock() < self._resume_at

    @property
    def num_staged(self) -> int:
        """Running jobs into the staging memory."""
        return 0 if self._detour is None else self._detour.jobs.num_running

    def queue(self, rid: str, pages: Mapping[str, PoolPages], lease: LeaseRenewal) -> None:
        self.cancel(rid)  # an earlier one
        self._queued[rid] = _Queued(pages, lease)
        self._counters.loads += 1

    def cancel(self, rid: str) -> bool:
        queued = self._queued.pop(rid, None)
        if queued is None:
            return False
        queued.lease.release()
        return True

    def start(self) -> int:
        """Start all queued loads. Returns the number of the batch; -1 if there are none.

        While a forward runs, the pages that SGLang has chosen are still on their way to the host. The loads are then
        sent when the batch's own forward asks for them: waiting here would keep SGLang from preparing that.
        """
        if not self._queued:
            return -1
        requests, self._queued = self._queued, {}
        number, self._next = self._next, self._next + 1
        batch = self._batches[number] = _Batch(requests)
        self._send(batch, wait=False)
        return number

    def _send(self, batch: _Batch, *, wait: bool) -> None:
        """Send a batch's loads, unless they have been sent. While pages are unknown, wait for them or send later."""
        if batch.jobs is not None:
            return
        if not wait and not all(
            pages.ids.arrived() for each in batch.requests.values() for pages in each.pages.values()
        ):
            return
        batch.jobs = []
        try:
            parts = self._parts(batch.requests)
        except ValueError as error:
            batch.failed = True
            _log.error("kvsidecar: a load was not sent: %s", error)
            return
        batch.deadline, batch.begun = self._clock() + self._timeout, self._known.age
        if self._detour is not None and parts and self._can_stage(self._detour):
            batch.staged = self._staged(batch, self._detour, *parts[0][1:])
            batch.staged.send()
            self._counters.staged_loads += 1
        else:
            batch.jobs = [[self._submit(self._jobs, batch, job) for job in jobs] for jobs in self._blocks(parts)]

    def _can_stage(self, detour: Detour) -> bool:
        """Whether no other load uses the staging memory, and the daemon run that granted the leases has mapped it."""
        client = detour.jobs.client
        used = any(each.staged is not None and each.staged.uses_slots for each in self._batches.values())
        return client.attached and client.attached_epoch == self._jobs.client.attached_epoch and not used

    def _staged(self, batch: _Batch, detour: Detour, keys: bytes, ids: Ids) -> StagedLoad:
        (group,), width = detour.staging.groups.all, len(keys) // len(ids)

        def send(tile: Tile) -> int:
            slots = np.arange(tile.slot, tile.slot + tile.end - tile.first)
            mine, number = keys[tile.first * width : tile.end * width], group.slice_of(tile.chunk)
            assert number is not None
            return self._submit(detour.jobs, batch, [Blocks(group.index, mine, slots, slice=number)])

        return StagedLoad(detour.staging, detour.staging.on_device(ids), send)

    def _parts(self, requests: Mapping[str, _Queued]) -> list[tuple[PoolGroup, bytes, Ids]]:
        """The keys and the pages of each group that has some. Raises ValueError like `PageIds.take`."""
        parts = []
        for group in self._groups.all:
            mine = [found for each in requests.values() if (found := each.pages.get(group.pool)) is not None]
            if sum(map(len, mine)):
                keys, ids = b"".join(each.keys for each in mine), np.concatenate([each.ids.take() for each in mine])
                parts.append((group, keys, ids))
        return parts

    def _blocks(self, parts: Sequence[tuple[PoolGroup, bytes, Ids]]) -> list[list[list[Blocks]]]:
        """The blocks of each job, by chunk."""
        chunks = [
            [
                Blocks(group.index, keys, ids, slice=number)
                for group, keys, ids in parts
                if (number := group.slice_of(chunk)) is not None
            ]
            for chunk in range(self._groups.num_chunks)
        ]
        return [split(blocks, MAX_JOB_BLOCKS) for blocks in chunks]

    def _jobs_of(self, batch: _Batch) -> WaitedJobs:
        return self._jobs if batch.staged is None or self._detour is None else self._detour.jobs

    def _submit(self, jobs: WaitedJobs, batch: _Batch, blocks: Sequence[Blocks]) -> int:
        job = jobs.client.load(blocks, timeout=self._timeout)
        return jobs.add(job, lambda done: self._ended(batch, done))

    def _ended(self, batch: _Batch, done: JobDone) -> None:
        if done.outcome is not Outcome.DONE:
            batch.failed = True
            _log.error("kvsidecar: a load %s: %s %s", done.outcome, done.reason, done.error)

    def finish(self, number: int) -> bool:
        """Wait until the batch no longer writes to the GPU, and never will. Returns whether all of it was loaded."""
        batch = self._batches.pop(number, None)
        if batch is None:
            return True
        self._send(batch, wait=True)
        jobs = self._jobs_of(batch)
        if batch.staged is not None:
            self._move(batch, batch.staged, None)
        self._wait(batch, batch.all_jobs)
        if left := jobs.outstanding(batch.all_jobs):
            self._counters.overdue_loads += 1
            batch.failed = True
            reason = f"a load has not ended {self._timeout + STOP_SECONDS:g} s after its start"
            if stuck := jobs.stop(left, STOP_SECONDS, cancel=True):
                if jobs is not self._jobs:
                    self._jobs.client.give_up(reason)
                jobs.give_up(stuck, reason)
        if batch.staged is not None:
            batch.staged.wait()
        for each in batch.requests.values():
            each.lease.release()
        if batch.failed:
            self._counters.failed_loads += len(batch.requests)
            self._resume_at = self._clock() + self._pause
            self._pause = min(2 * self._pause, MAX_PAUSE_SECONDS)
        else:
            self._pause = PAUSE_SECONDS
            for each in batch.requests.values():
                self._gains.count(0, len(each.pages.get(KV, ())))
                for pool, pages in each.pages.items():
                    self._counters.loaded_pages += len(pages)
                    if (group := self._groups.of(pool)) is not None:
                        # SGLang offers them at once: they need not be stored.
                        self._known.add(tags_of(group.index, pages.keys, len(pages)), begun=batch.begun)
        return not batch.failed

    def reset(self) -> None:
        for rid in tuple(self._queued):
            self.cancel(rid)
        for number in tuple(self._batches):
            self.finish(number)
        self.consumer_index = -1

    def end_staging(self) -> None:
        """Free the staging memory, which the daemon has unmapped. SGLang refers to this counter until it ends."""
        self._detour = None

    # -- for SGLang's pools ------------------------------------------------------------------------------------------

    def set_consumer(self, index: int) -> None:
        self.consumer_index = index
        if (batch := self._batches.get(index)) is not None:
            self._send(batch, wait=False)

    def wait_until(self, layer: int) -> None:
        """Return when this layer of the current batch is loaded, or its load has failed. Never raises: the forward
        continues, and `finish` reports the failure."""
        batch = self._batches.get(self.consumer_index)
        if batch is None:
            return
        self._send(batch, wait=True)
        if batch.staged is not None:
            self._move(batch, batch.staged, layer)
            batch.staged.keep_order()
        elif batch.jobs and not batch.failed:
            self._wait(batch, batch.jobs[self._groups.chunk_of(layer)])

    def _move(self, batch: _Batch, staged: StagedLoad, layer: int | None) -> None:
        """Return when all tiles up to this layer's are being moved from the staging memory to their pages, with as many
        of the others as have arrived meanwhile; or when the load has failed.

        Args:
            layer: the layer; None for the last one.
        """
        jobs = self._jobs_of(batch)
        jobs.poll()
        while not batch.failed and (job := staged.next_job()) is not None:
            if jobs.outstanding((job,)):
                if layer is not None and staged.is_beyond(layer):
                    break
                self._wait(batch, (job,))
            if not batch.failed:
                staged.move()
                staged.send()

    def _wait(self, batch: _Batch, ids: Sequence[int]) -> None:
        jobs = self._jobs_of(batch)
        if jobs.outstanding(ids) and jobs.wait(ids, batch.deadline - self._clock()):
            batch.failed = True


def split(parts: Sequence[Blocks], most: int) -> list[list[Blocks]]:
    """Divide the blocks of a job into jobs of at most ``most`` blocks."""
    jobs: list[list[Blocks]] = []
    room = 0
    for part in parts:
        count = len(part.block_ids)
        width = len(part.hashes) // max(1, count)
        first = 0
        while first < count:
            if not room:
                jobs.append([])
                room = most
            end = min(count, first + room)
            assert isinstance(part.hashes, bytes)
            hashes, ids = part.hashes[first * width : end * width], part.block_ids[first:end]
            each = len(part.notes) // count
            jobs[-1].append(Blocks(part.group, hashes, ids, part.notes[first * each : end * each], slice=part.slice))
            room, first = room - (end - first), end
    return jobs
