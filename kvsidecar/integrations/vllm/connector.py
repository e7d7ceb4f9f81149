"""The class that vLLM loads in the scheduler and in the workers. It forwards to `SchedulerSide` or `WorkerSide`.

Supports vLLM 0.26 and later: it tests for features, never for version numbers.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.envs import environment_variables
from vllm.platforms import current_platform
from vllm.v1.core import kv_cache_utils
from vllm.v1.outputs import KVConnectorOutput

from kvsidecar.client import Client, Namespace
from kvsidecar.errors import KVSidecarError, NotExportable
from kvsidecar.integrations.engine_log import log_through
from kvsidecar.integrations.offload_condition import ATTACHED, WhyNot, reason_gauges
from kvsidecar.integrations.rank_memory import RankMemory
from kvsidecar.integrations.vllm import adapter_hooks, media, memory, ranks, recomputing, register, scheduler_hooks
from kvsidecar.integrations.vllm.adapters import AdapterLoads, Adapters
from kvsidecar.integrations.vllm.counters import OWN_HASHES
from kvsidecar.integrations.vllm.events import Events
from kvsidecar.integrations.vllm.groups import blocks_of_longest, groups_of
from kvsidecar.integrations.vllm.metadata import NOTHING, RankReport, StepPlan
from kvsidecar.integrations.vllm.namespace import hash_bytes_of, identity_of
from kvsidecar.integrations.vllm.options import ConnectorOptions
from kvsidecar.integrations.vllm.scheduler import SchedulerSide
from kvsidecar.integrations.vllm.shared import EngineFacts
from kvsidecar.integrations.vllm.sleeping import StartWeights, watch
from kvsidecar.integrations.vllm.stats import LOOKUP_DEFERRED, LOOKUP_DELAY, SidecarPromMetrics, SidecarStats
from kvsidecar.integrations.vllm.step_loads import STEP_SECONDS, StepLoads
from kvsidecar.integrations.vllm.waking import waker
from kvsidecar.integrations.vllm.worker import WorkerSide

try:
    from vllm.v1.metrics import cache_hit_source
except ImportError:  # vLLM 0.26 does not distinguish the sources of hits
    cache_hit_source = None

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("kvsidecar.vllm")

UUID_END = re.compile("(?<=[0-9a-f]{8})-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
ATTACH_SECONDS = 0.5
"""How long the engine's start waits for a registration that is under way, so that the first request can hit."""


@dataclass(frozen=True)
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """vLLM's class around a `StepPlan`; it is pickled for each worker process."""

    plan: StepPlan | None
    """None: `metadata.NOTHING`."""


NO_PLAN = StepMetadata(None)


@dataclass(frozen=True)
class WorkerReport(KVConnectorWorkerMetadata, KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """vLLM's class around a `RankReport`, in a step and once at the start."""

    report: RankReport
    namespaces: frozenset[Namespace]
    """Namespaces in which ranks store; set at the start and when a rank attaches."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        assert isinstance(other, WorkerReport)
        return WorkerReport(self.report.merged(other.report), self.namespaces | other.namespaces)


class KVSidecarConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Offloads the KV cache to the daemon of this node."""

    if cache_hit_source is not None:
        _cache_hit_source = cache_hit_source.CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        log_through("vllm")
        self._options = ConnectorOptions.parse(self._kv_transfer_config.kv_connector_extra_config or {})
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._unhook = contextlib.ExitStack()
        self._vllm_requests: Callable[[], Mapping[str, Any]] = dict
        """The requests that vLLM's scheduler has, by id."""
        self._export: Callable[[], RankMemory] | None = None
        self._weights: StartWeights | None = None
        """The weights of an engine that may sleep."""
        self._adapter_loads: AdapterLoads | None = None
        self._media: media.Media | None = None
        self._failed_block_ids: set[int] = set()
        self._gauges: dict[str, int] = {}
        """Gauges that were not reported to vLLM yet."""
        self._observed: dict[str, list[float]] = {}
        """Observations that were not reported to vLLM yet, by histogram."""
        self._deferred: dict[str, float] = {}
        """Monotonic seconds at which the lookup of each request was first deferred."""
        try:
            self._groups = groups_of(kv_cache_config, vllm_config)
            _check_failed_loads(kv_cache_config)
            scheduler = scheduler_hooks.of_caller() if role is KVConnectorRole.SCHEDULER else None
            if role is KVConnectorRole.SCHEDULER:
                self._media = media.named_by_content(vllm_config)
        except ValueError as error:
            self._groups = ()
            _log.error("kvsidecar: no offload: %s", error)
            if role is KVConnectorRole.SCHEDULER:
                self._gauges = {ATTACHED: 0, **reason_gauges(WhyNot.UNSUPPORTED)}
            return
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = self._scheduler_side(scheduler)
        elif (lora_config := getattr(vllm_config, "lora_config", None)) is not None:
            self._adapter_loads = adapter_hooks.record_loads(lora_config)
        atexit.register(self.shutdown)

    def _scheduler_side(self, scheduler: Any) -> SchedulerSide:
        policy = self._kv_transfer_config.kv_load_failure_policy
        if policy != "recompute":
            _log.warning(
                'kvsidecar: kv_load_failure_policy is "%s": a load that fails ends its request with an error; set '
                '"kv_load_failure_policy": "recompute" in --kv-transfer-config',
                policy,
            )
        own_hashes = self._fixed_seed is None and "PYTHONHASHSEED" not in os.environ
        self._gauges = {OWN_HASHES: int(own_hashes)}
        if own_hashes:
            _log.warning(
                "kvsidecar: this engine's block hashes use a random seed: neither other engines nor this one after a "
                "restart can hit its blocks; set PYTHONHASHSEED to the same number for all engines"
            )
        config, hash_bytes = self._vllm_config.kv_events_config, hash_bytes_of(self._vllm_config)
        announces = config is not None and config.enable_kv_cache_events and not self._options.publisher
        # A client of its own: nothing that the watch waits for delays a lookup.
        watch = self._client(f"{self._instance} events") if announces and self._options.residency else None
        events = None
        if announces or self._options.publisher:
            events = Events(self._groups, hash_bytes, watch, announces=announces)
        wanted = self._options.load_chunks > 0
        engine = EngineFacts(
            hash_bytes,
            self._groups,
            self._vllm_config.parallel_config.world_size,
            step_tokens=self._vllm_config.scheduler_config.max_num_batched_tokens,
            longest_blocks=blocks_of_longest(self._kv_cache_config, self._vllm_config),
            waits=hasattr(KVConnectorBase_V1, "has_pending_block_frees"),
            recompute=recomputing.of_caller(self._vllm_config, self._kv_cache_config, self._groups) if wanted else None,
            adapters=self._adapters(),
            block_ids=lambda request_id: scheduler.kv_cache_manager.get_block_ids(request_id),
        )
        client = self._client(f"{self._instance} scheduler")
        side = SchedulerSide(self._options, engine, client, events=events, watch=watch, wake=waker())
        self._unhook.callback(scheduler_hooks.tell(scheduler, side))
        if (engine_core := scheduler_hooks.engine_core_of_caller()) is not None:
            self._unhook.callback(scheduler_hooks.tell_of_sleep(engine_core, side))
        self._vllm_requests = lambda: scheduler.requests
        return side

    def _adapters(self) -> Adapters | None:
        if getattr(self._vllm_config, "lora_config", None) is None:
            return None
        adapters = Adapters(self._vllm_config.parallel_config.world_size)
        adapters.in_hashes = adapter_hooks.hash_by_content(adapters)
        if not adapters.in_hashes:
            _log.error(
                "kvsidecar: requests with an adapter are not offloaded: this vLLM computes block hashes in an "
                "unknown way, so they cannot contain the adapter's content"
            )
        return adapters

    @property
    def _fixed_seed(self) -> str | None:
        """The seed of block hashes without PYTHONHASHSEED; None: random for each process."""
        # vLLM 0.26 has none. Later versions use a random seed for hashes that are not collision-resistant.
        fixed: str | None = getattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED", None)
        return fixed if self._vllm_config.cache_config.prefix_caching_hash_algo.startswith("sha256") else None

    def _client(self, name: str, *, quiet: bool = True) -> Client:
        """Make a client. The one that is not quiet, the first rank's, logs the state of the connection for the whole
        engine."""
        return Client(
            self._options.socket,
            name=name,
            quiet=quiet,
            step_budget=self._options.lookup_budget,
            job_timeout=self._options.load_timeout,
            local_protocol=self._options.local_protocol,
        )

    @property
    def _instance(self) -> str:
        # Each data-parallel replica is an instance, with its own ranks and engine_id. Of a UUID, which vLLM makes where
        # the user gives no id, a person needs the beginning.
        return f"{self._options.instance} {UUID_END.sub('', self._kv_transfer_config.engine_id)}"

    # -- workers -----------------------------------------------------------------------------------------------------

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        return memory.SharedKVMemory() if current_platform.is_cpu() else None

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """For vLLM 0.26: one storage for all layers, so that a block is one copy instead of one per layer. Later
        versions always have one storage, and choose its layout."""
        return True

    def register_cross_layers_kv_cache(self, kv_cache: torch.Tensor, attn_backend: Any) -> None:
        self.register_kv_caches(memory.layers_of_cross_layer(kv_cache, attn_backend, self._kv_cache_config))

    def register_kv_caches(self, kv_caches: memory.KVCaches) -> None:
        if not self._groups:
            return
        began = time.monotonic()
        try:
            self._share(kv_caches)
        except (KVSidecarError, ValueError) as error:
            _log.error("kvsidecar: no offload on this rank, and therefore on none: %s", error)
        else:
            _log.info("kvsidecar: the KV cache was registered in %.1f ms", (time.monotonic() - began) * 1e3)

    def _share(self, kv_caches: memory.KVCaches) -> None:
        """Share the KV cache with the daemon. Raises KVSidecarError, ValueError."""
        if current_platform.is_cpu() and not hasattr(KVConnectorBase_V1, "get_mem_pool_context"):
            raise NotExportable(
                "this vLLM does not let a connector allocate the KV cache, and its own CPU memory cannot be shared: "
                "use a later version"
            )
        try:
            found = memory.views_of(kv_caches, self._kv_cache_config, self._groups)
        except NotExportable:
            with contextlib.suppress(ValueError):
                ranks.place_of(self._vllm_config, self._groups, None)  # the other stages wait for this call
            raise
        facts = memory.facts_of(found, self._backends())
        place, all_facts = ranks.place_of(self._vllm_config, self._groups, facts)
        identity = identity_of(
            self._vllm_config,
            self._groups,
            layout=getattr(self._kv_cache_config, "kv_cache_layout", None) or "by strides",
            facts={"vLLM": vllm.__version__, "device": current_platform.get_device_name(), "layers": all_facts},
            fixed_seed=self._fixed_seed,
            private=f"{self._options.instance} {self._kv_transfer_config.engine_id} "
            f"{getattr(self._vllm_config, 'instance_id', '')}",
            name=self._options.model_name,
            variables=environment_variables,
        )
        name = f"{self._instance} rank {place.rank}"
        chunks, step_loads = self._options.load_chunks if len(found) == 1 else 0, None
        if chunks:
            (views,) = found.values()
            step_loads = StepLoads(views.layer_chunks(chunks), min(self._options.load_timeout, STEP_SECONDS))
        self._export = lambda: memory.export(found, self._kv_cache_config.num_blocks, place, max(1, chunks))
        worker = WorkerSide(
            identity,
            self._instance,
            place,
            lambda: self._client(name, quiet=place.rank != 0),
            adapters=self._adapter_loads,
            step_loads=step_loads,
        )
        worker.register(self._export(), memory.device_order_of(found))
        self._worker = worker
        if getattr(self._vllm_config.model_config, "enable_sleep_mode", False):
            self._prepare_for_sleep()

    def _prepare_for_sleep(self) -> None:
        self._weights = StartWeights.of_caller()
        if not hasattr(KVConnectorBase_V1, "unregister_kv_caches"):
            from vllm.device_allocator.cumem import CuMemAllocator

            watch(CuMemAllocator.get_instance(), self.unregister_kv_caches, self.restore_kv_caches)

    def _backends(self) -> dict[int, set[str]]:
        """The names of the attention backends of each group's layers, which lay out K and V differently."""
        layers = self._vllm_config.compilation_config.static_forward_context
        return {
            group.index: {
                layers[name].get_attn_backend().get_name()
                for name in group.layer_names
                if hasattr(layers.get(name), "get_attn_backend")
            }
            for group in self._groups
        }

    def unregister_kv_caches(self) -> None:
        if self._worker is not None:
            self._worker.unregister()

    def restore_kv_caches(self) -> None:
        if self._worker is None or self._export is None or self._worker.registered:
            return
        try:
            # The same addresses are backed by other memory now, with new handles.
            self._worker.register(self._export())
        except KVSidecarError as error:
            _log.error("kvsidecar: no offload on this rank, and therefore on none: %s", error)
        self._worker.woke(same_weights=self._weights is not None and self._weights.unchanged())

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.bind(connector_metadata.plan or NOTHING)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None and self._worker.new_loads:
            self._worker.submit_loads()
            if (loads := self._worker.step_loads) is not None and loads.running:
                # A graph of all layers calls no hook, and is captured without metadata of its attention.
                graph = getattr(forward_context, "cudagraph_runtime_mode", None)
                by_layer = forward_context.attn_metadata is not None and getattr(graph, "name", "") != "FULL"
                loads.forward_begins(layers_wait=by_layer)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for loads within this step. Other loads have ended before vLLM schedules their requests."""
        if self._worker is not None and (loads := self._worker.step_loads) is not None and loads.running:
            loads.wait_for_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to do: stores cover tokens of earlier steps."""

    def wait_for_save(self) -> None:
        if self._worker is not None and self._worker.new_stores:
            self._worker.submit_stores()

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        if self._worker is not None and (self._worker.new_loads or self._worker.new_stores):
            self._worker.submit_rest()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._worker is None:
            return None, None
        self._worker.poll()
        results = self._worker.take_loads()
        self._failed_block_ids |= results.failed_block_ids
        return None, results.finished or None

    if hasattr(base, "KVConnectorTransferResults"):

        def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
            if self._worker is None:
                return base.KVConnectorTransferResults()
            self._worker.end_step_loads()
            self._worker.poll()
            results = self._worker.take_loads()
            self._failed_block_ids |= results.failed_in_step
            return base.KVConnectorTransferResults(finished_recving=results.finished, failed_recving=results.failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_block_ids = self._failed_block_ids, set()
        return failed

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        if self._worker is None or (report := self._worker.take_report()) is None:
            return None
        return WorkerReport(report, frozenset([self._worker.identity.namespace] if report.attached else []))

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        # A MultiConnector passes its first connector's metadata to all: it must remain that connector's own.
        if self._worker is None or not has_kv_transfer_group() or get_kv_transfer_group() is not self:
            return None
        self._worker.wait_attached(ATTACH_SECONDS)
        return WorkerReport(self._worker.take_first_report(), frozenset([self._worker.identity.namespace]))

    def shutdown(self) -> None:
        atexit.unregister(self.shutdown)
        self._export = self._weights = None  # they hold tensors of the engine
        if self._worker is not None:
            self._worker.unregister()
        if self._scheduler is not None:
            self._unhook.close()
            self._scheduler.shutdown()

    # -- metrics, on both sides and in the process that serves them ----------------------------------------------

    def get_kv_connector_stats(self) -> SidecarStats | None:
        if self._worker is not None and (transfers := self._worker.take_transfers()) is not None:
            return SidecarStats.of_transfers(*transfers)
        counted = self._scheduler.take_counts() if self._scheduler is not None else {}
        if not (self._observed or counted or self._gauges):
            return None
        observed, self._observed = self._observed, {}
        gauges, self._gauges = self._gauges, {}
        return SidecarStats.of_scheduler(observed, {**counted, **gauges})

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any] | None) -> bool:
        """False. An engine with CUDA graphs asks while it reads its settings, and a wrong option of ours is refused
        then, in one traceback: before its processes start, load the model, and wrap the error in two others."""
        ConnectorOptions.parse(extra_config or {})
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> SidecarStats:
        return SidecarStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> SidecarPromMetrics:
        return SidecarPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -- scheduler ---------------------------------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """False: blocks that are not stored are computed again."""
        return False

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[Any, Any]) -> None:
        self.set_xfer_handshake_metadata(metadata)

    def set_xfer_handshake_metadata(self, metadata: Mapping[Any, Any]) -> None:
        for reports in metadata.values():
            if isinstance(reports, WorkerReport):
                self._take(reports)
        if self._scheduler is not None:
            self._scheduler.connect(ATTACH_SECONDS)

    def update_connector_output(self, connector_output: Any) -> None:
        reports = connector_output.kv_connector_worker_meta
        # Mostly None; isinstance() of an abstract class takes microseconds.
        if reports is not None and isinstance(reports, WorkerReport):
            self._take(reports)
            if reports.report.loaded:
                self._tell_unheard_loads(connector_output)

    def _tell_unheard_loads(self, connector_output: Any) -> None:
        """Report to vLLM, with the output of this step, loads whose ends it has lost with an earlier one."""
        if self._scheduler is None:
            return
        heard, requests = connector_output.finished_recving or set(), self._vllm_requests()
        unheard = self._scheduler.loads_unheard(heard)
        # It is too late to report that a load has failed: only a request that runs no further may be reported.
        late = {
            name
            for name, failed in unheard.items()
            if (request := requests.get(name)) is not None and (request.is_finished() or not failed)
        }
        if late:
            connector_output.finished_recving = heard | late

    def _take(self, reports: WorkerReport) -> None:
        if self._scheduler is None:
            return
        report = reports.report
        for namespace in reports.namespaces:
            if not self._scheduler.take_namespace(namespace):
                # As if not attached: blocks of different layouts must not be loaded together.
                report = replace(report, attached=dict.fromkeys(report.attached, 0))
        self._scheduler.take_report(report)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.bind_block_pool(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        lookups = self._scheduler.counters.lookups
        began = time.monotonic()
        found = self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)
        if self._scheduler.counters.lookups != lookups:
            self._observed.setdefault(LOOKUP_DELAY, []).append(time.monotonic() - began)
        if found[0] is None:
            self._deferred.setdefault(request.request_id, began)
        elif self._deferred:
            self._resolved(request.request_id)
        return found

    def _resolved(self, request_id: str) -> None:
        """Observe the duration of a deferred lookup, which was answered or whose request has ended."""
        if (since := self._deferred.pop(request_id, None)) is not None:
            self._observed.setdefault(LOOKUP_DEFERRED, []).append(time.monotonic() - since)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        plan = NOTHING if self._scheduler is None else self._scheduler.build_plan(scheduler_output)
        return NO_PLAN if plan is NOTHING else StepMetadata(plan)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler is None:
            return False, None
        self._resolved(request.request_id)
        return self._scheduler.request_finished(request)

    request_finished_all_groups = request_finished

    def take_events(self) -> Iterable[Any]:
        return () if self._scheduler is None else self._scheduler.take_events()

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.has_pending_push_work()

    def has_pending_block_frees(self) -> bool:
        return self._scheduler is not None and self._scheduler.has_pending_block_frees()

    def reset_cache(self) -> bool | None:
        if self._media is not None:
            self._media.reset()
        return None if self._scheduler is None else self._scheduler.reset_cache()


def _check_failed_loads(kv_cache_config: Any) -> None:
    """Raises ValueError if a failed load would end the engine."""
    groups = len(kv_cache_config.kv_cache_groups)
    # vLLM 0.26 takes the ids of blocks that were not loaded for ids of the only group.
    if groups > 1 and "failed_recving" not in KVConnectorOutput.__dataclass_fields__:
        raise ValueError(
            f"this vLLM supports failed loads only for models with one KV cache group, and this one has {groups}: "
            "use a later version, or --disable-hybrid-kv-cache-manager"
        )


# A MultiConnector finds the class of statistics by the connector's name, also in the process that serves metrics. The
# entry point does the same, but only if the package is installed.
register()
