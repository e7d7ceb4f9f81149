"""Store jobs of the scheduler's side: what is planned, and the references on the GPU's blocks that it holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvsidecar.integrations.vllm.counters import Counters
from kvsidecar.integrations.vllm.events import Events
from kvsidecar.integrations.vllm.groups import Group
from kvsidecar.integrations.vllm.metadata import RankReport, StoreJob, sampled_traceparent_of
from kvsidecar.integrations.vllm.options import Options
from kvsidecar.integrations.vllm.storing import (
    GROUP_ID_BYTES,
    Known,
    Pool,
    Selection,
    block_range,
    default_watermark,
    select,
    walk,
)

STEP_BLOCKS = 2048
"""About as many blocks as one step plans to store; the next step goes on. It bounds what a step costs."""


@dataclass(slots=True)
class Progress:
    """How far one request is stored."""

    request: Any
    done: int = 0
    """Tokens whose blocks were considered; a multiple of the alignment."""


@dataclass(slots=True)
class _Store:
    blocks: list[Any]
    """The pool's blocks that are held, in the order in which they are to be evicted."""
    keys: list[bytes]
    ranks: int
    """That have not reported."""
    failed: bool = False


class Stores:
    """Plans store jobs. Each block of a plan is held by a reference from then until every rank has reported the job:
    vLLM does not give it to anybody else, whatever becomes of its request.

    Args:
        numbers: of the jobs.
        step_tokens: the most that one step computes.
    """

    def __init__(
        self,
        options: Options,
        groups: Sequence[Group],
        world_size: int,
        known: Known,
        counters: Counters,
        events: Events | None,
        numbers: Iterator[int],
        step_tokens: int,
    ) -> None:
        self._groups, self._by_index = tuple(groups), {group.index: group for group in groups}
        self._world_size, self._known, self._counters, self._events = world_size, known, counters, events
        self._numbers = numbers
        self._alignment = self._groups[0].alignment
        self._hash_tokens = self._groups[0].hash_tokens
        self._unit_blocks = sum(self._alignment // group.block_tokens for group in groups)
        """Of all groups together, in as many tokens as the alignment."""
        self._extra_blocks = sum(group.eagle for group in groups)
        self._lag = max(group.lag_tokens for group in self._groups)
        self._prompt_only = options.store_prompt_only
        self._lazy = options.store_mode == "lazy"
        self._interval = options.store_interval
        self._next = 0.0
        """When the blocks of running requests are looked through again."""
        self._watermark = options.lazy_watermark or default_watermark(groups, step_tokens)
        self._allocated = self._watermark
        """Blocks that vLLM has taken from the free queue since the last walk, at least."""
        self._pool: Pool | None = None
        self._most_held = 0
        self._held = 0
        self._planned = Selection()
        self._running: dict[int, _Store] = {}

    def bind(self, pool: Pool) -> None:
        self._pool = pool
        # A daemon that is slow, or hangs until its jobs time out, must leave the engine blocks to work with.
        self._most_held = pool.num_gpu_blocks // 2
        # There are no more blocks to walk: a watermark above that would only make the walks rarer.
        self._watermark = self._allocated = min(self._watermark, pool.num_gpu_blocks)

    @property
    def outstanding(self) -> bool:
        """Whether references are held."""
        return bool(self._running or self._planned)

    def frees_soon(self) -> bool:
        """Whether blocks become free when jobs end: those that nobody else holds."""
        planned = self._planned.blocks.values()
        running = (store.blocks for store in self._running.values())
        return any(block.ref_cnt == 1 for blocks in (*planned, *running) for block in blocks)

    # -- planning --------------------------------------------------------------------------------------------------

    def step(self, requests: Mapping[str, Progress], scheduler_output: Any, now: float) -> None:
        """Plan what became due: in eager mode the confirmed full blocks of the requests that run, in lazy mode the
        blocks that are evicted next.

        Args:
            now: monotonic seconds.
        """
        if self._pool is None:
            return
        if self._lazy:
            self._step_lazy(scheduler_output)
            return
        for request_id in scheduler_output.preempted_req_ids or ():
            if (progress := requests.get(request_id)) is not None:
                done = progress.done
                self.rest(progress)
                # What vLLM gave to others in this very step was not found; it is computed again, or hit.
                progress.done = done
        if now < self._next:
            return  # a block a step and request would be as many small jobs; a request that ends is not waited for
        lag, alignment = self._lag, self._alignment
        for request_id in scheduler_output.num_scheduled_tokens:
            progress = requests.get(request_id)
            if progress is None:
                continue
            # Tokens of the steps before this one. In async scheduling the last ones may not be known yet.
            request = progress.request
            tokens = request.num_computed_tokens - request.num_output_placeholders - lag
            if tokens >= progress.done + alignment:
                self._plan(progress, tokens)
                self._next = now + self._interval

    def rest(self, progress: Progress) -> None:
        """A request gives its blocks up: plan all that are left. vLLM's cache knows which are computed."""
        if self._pool is not None and not self._lazy:
            self._plan(progress, len(progress.request.block_hashes) * self._hash_tokens)

    def allocated(self, blocks: int) -> None:
        """vLLM has allocated blocks that no step's output names."""
        self._allocated += blocks

    def _plan(self, progress: Progress, tokens: int) -> None:
        assert self._pool is not None
        request, hashes = progress.request, progress.request.block_hashes
        if self._prompt_only:
            tokens = min(tokens, request.num_prompt_tokens)
        end = min(tokens, len(hashes) * self._hash_tokens)
        aligned = end // self._alignment * self._alignment
        if aligned <= progress.done:
            return
        units = (self._room() - self._extra_blocks) // self._unit_blocks
        if units <= 0:
            return
        aligned = min(aligned, progress.done + units * self._alignment)
        for group in self._groups:
            indices = block_range(group, progress.done, aligned, end)
            all_hashes = group.hashes(hashes, indices.start, indices.stop)
            keys, blocks = select(self._pool, self._known, group, all_hashes)
            self._add(group, keys, blocks)
            if keys and self._planned.traceparent is None:
                self._planned.traceparent = sampled_traceparent_of(request)
            if self._events is not None:
                self._events.note(request, group, indices.start, all_hashes, keys)
        progress.done = aligned

    def _step_lazy(self, scheduler_output: Any) -> None:
        assert self._pool is not None
        cached = scheduler_output.scheduled_cached_reqs.new_block_ids
        fresh = (each.block_ids for each in scheduler_output.scheduled_new_reqs)
        self._allocated += sum(len(ids) for groups in (*cached, *fresh) if groups for ids in groups if ids)
        # Blocks reach the end of the walk before they reach the front: a walk need not be made for every block.
        if self._allocated < max(1, self._watermark // 4) or (room := self._room()) <= 0:
            return
        self._allocated = 0
        found = walk(self._pool, self._known, self._by_index, self._watermark)
        if len(found) > room:
            self._allocated = self._watermark  # go on in the next step
        for key, block in found[:room]:
            self._add(self._by_index[int.from_bytes(key[-GROUP_ID_BYTES:], "big")], [key], [block])

    def _room(self) -> int:
        """Blocks that may be planned still in this step."""
        if self._held >= self._most_held:
            self._counters.held_back += 1
        return min(STEP_BLOCKS - len(self._planned), self._most_held - self._held)

    def _add(self, group: Group, keys: list[bytes], blocks: list[Any]) -> None:
        assert self._pool is not None
        self._planned.add(group.index, keys, blocks)
        self._known.add(keys)
        self._held += len(blocks)
        # At once, not when the job is sent: vLLM may free and give away these blocks in between.
        self._pool.touch(blocks)

    # -- jobs ------------------------------------------------------------------------------------------------------

    def take_jobs(self) -> tuple[StoreJob, ...]:
        """What is planned, for the ranks."""
        if not self._planned:
            return ()
        planned, self._planned = self._planned, Selection()
        number = next(self._numbers)
        self._running[number] = _Store(planned.all_blocks(), planned.all_keys(), self._world_size)
        self._counters.stores += 1
        self._counters.stored_blocks += len(planned)
        return (StoreJob(number, planned.packed(), planned.traceparent),)

    def take_report(self, report: RankReport) -> None:
        assert self._pool is not None or not report.stored
        for number, count in report.stored.items():
            store = self._running.get(number)
            if store is None:
                continue
            store.failed |= number in report.not_stored
            store.ranks -= count
            if store.ranks <= 0:
                del self._running[number]
                self._give_back(store.blocks)
                self._end(store.keys, store.failed)

    def drop_planned(self) -> None:
        """What is planned, but not sent, is not stored."""
        planned, self._planned = self._planned, Selection()
        if planned:
            self._give_back(planned.all_blocks())
            self._end(planned.all_keys(), failed=True)

    def _give_back(self, blocks: list[Any]) -> None:
        assert self._pool is not None
        self._held -= len(blocks)
        self._pool.free_blocks(blocks)

    def _end(self, keys: Iterable[bytes], failed: bool) -> None:
        if failed:
            self._counters.failed_stores += 1
            self._known.discard(keys)  # they may be stored again
        if self._events is not None:
            (self._events.not_stored if failed else self._events.stored)(keys)
