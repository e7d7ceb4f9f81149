"""The connector's scheduler side: decides which blocks to load and to store. Imports no vLLM.

`kvsidecar.integrations.vllm.connector` forwards vLLM's hooks to the methods of the same names, on the engine's thread.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from kvsidecar.client import Client
from kvsidecar.integrations import next_use
from kvsidecar.integrations.offload_condition import ATTACHED, BREAKER_OPEN, PENDING_JOBS, WhyNot, reason_gauges
from kvsidecar.integrations.vllm import hits
from kvsidecar.integrations.vllm.adapters import ATTRIBUTE, Adapters
from kvsidecar.integrations.vllm.events import Events
from kvsidecar.integrations.vllm.groups import GroupKind
from kvsidecar.integrations.vllm.loads import Loads
from kvsidecar.integrations.vllm.lookups import Lookups
from kvsidecar.integrations.vllm.metadata import IDLE, NOTHING, LoadJob, RankReport, StepPlan, StoreJob
from kvsidecar.integrations.vllm.options import ConnectorOptions
from kvsidecar.integrations.vllm.retention import DEFAULT_RETENTION, retention_of
from kvsidecar.integrations.vllm.scheduler_client import SchedulerClient
from kvsidecar.integrations.vllm.selection import GpuBlockPool, RequestProgress
from kvsidecar.integrations.vllm.shared import EngineFacts, SchedulerState
from kvsidecar.integrations.vllm.stores import Stores
from kvsidecar.integrations.vllm.touches import Touches
from kvsidecar.integrations.vllm.waking import Alarm
from kvsidecar.integrations.vllm.written import WrittenBlocks
from kvsidecar.integrations.weights_version import WeightsVersion, read_name
from kvsidecar.types import Namespace

_log = logging.getLogger("kvsidecar.vllm")

AnyJob = TypeVar("AnyJob", StoreJob, LoadJob)

STEP_BYTES = 4 << 30
"""Most bytes of a load on one rank for which a step waits: a tenth of a second, in which no other request begins."""


class SchedulerSide:
    """The scheduler side of one engine, in its scheduler's process.

    Args:
        client: never attaches; closed by `shutdown`.
        events: collects KV cache events, if vLLM publishes them.
        watch: receives the daemon's reports for the events; closed by `shutdown`. None: it sends none.
        wake: makes an idle engine step, for the daemon's reports and for blocks that wait to be stored; called in any
            thread.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        options: ConnectorOptions,
        engine: EngineFacts,
        client: Client,
        *,
        events: Events | None = None,
        watch: Client | None = None,
        wake: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        states = [group.index for group in engine.groups if group.kind is GroupKind.STATE]
        written = WrittenBlocks(engine.block_ids, states)
        shared = SchedulerState(options, engine, events, clock, written=written)
        self.counters, self._stored_filter, self._events = shared.counters, shared.stored_filter, events
        self._options, self._world_size, self._clock = options, engine.world_size, clock
        self._written, self._plans = written, itertools.count(1)
        # A file from before the start names older weights.
        used = read_name(options.weights_version_file)
        self._weights_version = WeightsVersion(engine.hash_bytes, options.weights_version, used=[used] if used else [])
        self._client = SchedulerClient(client, self._weights_version, options)
        self._groups, self._alignment = engine.groups, engine.groups[0].alignment
        self._watch, self._wake, self._alarm = watch, wake, Alarm(wake)
        if watch is not None and events is not None:
            events.keys = self._weights_version.keys
        self._lookups = Lookups(shared, self._client)
        self._touches = Touches(shared, self._client)
        self._tool_tokens = frozenset(options.tool_tokens)
        self._loads = Loads(shared, self._lookups)
        self._stores = Stores(shared)
        self._counts = True
        """Whether counters or gauges may have changed since `take_counts`."""
        self._reported: dict[str, int] = {}
        """The gauges, as last reported."""
        self._nodes: dict[int, str] = {}
        """The node of each rank."""
        self._woken: dict[int, bool] = {}
        """The ranks that have woken since the last reset, and whether the weights of each are those of the start."""
        self._different_kv = False
        self._adapters = engine.adapters
        self._reset_refused = False
        """Whether vLLM has refused the last reset, so that the GPU may hold KV of older weights."""
        self._recompute = engine.recompute
        self._block_bytes = sum(group.page_bytes * len(group.layer_names) for group in engine.groups)
        self._gains = shared.gains
        self._begun: tuple[str, int] = "", 0
        """The request about which vLLM asked last, and its tokens in the GPU's prefix cache."""
        self._in_step = ""
        """The request that was offered a load within its step."""
        self._arrived: set[str] = set()
        """Requests for which vLLM has allocated no blocks yet, if steps may load."""
        self._null_block = 0
        self._ranks: dict[int, int] = {}
        self._epoch = 0
        """The daemon run to which every rank is attached; 0 if there is none."""
        self._last_epoch = 0
        self._requests: dict[str, RequestProgress] = {}
        self._failed: set[str] = set()
        """Requests whose load has failed, until they are computed: another load might fail again and again."""

    @property
    def attached(self) -> bool:
        """Whether every rank is attached to the same run of the daemon."""
        return self._epoch != 0

    @property
    def _enabled(self) -> bool:
        return self._epoch != 0 and not self._reset_refused

    @property
    def why_not(self) -> WhyNot | None:
        """Why nothing is offloaded; None if it is."""
        if len(set(self._nodes.values())) > 1:
            return WhyNot.SEVERAL_NODES
        if self._different_kv:
            return WhyNot.DIFFERENT_KV
        if not self.attached:
            all_attached = len(self._ranks) == self._world_size and all(self._ranks.values())
            return WhyNot.SEVERAL_DAEMONS if all_attached else WhyNot.NOT_ATTACHED
        return WhyNot.RESET_REFUSED if self._reset_refused else None

    # -- hits ------------------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens after ``num_computed_tokens`` that can be loaded, and whether the load is asynchronous.

        None: not known yet; vLLM calls again in the next step. The only side effects are a cache entry and a lease,
        and other hashes of a request whose adapter has become known.
        """
        if self._loads.in_step:
            return None, False  # it might hit blocks of the GPU that are not loaded yet
        if request.lora_request is not None and self._waits_for_adapter(request):
            return None, False
        if (
            not self._enabled
            or not self._may_share(request)
            or request.skip_reading_prefix_cache
            or num_computed_tokens % self._alignment
            or request.request_id in self._failed
        ):
            return 0, False
        self._begun = request.request_id, num_computed_tokens
        self._counts = True
        tokens = self._lookups.hit(request, num_computed_tokens, self._epoch)
        in_step = tokens is not None and tokens > 0 and self._recompute is not None and self._is_alone(request, tokens)
        self._in_step = request.request_id if in_step else ""
        return tokens, bool(tokens) and not in_step

    def _is_alone(self, request: Any, tokens: int) -> bool:
        """Whether the engine has nothing else to compute or to load, so that a step may wait for this hit."""
        others = (self._requests.keys() | self._arrived) - {request.request_id}
        nbytes = tokens // self._alignment * self._block_bytes
        return not others and not self._loads.outstanding and nbytes <= STEP_BYTES

    def _may_share(self, request: Any) -> bool:
        return request.lora_request is None or (self._adapters is not None and self._adapters.may_share(request))

    def _waits_for_adapter(self, request: Any) -> bool:
        """Whether vLLM should ask again, because the content of a request's adapter may be known then, or has just
        changed the request's hashes."""
        if self._adapters is None or request.num_computed_tokens:
            return False
        if self._adapters.settle(request):
            self._lookups.forget(request.request_id)
            return True
        # Without a namespace, no rank reports anything.
        return self._client.namespace is not None and self._adapters.waits(request)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan the load of ``num_external_tokens`` tokens of a request, for which vLLM has allocated ``blocks``."""
        request_id = request.request_id
        self._arrived.discard(request_id)
        progress = self._requests.get(request_id)
        if progress is None:
            progress = RequestProgress(request)
            if self._may_share(request):
                self._requests[request_id] = progress
            else:
                self.counters.unknown_adapters += 1
                self._counts = True
        progress.tables = getattr(blocks, "blocks", ())
        if self._begun[0] == request_id:
            progress.began = self._begun[1] + num_external_tokens
        elif request_id in self._failed:
            progress.began = 0
        needed = self._needed(request)
        if num_external_tokens <= 0:
            self._gains.count(needed)
            self._lookups.forget(request_id)
            self._failed.discard(request_id)  # it is computed now, and may load again after a preemption
            return
        offer = self._lookups.take(request_id)
        if offer is None:
            raise RuntimeError(f"vLLM loads {num_external_tokens} tokens of {request_id}, which were not offered")
        self._counts = True
        block_ids = blocks.get_block_ids()
        in_step, self._in_step = request_id == self._in_step, ""
        tables = progress.tables if in_step else None
        loaded = self._loads.plan(
            request, block_ids, offer, num_external_tokens, self._null_block, needed=needed, tables=tables
        )
        self._stores.allocated(loaded)

    def _needed(self, request: Any) -> int:
        """Tokens of a request that the GPU's prefix cache lacks when it begins; 0 for one that continues, as after its
        load."""
        (request_id, local), self._begun = self._begun, ("", 0)
        return hits.limit(self._groups, request.num_tokens, local) if request_id == request.request_id else 0

    # -- steps -----------------------------------------------------------------------------------------------------

    def build_plan(self, scheduler_output: Any) -> StepPlan:
        """The ranks' work in this step; mostly `NOTHING`, without a look at any request."""
        self._written.schedule(scheduler_output)
        if self._lookups.used:
            self._lookups.new_step()
        self._counts |= self._touches.step()
        self._gains.tell(self._client.report_prompts_nowait)
        if self._adapters is not None:
            self._adapters.new_step()
        due = self._stores.new_step(self._clock()) or scheduler_output.preempted_req_ids
        if due and self._enabled:
            self._counts = True
            self._stores.step(self._requests, scheduler_output)
        idle = not scheduler_output.total_num_scheduled_tokens
        give_up = self._stores.gives_up()
        stores, loads = self._stores.take_jobs(), self._loads.planned and self._loads.take_jobs()
        repeat, lost = self._written.take_lost_plans()
        if not (stores or loads or give_up or repeat):
            return IDLE if idle else NOTHING
        self._counts = True
        changes = self._adapters.changes if self._adapters is not None else 0
        stores, loads = self._with_keys(stores), self._with_keys(loads)
        plan = StepPlan(stores, loads, idle, give_up, next(self._plans), tuple(map(_again, lost)), repeat, changes)
        self._written.send(plan)
        return plan

    def begin_output(self, scheduler_output: Any, invalid_block_ids: Collection[int]) -> None:
        """Note that vLLM begins to process the output of a step.

        Args:
            invalid_block_ids: ids of blocks that some connector has not loaded, although the step has computed on them.
        """
        self._written.begin_output(scheduler_output, invalid_block_ids)

    def abort_all(self) -> None:
        """Note that vLLM is about to abort all requests."""
        self._written.abort_all()

    def end_output(self) -> None:
        """Note that vLLM has processed the output of a step."""
        self._written.end_output()

    def _with_keys(self, jobs: Sequence[AnyJob]) -> tuple[AnyJob, ...]:
        """The jobs with the keys of the current version of the weights instead of hashes."""
        if self._weights_version.unmasked or not jobs:
            return tuple(jobs)
        keys = self._weights_version.keys
        return tuple(
            replace(job, blocks=tuple(replace(each, hashes=keys(each.hashes)) for each in job.blocks)) for job in jobs
        )

    def take_namespace(self, namespace: Namespace) -> bool:
        """Make lookups in this namespace, which a rank has reported. False: another rank reported a different one."""
        if self._client.namespace is None:
            self._client.namespace = namespace
            _log.info("kvsidecar: namespace %s", namespace)
            if self._watch is not None:
                self._watch.watch(namespace, self._wake)
        elif namespace != self._client.namespace:
            self._different_kv = True
            _log.error("kvsidecar: no offload: ranks hold KV of %s and of %s", self._client.namespace, namespace)
            return False
        return True

    def connect(self, timeout: float) -> None:
        """Connect for the first lookup, if a rank has reported its namespace. Waits at most ``timeout`` seconds."""
        if self._client.namespace is not None:
            self._client.connect(timeout)

    def loads_unheard(self, heard: Collection[str]) -> dict[str, bool]:
        """See `Loads.take_unheard`. To be called after each report."""
        return self._loads.take_unheard(heard)

    def take_report(self, report: RankReport) -> None:
        """Handle the ranks' reports since the last call."""
        self._counts = True
        self.counters.refused_jobs += report.refused
        if report.nodes:
            self._take_nodes(report)
        if report.attached:
            self._take_attached(report)
        if report.adapters and self._adapters is not None:
            self._take_adapters(report, self._adapters)
        if report.woken:
            self._take_woken(report)
        if report.stored:
            for request_id in self._stores.take_report(report):
                if (progress := self._requests.get(request_id)) is not None:
                    progress.declined = True
        if report.loaded:
            failed, wrong = self._loads.take_report(report)
            self._failed.update(each for each in failed if each in self._requests)
            if wrong and self._recompute is not None:
                self._recompute(wrong)

    def _take_nodes(self, report: RankReport) -> None:
        self._nodes.update(report.nodes)
        if (count := len(set(self._nodes.values()))) > 1:
            _log.error(
                "kvsidecar: no offload: this engine's %d ranks run on %d nodes, each with a daemon of its own, but all "
                "parts of a block must be in one: use as many tensor- and pipeline-parallel ranks as a node has GPUs, "
                "and data parallelism between nodes",
                len(self._nodes),
                count,
            )

    def _take_adapters(self, report: RankReport, adapters: Adapters) -> None:
        def used(identity: str) -> bool:
            return any(getattr(each.request, ATTRIBUTE, None) == identity for each in self._requests.values())

        if adapters.take_report(report.adapters, used):
            self.counters.changed_adapters += 1
            _log.warning(
                "kvsidecar: an adapter was replaced while requests used it: nothing of its old content is offloaded "
                "from now on, until the prefix cache is reset with reset_connector"
            )
            # Blocks of the last steps may be of the new content. Only hashes tell which requests the others in the
            # prefix cache are from.
            self._stores.reset()
            self._stores.walks = False
        for request_id in [name for name, each in self._requests.items() if not self._may_share(each.request)]:
            del self._requests[request_id]

    def _take_attached(self, report: RankReport) -> None:
        self._ranks.update(report.attached)
        self._stored_filter.fit(report.pool_blocks)
        epochs = set(self._ranks.values())
        self._epoch = epochs.pop() if len(self._ranks) == self._world_size and len(epochs) == 1 else 0
        if not self._epoch or self._epoch == self._last_epoch:
            return
        # Another daemon run has none of the stored blocks: store all of them again.
        self._last_epoch = self._epoch
        self._stored_filter.clear()
        self._lookups.forget_all()
        self._stores.new_run()
        if self._events is not None:
            self._events.all_removed()
            self._loads.forget_events()
        for progress in self._requests.values():
            progress.done, progress.declined, progress.inside_done = 0, False, False
        self._lookups.connect()

    def _take_woken(self, report: RankReport) -> None:
        """Note ranks that have woken from sleep. vLLM resets the cache when it falls asleep, and weights that are kept
        return unchanged: earlier blocks are then hit again."""
        self._woken.update(report.woken)
        if not all(report.woken.values()):
            if self._weights_version.is_first:  # vLLM before 0.33 does not tell of the reset
                self._begin_reset()
                self._new_weights()
        elif len(self._woken) == self._world_size and all(self._woken.values()):
            self._woken.clear()
            if not self._weights_version.is_first:
                self._weights_version.return_to_first()
                self._other_keys()
                _log.info("kvsidecar: awake with the weights that it started with: earlier blocks are hit again")

    def _other_keys(self) -> None:
        """Forget earlier stores and lookups, which used other keys."""
        self._stored_filter.clear()
        self._lookups.forget_all()
        self._touches.forget_all()
        for progress in self._requests.values():
            progress.done, progress.inside_done = 0, False

    def _new_weights(self) -> None:
        """Begin a version of the weights."""
        name = read_name(self._options.weights_version_file)
        if self._weights_version.advance(name):
            _log.info("kvsidecar: blocks are shared with engines whose weights are named %r", name)
        else:
            self.counters.unnamed_resets += 1
            _log.warning(
                "kvsidecar: reset without a new name for the weights: this engine shares its blocks with no other "
                "until it gets a name (weights_version_file), is restarted, or wakes from sleep with the weights that "
                "it had at its start"
            )
        self._other_keys()

    @property
    def _jobs_outstanding(self) -> bool:
        return self._stores.outstanding or self._loads.outstanding

    def has_pending_push_work(self) -> bool:
        """Whether jobs wait to be sent or reported, so that an idle engine must continue to step.

        vLLM does not ask again while it is idle: it is woken when the backlog may be tried again.
        """
        if self._jobs_outstanding or (self._events is not None and self._events.pending):
            return True
        if not self._enabled:
            return False
        seconds = self._stores.backlog_waits(self._clock())
        if seconds:
            self._alarm.set(seconds)
        return seconds == 0

    def has_pending_block_frees(self) -> bool:
        """Whether GPU blocks that only stores hold become free soon.

        vLLM then waits for them instead of preempting a request. It never waits for a daemon that does not answer.
        """
        return not self._client.hangs and self._stores.frees_soon(self._clock())

    # -- requests --------------------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Read a new request's retention, and send its lookup before its step."""
        if self._recompute is not None:
            self._arrived.add(request.request_id)
        retention = retention_of(request, self.counters, self._options)
        if retention != DEFAULT_RETENTION:
            self._stores.retention[request.request_id] = retention
        if request.lora_request is not None and self._adapters is not None:
            self._adapters.settle(request)
        if self._enabled and not request.skip_reading_prefix_cache and self._may_share(request):
            self._lookups.begin_early(request)

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """Note the end of a request. Its blocks may be freed at once: stores hold their own references."""
        request_id = request.request_id
        self._arrived.discard(request_id)
        self._lookups.forget(request_id)
        self._failed.discard(request_id)
        if self._adapters is not None:
            self._adapters.ended(request)
        self._written.end_request(request_id)
        progress = self._requests.pop(request_id, None)
        if progress is not None:
            self._counts = True
            self._stores.store_remaining(progress, self._enabled)
            said = next_use.said_in(getattr(request, "kv_transfer_params", None))
            pause = next_use.pause_after(said, request.output_token_ids, self.counters, self._tool_tokens)
            self._touches.ended(request, pause)
        self._stores.retention.pop(request_id, None)
        return False, None

    # -- the engine ------------------------------------------------------------------------------------------------

    def bind_block_pool(self, pool: GpuBlockPool) -> None:
        """Set vLLM's pool of GPU blocks. Without it nothing is stored."""
        self._null_block = pool.null_block.block_id
        self._stored_filter.fit(pool.num_gpu_blocks)
        self._written.bind(pool)
        self._stores.bind(pool)

    def begin_reset(self) -> None:
        """Prepare for vLLM emptying its prefix cache, which succeeds only if nothing holds a block."""
        self._stores.let_go()

    def end_reset(self, *, all_preempted: bool = False) -> None:
        """Note that vLLM has emptied its prefix cache, or failed to.

        Args:
            all_preempted: whether it has preempted all requests before.
        """
        self._stores.hold_again()
        if all_preempted:
            self._written.preempt_all()

    def reset_failed(self) -> None:
        """Note that vLLM has raised an error instead of a reset that includes the connector."""
        self._begin_reset()
        self._refuse_reset()

    def reset_cache(self) -> bool:
        """Make earlier blocks miss, because the weights may have changed. Other engines, which may still have the old
        weights, continue to share them. Makes no calls. Running stores continue, under the keys with which they began.

        False: vLLM could not empty the GPU's own cache because requests use blocks. Nothing is hit or stored until a
        reset succeeds, because it is unknown which weights the blocks belong to.
        """
        self._begin_reset()
        if not self._stores.gpu_is_empty():
            self._refuse_reset()
            return False
        self._reset_refused = False
        if self._adapters is not None:
            self._adapters.reset()
            self._stores.walks = self._adapters.in_hashes
        self._new_weights()
        return True

    def _begin_reset(self) -> None:
        self._counts = True
        self.counters.resets += 1
        self._woken.clear()
        self._other_keys()
        # Running requests continue with KV from before the reset, which is not stored. Preempted requests are added
        # again when they get blocks.
        self._requests.clear()
        self._stores.reset()
        if self._events is not None:
            self._events.reset()
            self._loads.forget_events()

    def _refuse_reset(self) -> None:
        self.counters.refused_resets += 1
        if not self._reset_refused:
            _log.warning(
                "kvsidecar: vLLM refused to reset its prefix cache because blocks are in use: nothing is offloaded "
                "until a reset with reset_connector succeeds"
            )
        self._reset_refused = True

    def take_counts(self) -> dict[str, int]:
        """The result of `Counters.take`, and the gauges that have changed. Skipped after steps in which nothing was
        done: reading the counters takes longer than all else in such a step."""
        if not self._counts:
            return {}
        self._counts = False
        now = {
            ATTACHED: int(self.attached),
            BREAKER_OPEN: int(self._client.hangs),
            PENDING_JOBS: len(self._stores.running) + len(self._loads.running),
            **reason_gauges(self.why_not),
        }
        changed = {name: value for name, value in now.items() if self._reported.get(name) != value}
        self._reported = now
        return {**self.counters.take(), **changed}

    def take_events(self) -> Sequence[Any]:
        """vLLM's KV cache events since the last call."""
        return self._events.take() if self._events is not None else ()

    def shutdown(self) -> None:
        """Close the client, whose leases end with its connection."""
        self._written.close()
        self._client.close()
        if self._watch is not None:
            self._watch.close()


def _again(plan: StepPlan) -> StepPlan:
    """A plan to repeat, which some rank did not get. Its requests have ended, and so have loads within its step: their
    blocks belong to others now."""
    return replace(plan, loads=tuple(replace(each, blocks=()) if each.in_step else each for each in plan.loads))
