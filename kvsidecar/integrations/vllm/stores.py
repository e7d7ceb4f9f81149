"""The scheduler's store jobs, and their references on GPU blocks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import compress
from operator import not_
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsidecar.integrations.stored_filter import tags_of
from kvsidecar.integrations.vllm import hits
from kvsidecar.integrations.vllm.backlog import Backlog, BlockHashes
from kvsidecar.integrations.vllm.groups import Group
from kvsidecar.integrations.vllm.metadata import GroupBlocks, RankReport, StoreJob, sampled_traceparent_of
from kvsidecar.integrations.vllm.retention import DEFAULT_RETENTION, Retention
from kvsidecar.integrations.vllm.running_stores import GIVE_UP_SECONDS, HUNG_SECONDS, SOON_SECONDS, RunningStores
from kvsidecar.integrations.vllm.selection import (
    Candidates,
    Chosen,
    GpuBlockPool,
    RequestProgress,
    Selection,
    Span,
    block_range,
    by_retention,
    choose,
    default_watermark,
    group_suffix,
    walk,
)
from kvsidecar.integrations.vllm.shared import SchedulerState

STEP_BLOCKS = 2048
"""Most blocks that one step plans to store, which bounds its cost."""
BACKLOG_BLOCKS = 512
"""Most blocks that one step takes from the backlog: finding them in the GPU's cache takes longest. A step that computes
more tokens than this takes as many blocks: it lasts longer, and its requests need the GPU's blocks."""
RETRY_SECONDS = 1.0
"""Delay after which the blocks of a failed store are tried again; doubled after each further failure."""
MAX_RETRY_SECONDS = 8.0


class Stores:
    """Plans store jobs.

    A job holds a reference on each of its blocks until every rank has reported it, so that vLLM does not reuse them
    even if the request ends. That includes jobs of a daemon that hangs: it may resume at any time, and would store what
    it reads then under the job's hashes. Such jobs may hold only so many that the engine's longest request fits in the
    rest.

    While stores end, they may hold all blocks: a request that finds none free waits for them, whereas a released block
    would be overwritten, and lost. If they stop ending, the ranks give up the daemon, which ends these jobs behind a
    fence: the blocks are free, and nothing reads them late. vLLM 0.26 cannot wait, so that stores never hold more there
    than a hung daemon may.

    Blocks that could not be stored with their request, for lack of room or of a daemon, or because the daemon declined
    them, enter the backlog: they are stored later if the GPU's prefix cache still has them. In lazy mode, all blocks
    that requests leave in the prefix cache enter the backlog, and are stored while the engine is idle.
    """

    def __init__(self, shared: SchedulerState) -> None:
        options, engine, groups = shared.options, shared.engine, shared.engine.groups
        self._waits, self._world_size = engine.waits, engine.world_size
        self._groups, self._by_index = groups, {group.index: group for group in groups}
        self._stored_filter, self._numbers, self._written = shared.stored_filter, shared.numbers, shared.written
        self._counters, self._events = shared.counters, shared.events
        self._alignment = self._groups[0].alignment
        self._hash_tokens, self._grain = self._groups[0].hash_tokens, self._groups[0].grain
        self._unit_blocks = sum(self._alignment // group.block_tokens for group in groups)
        """Blocks of all groups together in as many tokens as the alignment."""
        self._extra_blocks = sum(group.eagle for group in groups)
        self._lag = max(group.lag_tokens for group in self._groups)
        self._lazy = options.store_mode == "lazy"
        self.walks = engine.adapters is None or engine.adapters.in_hashes
        """Whether lazy mode may store all blocks in the prefix cache, whichever requests they are from."""
        self._prompt_only = options.store_prompt_only and not self._lazy
        self._interval = options.store_interval
        self._next = 0.0
        """When running requests are next examined; monotonic seconds."""
        self._watermark = options.lazy_watermark or default_watermark(groups, engine.step_tokens)
        self._allocated = self._watermark
        """Lower bound of the blocks that vLLM has taken from the free queue since the last walk of it."""
        self._longest = engine.longest_blocks
        self._now = 0.0
        """Monotonic seconds of the last step."""
        self._pool: GpuBlockPool | None = None
        self._most_held = 0
        self._most_hung = 0
        """Most blocks that stores hold while the daemon hangs or is slow."""
        self._num_held = 0
        self._lets_go = False
        """Whether the GPU's blocks have been released for a moment: see `let_go`."""
        self._is_held: npt.NDArray[np.bool_]
        """One flag per GPU block: whether stores hold it. A job with a block twice would be declined as invalid."""
        self._candidates = {group.index: Candidates() for group in groups}
        self._considered = 0
        """Blocks considered in this call."""
        self.retention: dict[str, Retention] = {}
        """The retention of requests' blocks that differs from the default, by request id."""
        self._planned: dict[tuple[Retention, str], Selection] = {}
        """The blocks of the next jobs, by retention and, if they were declined together with others', by request id."""
        self.running = RunningStores()
        self._backlog = Backlog(0)
        self._most_held_backlog = 0
        self._pause = RETRY_SECONDS
        self._retry = 0.0
        """When the backlog may be tried again; monotonic seconds."""

    def bind(self, pool: GpuBlockPool) -> None:
        self._pool = pool
        # While the daemon hangs, the engine continues with the other blocks: enough for its longest request, unless
        # that request needs nearly all blocks.
        usable = pool.num_gpu_blocks - 1
        self._most_hung = min(usable // 2, max(usable - self._longest, usable // 8))
        self._most_held = usable if self._waits else self._most_hung
        # A request that arrives meanwhile must find room, but what is not held is overwritten where the GPU is full.
        self._most_held_backlog = self._most_hung if self._waits else min(self._most_hung, max(1, usable // 8))
        self._backlog = Backlog(pool.num_gpu_blocks)  # the GPU cannot have more
        self._is_held = np.zeros(pool.num_gpu_blocks, np.bool_)
        # A watermark above the number of blocks would only make the walks rarer.
        self._watermark = self._allocated = min(self._watermark, pool.num_gpu_blocks)

    @property
    def outstanding(self) -> bool:
        """Whether references are held."""
        return bool(self.running or self._num_planned)

    def gpu_is_empty(self) -> bool:
        """Whether no GPU block is in use or can be hit, so that no earlier KV gets into later stores. Checks every
        block."""
        blocks = () if self._pool is None else self._pool.blocks
        return not any((block.ref_cnt or block.block_hash is not None) and not block.is_null for block in blocks)

    def backlog_waits(self, now: float) -> float | None:
        """Seconds until an idle engine should step to store the backlog; None: there is none."""
        return max(0.0, self._retry - now) if self._backlog.count else None

    def frees_soon(self, now: float) -> bool:
        """Whether stores that end soon hold blocks that have no other reference.

        Args:
            now: monotonic seconds.
        """
        if self.running.silent_for(SOON_SECONDS, now):
            return False
        selections = (*self._planned.values(), *(store.selection for store in self.running))
        return any(block.ref_cnt == 1 for each in selections for block in each)

    # -- planning --------------------------------------------------------------------------------------------------

    def new_step(self, now: float) -> bool:
        """Begin a step.

        Args:
            now: monotonic seconds.

        Returns:
            Whether `step` may find blocks to store. It also may if vLLM has preempted a request.
        """
        self._now = now
        self.running.new_step()
        return now >= self._next or self._backlog.count > 0

    def gives_up(self) -> bool:
        """Whether the ranks must give up the daemon in this step, so that the engine gets its blocks back."""
        if self._num_held <= self._most_hung or not self.running.silent_for(GIVE_UP_SECONDS, self._now):
            return False
        self.running.wait_anew(self._now)
        self._counters.given_up_daemons += 1
        return True

    def step(self, requests: Mapping[str, RequestProgress], scheduler_output: Any) -> None:
        """Plan stores: in eager mode for the confirmed full blocks of running requests, in lazy mode for the blocks
        that new requests have hit and for those that are evicted next."""
        if self._pool is None:
            return
        if self._lazy:
            self._step_lazy(requests, scheduler_output)
        else:
            self._step_eager(requests, scheduler_output)
        may_plan_backlog = self._backlog.count and self._now >= self._retry
        if may_plan_backlog and not (self._lazy and scheduler_output.total_num_scheduled_tokens):
            self._plan_backlog(scheduler_output.total_num_scheduled_tokens)

    def _step_eager(self, requests: Mapping[str, RequestProgress], scheduler_output: Any) -> None:
        for request_id in scheduler_output.preempted_req_ids or ():
            if (progress := requests.get(request_id)) is not None:
                done, progress.tables = progress.done, ()
                self.store_remaining(progress)
                # Blocks that vLLM gave to others in this step were not found: they are computed again, or hit.
                progress.done = done
        if self._now < self._next:
            return  # a block per step and request would mean many small jobs; requests that end need no wait
        lag, alignment, in_flight = self._lag, self._alignment, self._written.tokens_in_flight()
        left = False
        for request_id in scheduler_output.num_scheduled_tokens:
            progress = requests.get(request_id)
            if progress is None:
                continue
            tokens = progress.request.num_computed_tokens - lag
            if tokens < progress.done + alignment and (progress.inside_done or not self._grain):
                continue  # most requests of most steps
            tokens -= sum(step.get(request_id, 0) for step in in_flight)
            self._consider_inside(progress, tokens)
            if tokens >= progress.done + alignment:
                left |= self._consider(progress, tokens)
                self._next = self._now + self._interval
        if left:
            self._next = self._now
        self._plan()

    def store_remaining(self, progress: RequestProgress, store: bool = True) -> None:
        """Plan the remaining blocks of a request that is about to lose them, and defer those for which there is no
        room. vLLM's prefix cache shows which ones are computed, as far as they are known to be written.

        Args:
            store: False without a daemon: defer all of them.
        """
        if self._pool is None:
            return
        tokens = len(progress.request.block_hashes) * self._hash_tokens
        if progress.declined:
            aligned, _ = self._bounds(progress, tokens)
            self._counters.unoffered_blocks += (aligned - progress.done) // self._alignment * self._unit_blocks
            progress.done = aligned
            return
        if store and not self._lazy:
            done = progress.done
            self._consider(progress, tokens)
            self._consider_inside(progress, tokens)
            self._plan()
            if self._written.unwritten:
                progress.done = done  # what is not written yet was left out: it is deferred
        aligned, end = self._bounds(progress, tokens)
        if aligned > progress.done:
            self._defer(progress, aligned, end)
        if self._grain and not progress.inside_done:
            self._defer_inside(progress)

    def allocated(self, blocks: int) -> None:
        """Count blocks that vLLM has allocated outside of the scheduler's output."""
        self._allocated += blocks

    def new_run(self) -> None:
        """Note that all ranks are attached to another daemon run. Running jobs count as failed: it is unknown which run
        ended them."""
        for store in self.running:
            store.failed = True
        self._retry, self._pause = 0.0, RETRY_SECONDS

    def _bounds(self, progress: RequestProgress, tokens: int) -> tuple[int, int]:
        """How many of a request's first ``tokens`` tokens can be stored: rounded down to the alignment, and as they
        are. Only blocks with hashes count."""
        request = progress.request
        if self._prompt_only:
            tokens = min(tokens, request.num_prompt_tokens)
        end = min(tokens, len(request.block_hashes) * self._hash_tokens)
        return end // self._alignment * self._alignment, end

    def _written_end(self, progress: RequestProgress, aligned: int, end: int) -> int:
        """How many of a request's first ``aligned`` tokens are known to be written: the others may be stored later."""
        for group in self._groups:
            blocks = block_range(group, progress.done, aligned, end)
            first = self._written.first_unwritten(progress.table(group.index), blocks)
            aligned = min(aligned, first * group.block_tokens // self._alignment * self._alignment)
        return aligned

    def _consider(self, progress: RequestProgress, tokens: int) -> bool:
        """Add a request's next blocks, up to ``tokens`` tokens, to the candidates, as far as there is room. Returns
        whether some are left.

        Blocks that are stored already, and null blocks, turn out to need no room when they are planned.
        """
        aligned, end = self._bounds(progress, tokens)
        aligned = self._written_end(progress, aligned, end)
        while aligned > progress.done and not progress.declined:
            room = self._room()
            if self._considered and room < (aligned - progress.done) // self._alignment * self._unit_blocks:
                self._plan()
                room = self._room()
            units = (room - self._extra_blocks) // self._unit_blocks
            if units <= 0:
                return True
            until = min(aligned, progress.done + units * self._alignment)
            for group in self._groups:
                self._considered += self._add(self._candidates[group.index], group, progress, until, end)
            progress.done = until
        return False

    def _add(self, candidates: Candidates, group: Group, progress: RequestProgress, aligned: int, end: int) -> int:
        """Add the blocks of one group to the candidates. Returns how many."""
        request, indices = progress.request, block_range(group, progress.done, aligned, end)
        # A request that begins with a hit has null blocks before what it needs of the hit.
        first = max(indices.start, min(group.first_needed(progress.began), indices.stop))
        hashes = group.hashes(request.block_hashes, first, indices.stop)
        candidates.add(request, first, hashes, progress.table(group.index))
        return len(hashes)

    def _end_inside(self, progress: RequestProgress) -> tuple[int, Sequence[bytes]]:
        """Tokens of a request's prompt after which a later request may continue inside a block, and the hash of that
        block; 0: at the end of a block, or nowhere."""
        end = hits.limit_inside(self._groups, progress.request.num_prompt_tokens)
        if end % self._alignment == 0:
            return 0, ()
        return end, progress.request.block_hashes[end // self._hash_tokens - 1 :][:1]

    def _consider_inside(self, progress: RequestProgress, tokens: int) -> None:
        """Add the blocks inside which a request's prompt ends to the candidates, once they are written and no request
        continues in a state; see `WrittenBlocks`.

        Args:
            tokens: number of the request's computed tokens.
        """
        assert self._pool is not None
        if not self._grain or progress.inside_done:
            return
        end, hashes = self._end_inside(progress)
        if tokens < end:
            return
        find = self._pool.cached_block_hash_to_block.get_one_block
        blocks = {group: find(each + group_suffix(group.index)) for group in self._groups for each in hashes}
        if any(block is not None and block.block_id in self._written.unwritten for block in blocks.values()):
            return
        # Of the other groups the full block serves as well, which vLLM may know by now instead.
        if blocks and all(block is not None or group.chained for group, block in blocks.items()):
            if self._room() < len(blocks):
                return
            for group in blocks:
                at = end // group.block_tokens
                self._candidates[group.index].add(progress.request, at, hashes, (), inside=end)
            self._considered += len(blocks)
        progress.inside_done = True

    def _step_lazy(self, requests: Mapping[str, RequestProgress], scheduler_output: Any) -> None:
        cached = scheduler_output.scheduled_cached_reqs.new_block_ids
        fresh = (each.block_ids for each in scheduler_output.scheduled_new_reqs)
        self._allocated += sum(len(ids) for groups in (*cached, *fresh) if groups for ids in groups if ids)
        for each in scheduler_output.scheduled_new_reqs:
            # Blocks that are hit again are worth the most, and never come near their eviction.
            if each.num_computed_tokens and (progress := requests.get(each.req_id)) is not None:
                self._consider(progress, each.num_computed_tokens - self._lag)
        self._plan()
        # A quarter of the watermark is enough: blocks enter the walk long before they are evicted.
        if self.walks and self._allocated >= max(1, self._watermark // 4) and (room := self._room()) > 0:
            self._walk(room)

    def _walk(self, room: int) -> None:
        assert self._pool is not None
        self._allocated = 0
        found = walk(self._pool, self._stored_filter, self._by_index, self._watermark)
        if len(found) > room:
            self._allocated = self._watermark  # continue in the next step
        for index, each, block in reversed(found[:room]):  # as in a request, where the end is evicted first
            self._candidates[index].hashes.append(each)
            self._candidates[index].blocks.append(block)
        self._plan()

    # -- backlog ---------------------------------------------------------------------------------------------------

    def _defer(self, progress: RequestProgress, aligned: int, end: int) -> None:
        """Add a request's blocks to the backlog, as far as the GPU's prefix cache has them. They may not be written
        yet."""
        for group in self._groups:
            candidates = Candidates()
            self._add(candidates, group, progress, aligned, end)
            self._defer_candidates(group, candidates)
        progress.done = aligned

    def _defer_inside(self, progress: RequestProgress) -> None:
        """Add the blocks inside which a request's prompt ends to the backlog, like `_defer`."""
        end, hashes = self._end_inside(progress)
        for group in self._groups if hashes else ():
            candidates = Candidates()
            candidates.add(progress.request, end // group.block_tokens, hashes, (), inside=end)
            self._defer_candidates(group, candidates)
        progress.inside_done = True

    def _defer_candidates(self, group: Group, candidates: Candidates) -> None:
        """Add the candidates of one request to the backlog."""
        assert self._pool is not None
        chosen = choose(self._pool, self._stored_filter, group, candidates, ())
        if chosen is None:
            return
        (span,) = candidates.spans
        if self._events is not None:
            for i in chosen.places:
                self._events.note(span.request, group, span.first + i, candidates.hashes[i], inside=span.inside)
        retention = self.retention.get(span.request.request_id, DEFAULT_RETENTION)
        self._add_to_backlog(BlockHashes(group.index, chosen.packed.hashes, chosen.tags, retention))

    def _add_to_backlog(self, part: BlockHashes) -> None:
        for each in self._backlog.add(part):
            if unknown := each.only(~self._stored_filter.find(each.tags)):
                self._abandon(unknown.group, unknown.split())

    def _abandon(self, group: int, hashes: Sequence[bytes]) -> None:
        self._counters.given_up_blocks += len(hashes)
        if self._events is not None:
            self._events.not_stored(group, hashes)

    def _plan_backlog(self, tokens: int) -> None:
        """Plan stores of the backlog in a step that computes this many tokens."""
        if self.running.silent_for(HUNG_SECONDS, self._now):
            return
        most = min(max(BACKLOG_BLOCKS, tokens), STEP_BLOCKS - self._num_planned)
        room = min(most, self._most_held_backlog - self._num_held)
        hashes_of: dict[Retention, dict[int, dict[bytes, None]]] = {}
        # Reversed, so that the oldest are freed, and so evicted, first.
        for part in reversed(self._backlog.take(room)):
            unknown = part.only(~self._stored_filter.find(part.tags))
            of_groups = hashes_of.setdefault(part.retention, {})
            of_groups.setdefault(part.group, {}).update(dict.fromkeys(unknown.split()))
        for retention, of_groups in hashes_of.items():
            for index, hashes in of_groups.items():
                self._candidates[index] = Candidates(list(hashes), [None] * len(hashes))
            planned = self._plan(retention)
            for index, hashes in of_groups.items():
                places = set(planned[index].places) if index in planned else set()
                if missing := [each for i, each in enumerate(hashes) if i not in places]:
                    self._try_again_or_abandon(index, missing, retention)

    def _try_again_or_abandon(self, group: int, hashes: Sequence[bytes], retention: Retention) -> None:
        """Put blocks that are not written yet into the backlog again. The others are evicted."""
        assert self._pool is not None
        suffix, find = group_suffix(group), self._pool.cached_block_hash_to_block.get_one_block
        blocks = [find(each + suffix) for each in hashes]
        waits = [block is not None and block.block_id in self._written.unwritten for block in blocks]
        unwritten = list(compress(hashes, waits))
        evicted = list(compress(hashes, map(not_, waits)))
        if unwritten:
            packed = b"".join(unwritten)
            self._add_to_backlog(BlockHashes(group, packed, tags_of(group, packed, len(unwritten)), retention))
        if evicted:
            self._abandon(group, evicted)

    def _room(self) -> int:
        """Number of further blocks that this step may consider."""
        if self.running.silent_for(HUNG_SECONDS, self._now):
            self._counters.held_back_stores += 1
            return 0
        most = self._most_hung if self.running.has_run_for(HUNG_SECONDS, self._now) else self._most_held
        if self._num_held >= most:
            self._counters.held_back_stores += 1
        return min(STEP_BLOCKS - self._num_planned, most - self._num_held) - self._considered

    @property
    def _num_planned(self) -> int:
        return sum(map(len, self._planned.values()))

    def _plan(self, retention: Retention | None = None) -> dict[int, Chosen]:
        """Choose from the candidates of all requests at once, which is faster than one call per request. Returns the
        choice by group, including blocks that are held for an earlier plan or a running job: those are not planned
        again, whatever the filter has forgotten.

        Args:
            retention: the retention of the blocks; None: that of their requests.
        """
        assert self._pool is not None
        self._considered, planned = 0, {}
        for group in self._groups:
            candidates = self._candidates[group.index]
            if not candidates.hashes:
                continue
            self._candidates[group.index] = Candidates()
            chosen = choose(self._pool, self._stored_filter, group, candidates, self._written.unwritten)
            if chosen is None:
                continue
            planned[group.index] = chosen
            self._stored_filter.add(chosen.tags)
            ids = chosen.packed.id_array()
            held = self._is_held[ids]
            if self._grain:  # a block may have the hashes of all places at which prompts have ended inside it
                held[np.setdiff1d(np.arange(len(ids)), np.unique(ids, return_index=True)[1])] = True
            if np.count_nonzero(held):
                if self._grain:
                    self._defer_held(chosen.only(np.flatnonzero(held).tolist()), candidates.spans, retention)
                if held.all():
                    continue
                chosen = chosen.only(np.flatnonzero(~held).tolist())
            if retention is not None or not self.retention:
                self._planned_as(retention or DEFAULT_RETENTION).add(chosen, candidates.spans)
            else:
                for each, part in by_retention(chosen, candidates.spans, self.retention).items():
                    self._planned_as(each).add(part, candidates.spans)
            self._num_held += len(chosen.blocks)
            self._is_held[chosen.packed.id_array()] = True
            # Now, not when the job is sent: vLLM may reuse these blocks in between.
            self._pool.touch(chosen.blocks)
            self._note(group, candidates, chosen)
        return planned

    def _defer_held(self, chosen: Chosen, spans: Sequence[Span], retention: Retention | None) -> None:
        """Put blocks that are held under another hash into the backlog."""
        by = by_retention(chosen, spans, self.retention) if retention is None else {retention: chosen}
        for each, part in by.items():
            self._stored_filter.discard(part.tags)
            self._add_to_backlog(BlockHashes(part.packed.group, part.packed.hashes, part.tags, each))

    def _planned_as(self, retention: Retention) -> Selection:
        return self._planned.setdefault((retention, ""), Selection(retention))

    def _note(self, group: Group, candidates: Candidates, chosen: Chosen) -> None:
        """Record which requests the chosen blocks belong to, for the trace and the KV events."""
        if self._events is None and not any(span.request.trace_headers for span in candidates.spans):
            return
        ends = [*(span.begin for span in candidates.spans[1:]), len(candidates.hashes)]
        for span, end in zip(candidates.spans, ends, strict=False):
            planned = self._planned_as(self.retention.get(span.request.request_id, DEFAULT_RETENTION))
            traceparent = sampled_traceparent_of(span.request) if planned.traceparent is None else None
            if traceparent is None and self._events is None:
                continue
            mine = chosen.places[bisect_left(chosen.places, span.begin) : bisect_left(chosen.places, end)]
            if mine and traceparent is not None:
                planned.traceparent = traceparent
            if self._events is not None:
                for i in mine:
                    at = span.first + i - span.begin
                    self._events.note(span.request, group, at, candidates.hashes[i], inside=span.inside)

    # -- jobs ------------------------------------------------------------------------------------------------------

    def take_jobs(self) -> tuple[StoreJob, ...]:
        """Make a job of the planned blocks, to send to the ranks."""
        if not self._planned:
            return ()
        planned, self._planned = self._planned, {}
        return tuple(self._job(each) for each in planned.values() if each.count)

    def _job(self, planned: Selection) -> StoreJob:
        number, blocks = next(self._numbers), planned.packed()
        if (events := self._events) is not None:
            blocks = tuple(replace(each, notes=events.notes(each.group, each.split())) for each in blocks)
        self.running.add(number, planned, blocks, self._world_size, self._now)
        self._counters.stores += 1
        self._counters.stored_blocks += len(planned)
        return StoreJob(number, blocks, planned.traceparent, planned.retention)

    def take_report(self, report: RankReport) -> list[str]:
        """Handle a report. Returns the ids of requests whose blocks the daemon has declined. It declines a job as a
        whole: one with blocks of several requests is sent again, as a job for each."""
        declined: list[str] = []
        for store in self.running.ended(report, self._now):
            if not store.admitted:
                self._counters.not_admitted_stores += 1
                of_requests = store.selection.by_request() if store.retry else {}
                if len(of_requests) > 1:
                    for request_id, each in of_requests.items():
                        self._planned.setdefault((each.retention, request_id), Selection(each.retention)).extend(each)
                    continue
                declined += of_requests
            retry = store.retry and store.admitted
            self._end(store.selection, store.blocks, store.failed, retry, admitted=store.admitted, tells=store.tells)
        return declined

    def let_go(self) -> None:
        """Release all blocks for a moment, in which vLLM may empty its prefix cache but gives no block to a request: it
        does the former only if nothing holds a block. Their content stays, and the stores continue."""
        if self._pool is not None:
            self._lets_go = True
            self._pool.free_blocks(self._held())

    def hold_again(self) -> None:
        """Hold the blocks again that stores read, after `let_go`."""
        if self._lets_go and self._pool is not None:
            self._lets_go = False
            self._pool.touch(self._held())

    def _held(self) -> list[Any]:
        selections = (*self._planned.values(), *(store.selection for store in self.running))
        return [block for each in selections for block in each]

    def reset(self) -> None:
        """Drop the planned blocks and the backlog. The ends of running stores are not reported, because their keys are
        no longer looked up, and none is retried."""
        planned, self._planned = self._planned, {}
        for each in planned.values():
            self._end(each, each.packed(), failed=True, retry=False)
        for store in self.running:
            store.retry, store.tells = False, False
        for part in self._backlog.take(self._backlog.count):
            if self._events is not None:
                self._events.not_stored(part.group, part.split())

    def _end(
        self,
        selection: Selection,
        blocks: Sequence[GroupBlocks],
        failed: bool,
        retry: bool,
        *,
        admitted: bool = True,
        tells: bool = True,
    ) -> None:
        assert self._pool is not None
        self._num_held -= len(selection)
        for each in blocks:
            self._is_held[each.id_array()] = False
        if not self._lets_go:
            self._pool.free_blocks(selection.in_order_of_eviction())
        if not failed:
            self._pause, self._retry = RETRY_SECONDS, min(self._retry, self._now + RETRY_SECONDS)
            if tells and self._events is not None:
                for each in blocks:
                    self._events.stored(each.group, each.split())
            return
        if admitted:
            self._counters.failed_stores += 1
            self._retry, self._pause = self._now + self._pause, min(2 * self._pause, MAX_RETRY_SECONDS)
        for each in blocks if tells else ():
            tags = tags_of(each.group, each.hashes, len(each))
            self._stored_filter.discard(tags)
            if retry:
                self._add_to_backlog(BlockHashes(each.group, each.hashes, tags, selection.retention))
            elif self._events is not None:
                self._events.not_stored(each.group, each.split())
