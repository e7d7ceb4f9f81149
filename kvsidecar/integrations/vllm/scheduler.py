"""The scheduler's side of the connector: which blocks are loaded for whom, and which are stored. Knows no vLLM class.

Named as vLLM's hooks, which `kvsidecar.integrations.vllm.connector` forwards. All run on the engine's thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvsidecar.integrations.vllm.counters import Counters
from kvsidecar.integrations.vllm.groups import Group, Kind
from kvsidecar.integrations.vllm.lookups import Asked, Lookups
from kvsidecar.integrations.vllm.metadata import GroupBlocks, LoadJob, RankReport, StepOrders, StoreJob
from kvsidecar.integrations.vllm.options import Options
from kvsidecar.integrations.vllm.storing import Known, Pool, Selection, keys_of, select
from kvsidecar.types import LookupMode, Namespace

_log = logging.getLogger("kvsidecar.vllm")

STEP_BLOCKS = 2048
"""About as many blocks as one step plans to store: the rest waits for the next one."""


@dataclass(slots=True)
class _Request:
    request: Any
    done: int = 0
    """Tokens whose blocks were considered for storing; aligned."""
    hits_failed: bool = False
    """A load for it failed: it is computed now, for it may fail for ever."""


@dataclass(slots=True)
class _Store:
    blocks: list[Any]
    """The pool's blocks that are held, in the order in which they are to be evicted."""
    keys: list[bytes]
    ranks: int
    """That have not reported."""
    failed: bool = False


@dataclass(slots=True)
class _Load:
    request_id: str
    lease: int | None
    keys: list[bytes]
    ranks: int
    failed: bool = False


class SchedulerSide:
    """One per engine, in its scheduler's process.

    Args:
        groups: as `groups_of` says, the same as on the workers.
        world_size: ranks that attach and report.
        client: only looks up; closed by `shutdown`. Its ``timeout`` is that of a reset.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        options: Options,
        namespace: Namespace,
        groups: Sequence[Group],
        world_size: int,
        client: Asked,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = Counters()
        self._options, self._namespace, self._groups = options, namespace, tuple(groups)
        self._world_size, self._client, self._clock = world_size, client, clock
        self._alignment = self._groups[0].alignment
        self._lag = max(group.lag_tokens for group in self._groups)
        self._known = Known()
        self._lookups = Lookups(options, namespace, self._groups, client, self._known, self.counters, clock)
        self._pool: Pool | None = None
        self._ranks: dict[int, int] = {}
        self._epoch = 0
        self._last_epoch = 0
        self._requests: dict[str, _Request] = {}
        self._number = 0
        self._stores: dict[int, _Store] = {}
        self._loads: dict[int, _Load] = {}
        self._pending = Selection()
        self._new_loads: list[LoadJob] = []

    def set_namespace(self, namespace: Namespace) -> None:
        """The one that the ranks store in: they say it before, or with, the first report that one of them is attached,
        for what they find in their memory is part of it."""
        self._namespace = namespace
        self._lookups.set_namespace(namespace)

    # -- hits ------------------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens behind ``num_computed_tokens`` that can be loaded, and whether that is done beside the steps.

        None: not known yet, ask again in the next step. No side effects but a memo.
        """
        if not self._epoch or request.skip_reading_prefix_cache or num_computed_tokens % self._alignment:
            return 0, False
        state = self._requests.get(request.request_id)
        if state is not None and state.hits_failed:
            return 0, False
        tokens = self._lookups.hit(request, num_computed_tokens, self._epoch)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """vLLM has allocated blocks for a request, ``num_external_tokens`` of them to be loaded."""
        request_id = request.request_id
        if request_id not in self._requests:
            self._requests[request_id] = _Request(request)
        local = self._lookups.local_tokens(request_id)
        self._lookups.forget(request_id)
        if num_external_tokens <= 0:
            return
        if local is None:
            raise RuntimeError(f"vLLM loads {num_external_tokens} tokens of {request_id}, which were not offered")
        self._plan_load(request, blocks.get_block_ids(), local, num_external_tokens)

    def _plan_load(self, request: Any, block_ids: Sequence[Sequence[int]], local: int, external: int) -> None:
        null = 0 if self._pool is None else self._pool.null_block.block_id
        packed, keys = [], []
        for group in self._groups:
            first, end = local // group.block_tokens, -(-(local + external) // group.block_tokens)
            ids = block_ids[group.index][first:end]
            hashes = group.hashes(request.block_hashes, first, end)
            if group.kind is not Kind.FULL:
                pairs = [(each, block) for each, block in zip(hashes, ids, strict=False) if block != null]
                hashes, ids = [each for each, _ in pairs], [block for _, block in pairs]
            if ids:
                packed.append(GroupBlocks(group.index, b"".join(hashes), np.array(ids, np.int64)))
                keys += keys_of(group, hashes)
        answer = self._lookups.ask(
            {each.group: each.hashes for each in packed}, LookupMode.PREFIX, self._options.lease_seconds
        )
        if any(answer.groups[each.group].hits < len(each.block_ids) for each in packed if each.group in answer.groups):
            # It is sent all the same: the daemon declines it, and it fails as any other load does.
            self.counters.gone_loads += 1
        self._number += 1
        self._new_loads.append(LoadJob(self._number, request.request_id, answer.lease, tuple(packed)))
        self._loads[self._number] = _Load(request.request_id, answer.lease, keys, self._world_size)
        self._known.add(keys)
        self.counters.loads += 1
        self.counters.loaded_tokens += external

    # -- steps -----------------------------------------------------------------------------------------------------

    def build_orders(self, scheduler_output: Any) -> StepOrders:
        """What the ranks are to do in this step."""
        self._lookups.new_step()
        if self._epoch and self._pool is not None:
            self._select(scheduler_output.num_scheduled_tokens)
        stores: tuple[StoreJob, ...] = ()
        if self._pending:
            stores = (self._plan_store(),)
        loads, self._new_loads = tuple(self._new_loads), []
        return StepOrders(stores, loads, idle=not scheduler_output.total_num_scheduled_tokens)

    def _select(self, scheduled: Any) -> None:
        assert self._pool is not None
        for request_id in scheduled:
            state = self._requests.get(request_id)
            if state is None:
                continue
            request = state.request
            tokens = request.num_computed_tokens - request.num_output_placeholders - self._lag
            if tokens < state.done + self._alignment:
                continue
            self._add(state, tokens)

    def _add(self, state: _Request, tokens: int) -> None:
        assert self._pool is not None
        request = state.request
        if self._options.store_prompt_only:
            tokens = min(tokens, request.num_prompt_tokens)
        found = Selection()
        state.done = select(found, self._groups, request.block_hashes, state.done, tokens, self._pool, self._known)
        for group, hashes in found.hashes.items():
            self._pending.add(group, hashes, found.blocks[group])
        self._pool.touch(found.all_blocks())

    def _plan_store(self) -> StoreJob:
        selection, self._pending = self._pending, Selection()
        self._number += 1
        keys = [key for g in self._groups for key in keys_of(g, selection.hashes.get(g.index, ()))]
        self._stores[self._number] = _Store(selection.all_blocks(), keys, self._world_size)
        self.counters.stores += 1
        self.counters.stored_blocks += len(keys)
        return StoreJob(self._number, selection.packed())

    def take_report(self, report: RankReport) -> None:
        """What the ranks have said since the last call."""
        if report.attached:
            self._ranks.update(report.attached)
            epochs = set(self._ranks.values())
            self._epoch = epochs.pop() if len(self._ranks) == self._world_size and len(epochs) == 1 else 0
            if self._epoch and self._epoch != self._last_epoch:
                self._last_epoch = self._epoch
                self._known.clear()
                self._lookups.forget_all()
                for state in self._requests.values():
                    state.done = 0
        for number, count in report.stored.items():
            if (store := self._stores.get(number)) is not None:
                store.failed |= number in report.not_stored
                store.ranks -= count
                if store.ranks <= 0:
                    del self._stores[number]
                    self._end_store(store)
        for number, count in report.loaded.items():
            if (load := self._loads.get(number)) is not None:
                load.failed |= number in report.not_loaded
                load.ranks -= count
                if load.ranks <= 0:
                    del self._loads[number]
                    self._end_load(load)

    def _end_store(self, store: _Store) -> None:
        assert self._pool is not None
        self._pool.free_blocks(store.blocks)
        if store.failed:
            self._known.discard(store.keys)
            self.counters.failed_stores += 1

    def _end_load(self, load: _Load) -> None:
        if load.lease is not None:
            self._client.release(load.lease, timeout=self._options.lookup_budget)
        if load.failed:
            self._known.discard(load.keys)
            self.counters.failed_loads += 1
            if (state := self._requests.get(load.request_id)) is not None:
                state.hits_failed = True

    # -- the rest --------------------------------------------------------------------------------------------------

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """The blocks may be freed at once: stores hold their own references."""
        self._lookups.forget(request.request_id)
        self._requests.pop(request.request_id, None)
        return False, None

    def on_new_request(self, request: Any) -> None:
        """A request has arrived."""

    def bind_block_pool(self, pool: Pool) -> None:
        """vLLM's pool of GPU blocks. Without it nothing is stored."""
        self._pool = pool

    def has_pending_push_work(self) -> bool:
        """Whether there is something to tell the ranks, or to hear from them: an idle engine must go on stepping."""
        return bool(self._stores or self._loads or self._pending or self._new_loads)

    def has_pending_block_frees(self) -> bool:
        """Whether GPU blocks will be free soon without a preemption: those that only stores still hold."""
        return any(block.ref_cnt == 1 for store in self._stores.values() for block in store.blocks)

    def reset_cache(self) -> bool | None:
        """Later requests must not hit what is stored now. False: not done yet, jobs are still running."""
        self._known.clear()
        self._lookups.forget_all()
        if self.has_pending_push_work():
            return False
        self._client.clear(self._namespace)
        self.counters.resets += 1
        return True

    def take_events(self) -> Sequence[Any]:
        """vLLM's KV cache events since the last call."""
        return ()

    def shutdown(self) -> None:
        for load in self._loads.values():
            if load.lease is not None:
                self._client.release(load.lease, timeout=self._options.lookup_budget)
        self._loads.clear()
        self._client.close()
