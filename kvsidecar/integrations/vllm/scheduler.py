"""The connector's scheduler side: decides which blocks to load for which request, and which to store. Imports no vLLM.

Named as vLLM's hooks, which `kvsidecar.integrations.vllm.connector` forwards. All run on the engine's thread.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from kvsidecar.integrations.generations import Generations, read_name
from kvsidecar.integrations.vllm.asking import Asked, SchedulerClient
from kvsidecar.integrations.vllm.counters import Counters
from kvsidecar.integrations.vllm.events import Events
from kvsidecar.integrations.vllm.groups import Group
from kvsidecar.integrations.vllm.loads import Loads
from kvsidecar.integrations.vllm.lookups import Lookups
from kvsidecar.integrations.vllm.metadata import IDLE, NOTHING, LoadJob, RankReport, StepOrders, StoreJob
from kvsidecar.integrations.vllm.options import Options
from kvsidecar.integrations.vllm.stored_filter import StoredFilter
from kvsidecar.integrations.vllm.stores import Progress, Stores
from kvsidecar.integrations.vllm.storing import Pool
from kvsidecar.types import Namespace

_log = logging.getLogger("kvsidecar.vllm")

AnyJob = TypeVar("AnyJob", StoreJob, LoadJob)


class SchedulerSide:
    """One per engine, in its scheduler's process.

    Args:
        hash_bytes: of a block hash.
        groups: as `groups_of` says, the same as on the workers.
        world_size: ranks that attach and report.
        client: only looks up; closed by `shutdown`.
        events: collects KV cache events, if vLLM wants them.
        step_tokens: the most that one step computes (``max_num_batched_tokens``).
        longest_blocks: the most that one request needs: stores leave it so many of the GPU's.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        options: Options,
        hash_bytes: int,
        groups: Sequence[Group],
        world_size: int,
        client: Asked,
        *,
        events: Events | None = None,
        step_tokens: int = 8192,
        longest_blocks: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = Counters()
        self._options, self._world_size, self._clock = options, world_size, clock
        # A file that is there already was written for weights that this engine does not have: it was just started.
        had = read_name(options.weights_version_file)
        self._generations = Generations(hash_bytes, options.weights_version, had=[had] if had else [])
        self._client = SchedulerClient(client, self._generations)
        self._alignment = groups[0].alignment
        self._stored_filter, self._events = StoredFilter(), events
        numbers = itertools.count(1)
        self._lookups = Lookups(
            options, hash_bytes, groups, self._client, self._stored_filter, self.counters, events, clock
        )
        self._loads = Loads(
            groups,
            hash_bytes,
            world_size,
            self._lookups,
            self._stored_filter,
            self.counters,
            numbers,
        )
        self._stores = Stores(
            options,
            groups,
            world_size,
            self._stored_filter,
            self.counters,
            events,
            numbers,
            step_tokens,
            longest_blocks,
        )
        self._counts = False
        """Whether the counters may have changed since `take_counts`."""
        self._shut = False
        """vLLM has refused a reset, so the GPU may hold KV of other weights than those of now."""
        self._null_block = 0
        self._ranks: dict[int, int] = {}
        self._epoch = 0
        """The daemon run that every rank is attached to; 0 while they are not."""
        self._last_epoch = 0
        self._requests: dict[str, Progress] = {}
        self._failed: set[str] = set()
        """Requests whose load has failed, until they are computed: the next load might fail as well, and so on."""

    @property
    def attached(self) -> bool:
        """Whether every rank is attached to the same run of the daemon."""
        return self._epoch != 0

    @property
    def _open(self) -> bool:
        return self._epoch != 0 and not self._shut

    # -- hits ------------------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens behind ``num_computed_tokens`` that can be loaded, and whether that is done beside the steps.

        None: not known yet, ask again in the next step. No side effects but a memo, and a lease that ends by itself.
        """
        if (
            not self._open
            or request.skip_reading_prefix_cache
            or num_computed_tokens % self._alignment
            or request.request_id in self._failed
        ):
            return 0, False
        self._counts = True
        tokens = self._lookups.hit(request, num_computed_tokens, self._epoch)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """vLLM has allocated ``blocks`` for a request; those of ``num_external_tokens`` tokens are to be loaded."""
        request_id = request.request_id
        progress = self._requests.get(request_id)
        if progress is None:
            progress = self._requests[request_id] = Progress(request)
        progress.tables = getattr(blocks, "blocks", ())
        if num_external_tokens <= 0:
            self._lookups.forget(request_id)
            self._failed.discard(request_id)  # it is computed now; when it is preempted it may load again
            return
        offer = self._lookups.take(request_id)
        if offer is None:
            raise RuntimeError(f"vLLM loads {num_external_tokens} tokens of {request_id}, which were not offered")
        self._counts = True
        block_ids = blocks.get_block_ids()
        self._stores.allocated(self._loads.plan(request, block_ids, offer, num_external_tokens, self._null_block))

    # -- steps -----------------------------------------------------------------------------------------------------

    def build_orders(self, scheduler_output: Any) -> StepOrders:
        """What the ranks are to do in this step; mostly `NOTHING`, found without a look at any request."""
        if self._lookups.used:
            self._lookups.new_step()
        if (self._stores.new_step(self._clock()) or scheduler_output.preempted_req_ids) and self._open:
            self._counts = True
            self._stores.step(self._requests, scheduler_output)
        idle = not scheduler_output.total_num_scheduled_tokens
        stores, loads = self._stores.take_jobs(), self._loads.planned and self._loads.take_jobs()
        if not (stores or loads):
            return IDLE if idle else NOTHING
        self._counts = True
        return StepOrders(self._keyed(stores), self._keyed(loads), idle)

    def _keyed(self, jobs: Sequence[AnyJob]) -> tuple[AnyJob, ...]:
        """The jobs as the ranks are told of them: with the keys of this generation."""
        if self._generations.first or not jobs:
            return tuple(jobs)
        keys = self._generations.keys
        return tuple(
            replace(job, blocks=tuple(replace(each, hashes=keys(each.hashes)) for each in job.blocks)) for job in jobs
        )

    def take_namespace(self, namespace: Namespace) -> bool:
        """Ask in this namespace, which a rank stores in. False: other ranks store in another one, which is kept."""
        if self._client.namespace is None:
            self._client.namespace = namespace
            _log.info("kvsidecar: namespace %s", namespace)
        elif namespace != self._client.namespace:
            _log.error("kvsidecar: no offload: ranks hold KV of %s and of %s", self._client.namespace, namespace)
            return False
        return True

    def connect(self, timeout: float) -> None:
        """Connect for the first lookup, if a rank has said its namespace. Waits at most ``timeout`` seconds."""
        if self._client.namespace is not None:
            self._client.connect(timeout)

    def take_report(self, report: RankReport) -> None:
        """What the ranks have said since the last call."""
        self._counts = True
        if report.attached:
            self._take_attached(report)
        if report.stored:
            self._stores.take_report(report)
        if report.loaded:
            self._failed.update(each for each in self._loads.take_report(report) if each in self._requests)

    def _take_attached(self, report: RankReport) -> None:
        self._ranks.update(report.attached)
        epochs = set(self._ranks.values())
        self._epoch = epochs.pop() if len(self._ranks) == self._world_size and len(epochs) == 1 else 0
        if not self._epoch or self._epoch == self._last_epoch:
            return
        # Another run of the daemon: it has nothing of what was stored, so all is stored again.
        self._last_epoch = self._epoch
        self._stored_filter.clear()
        self._lookups.forget_all()
        self._stores.new_run()
        if self._events is not None:
            self._events.all_removed()
        for progress in self._requests.values():
            progress.done = 0
        self._lookups.connect()

    @property
    def _jobs_outstanding(self) -> bool:
        return self._stores.outstanding or self._loads.outstanding

    def has_pending_push_work(self) -> bool:
        """Whether there is something to tell the ranks, or to hear from them: an idle engine must go on stepping."""
        return (
            self._jobs_outstanding
            or (self._open and self._stores.is_due(self._clock))
            or (self._events is not None and self._events.pending)
        )

    def has_pending_block_frees(self) -> bool:
        """Whether GPU blocks become free soon without a preemption: those that only stores still hold.

        vLLM waits instead of preempting as long as this says so: never for a daemon that does not answer.
        """
        return not self._client.hangs and self._stores.frees_soon(self._clock())

    # -- requests --------------------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """A request has arrived: what vLLM will ask for in a step is asked now, and not waited for."""
        if self._open and not request.skip_reading_prefix_cache:
            self._lookups.ask_ahead(request)

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """A request ends, and still has its blocks. They may be freed at once: stores hold references of their own."""
        request_id = request.request_id
        self._lookups.forget(request_id)
        self._failed.discard(request_id)
        progress = self._requests.pop(request_id, None)
        if progress is not None:
            self._counts = True
            self._stores.rest(progress, self._open)
        return False, None

    # -- the engine ------------------------------------------------------------------------------------------------

    def bind_block_pool(self, pool: Pool) -> None:
        """vLLM's pool of GPU blocks. Without it nothing is stored."""
        self._null_block = pool.null_block.block_id
        self._stores.bind(pool)

    def reset_cache(self) -> bool | None:
        """The weights may be others from now on: what was stored until now is not hit any more. Other engines, which
        may have the old weights still, are left what they share. Asks nobody.

        False: vLLM has refused to empty the GPU's own cache, where blocks are in use by requests or stores. It must be
        asked again. Until it has succeeded nothing is hit or stored, since nobody could say of which weights.
        """
        self._counts = True
        self.counters.resets += 1
        self._stored_filter.clear()
        self._lookups.forget_all()
        # Requests that run go on with KV of before the reset: it is not stored. Those that vLLM has preempted are
        # taken up again when they get blocks.
        self._requests.clear()
        self._stores.reset()
        if self._events is not None:
            self._events.all_removed()
        if self._jobs_outstanding or not self._stores.gpu_is_empty():
            self.counters.refused_resets += 1
            if not self._shut:
                _log.warning(
                    "kvsidecar: vLLM refused to reset its prefix cache because blocks are in use: nothing is offloaded "
                    "until a reset with reset_connector succeeds"
                )
            self._shut = True
            return False
        self._shut = False
        name = read_name(self._options.weights_version_file)
        if self._generations.next(name):
            _log.info("kvsidecar: reset: blocks are shared with engines whose weights are named %r", name)
        else:
            self.counters.unnamed_resets += 1
            _log.warning(
                "kvsidecar: reset without a new name for the weights: this engine shares its blocks with no other "
                "until it gets a name (weights_version_file) or is restarted"
            )
        return True

    def take_counts(self) -> dict[str, int]:
        """What was counted since the last call, as `Counters.take`. Does not look at the counters behind a step in
        which nothing was done: to read them takes longer than all else that such a step costs."""
        if not self._counts:
            return {}
        self._counts = False
        return self.counters.take()

    def take_events(self) -> Sequence[Any]:
        """vLLM's KV cache events since the last call."""
        return self._events.take() if self._events is not None else ()

    def shutdown(self) -> None:
        """Leases end with the client's connection."""
        self._client.close()
