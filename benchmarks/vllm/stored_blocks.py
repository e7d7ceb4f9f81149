"""Which blocks of a prompt the connectors of vLLM and of this project store: each runs in vLLM's own scheduler.

One prompt is computed in an engine that has nothing cached, and answered with one token. What a GPU would do is only
said to have been done. Import it after `benchmarks.vllm.h200.stand_in`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    init_none_hash,
    resolve_cache_hit_alignment_tokens,
    resolve_kv_cache_block_sizes,
    update_kv_cache_capacity,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata
from vllm.v1.simple_kv_offload.sizing import gpu_total_bytes

from benchmarks.vllm.h200 import BLOCKS
from kvsidecar.integrations.vllm.connector import KVSidecarConnector, WorkerReport
from kvsidecar.integrations.vllm.groups import Group
from kvsidecar.integrations.vllm.hits import limit, longest_hit, lookup_range, needed_blocks
from kvsidecar.integrations.vllm.metadata import RankReport
from tests.integrations.engine import EPOCH, NAMESPACE, TinyDaemon

MOST_STEPS = 1000
IDLE_STEPS = 5
"""After the request has ended: connectors store in them what is left."""
HOST_MEMORY = 1 << 44
"""Bytes: room for everything."""

OURS = KVTransferConfig(
    kv_connector="KVSidecarConnector",
    kv_connector_module_path="kvsidecar.integrations.vllm.connector",
    kv_role="kv_both",
    kv_load_failure_policy="recompute",
    kv_connector_extra_config={"store_interval": 1e-9},
)
SIMPLE = KVTransferConfig(
    kv_connector="SimpleCPUOffloadConnector",
    kv_role="kv_both",
    kv_connector_extra_config={"cpu_bytes_to_use": HOST_MEMORY, "num_cpu_blocks": BLOCKS},
)
OFFLOADING = KVTransferConfig(
    kv_connector="OffloadingConnector",
    kv_role="kv_both",
    kv_connector_extra_config={"cpu_bytes_to_use": HOST_MEMORY},
)


class Engine:
    """vLLM's scheduler with one of the connectors, and workers that say at once that everything is done.

    Args:
        ended: what the workers report to the connector, given the connector's orders for the step.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any, ended: Callable[[Any], Any]) -> None:
        # What follows is as in `EngineCore._initialize_kv_caches`.
        planned = generate_scheduler_kv_cache_config([kv_cache_config])
        vllm_config.cache_config.num_gpu_blocks = planned.num_blocks
        update_kv_cache_capacity(vllm_config, planned)
        block_tokens, hash_tokens = resolve_kv_cache_block_sizes(planned, vllm_config)
        planned.hash_block_size = hash_tokens
        planned.cache_hit_alignment_tokens = resolve_cache_hit_alignment_tokens(
            planned, vllm_config, block_tokens, hash_tokens
        )
        hash_function = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(hash_tokens, hash_function)
        self._scheduler = Scheduler(
            vllm_config=vllm_config,
            kv_cache_config=planned,
            structured_output_manager=mock.MagicMock(),
            block_size=block_tokens,
            hash_block_size=hash_tokens,
        )
        self._ended = ended
        self.connector: Any = self._scheduler.connector

    def compute(self, tokens: int) -> Request:
        """The request of one prompt of so many tokens, when all is over."""
        prompt = random.Random(1).choices(range(1000), k=tokens)
        request = Request("prompt", prompt, SamplingParams(max_tokens=1), None, block_hasher=self._hasher)
        self._scheduler.add_request(request)
        idle = 0
        for _ in range(MOST_STEPS):
            idle += request.is_finished()
            if idle > IDLE_STEPS:
                return request
            self._step(request)
        raise RuntimeError(f"the prompt was not computed in {MOST_STEPS} steps")

    def _step(self, request: Request) -> None:
        output = self._scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        answered = request.num_computed_tokens >= request.num_prompt_tokens
        report = self._ended(output.kv_connector_metadata)
        self._scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: at for at, name in enumerate(names)},
                sampled_token_ids=[[1] if answered else [] for _ in names],
                kv_connector_output=KVConnectorOutput(kv_connector_worker_meta=report),
            ),
        )

    def close(self) -> None:
        self._scheduler.shutdown()


@dataclass(frozen=True)
class Stored:
    """What this project's connector stores of the prompt."""

    blocks: dict[int, int]
    """By group: how many blocks."""
    hit: int
    """Tokens that a longer prompt which begins so hits."""
    loaded: dict[int, int]
    """By group: how many blocks that hit loads."""


def stored_by_us(vllm_config: Any, kv_cache_config: Any, tokens: int) -> Stored:
    found: dict[int, set[bytes]] = {}

    def ended(orders: Any) -> WorkerReport:
        stores = orders.plan.stores if orders is not None and orders.plan is not None else ()
        for job in stores:
            for each in job.blocks:
                found.setdefault(each.group, set()).update(each.split())
        every_rank = (1 << vllm_config.parallel_config.world_size) - 1
        return WorkerReport(RankReport(stored={job.number: every_rank for job in stores}), frozenset())

    with mock.patch.object(KVSidecarConnector, "_client", return_value=TinyDaemon()):
        engine = Engine(vllm_config, kv_cache_config, ended)
        ranks = range(vllm_config.parallel_config.world_size)
        attached = RankReport(attached=dict.fromkeys(ranks, EPOCH))
        engine.connector._take(WorkerReport(attached, frozenset([NAMESPACE])))
        groups: tuple[Group, ...] = engine.connector._groups
        request = engine.compute(tokens)
        engine.close()
    most = limit(groups, tokens + groups[0].alignment, 0)
    names = {each: each.hashes(request.block_hashes, 0, lookup_range(each, 0, most).stop) for each in groups}
    there = {each.index: [name in found.get(each.index, ()) for name in names[each]] for each in groups}
    hit = longest_hit(groups, there, 0, most)
    loaded = {each.index: len(needed_blocks(each, hit, 0)) for each in groups}
    return Stored({index: len(blocks) for index, blocks in found.items()}, hit, loaded)


def held_by_simple(vllm_config: Any, kv_cache_config: Any, tokens: int) -> int:
    """Bytes of host memory on all ranks that ``SimpleCPUOffloadConnector`` fills."""
    count = 0

    def ended(orders: Any) -> Any:
        nonlocal count
        if orders is None or orders.store_event < 0:
            return None
        count += len(orders.store_cpu_blocks)
        ranks = vllm_config.parallel_config.world_size
        return SimpleCPUOffloadWorkerMetadata(completed_store_events={orders.store_event: ranks})

    engine = Engine(vllm_config, kv_cache_config, ended)
    engine.compute(tokens)
    config = engine.connector.scheduler_manager.cpu_kv_cache_config
    engine.close()
    return count * (gpu_total_bytes(config) // config.num_blocks) * vllm_config.parallel_config.world_size


def held_by_offloading(vllm_config: Any, kv_cache_config: Any, tokens: int) -> int:
    """Bytes of host memory on all ranks that ``OffloadingConnector`` fills."""
    ranks, count = vllm_config.parallel_config.world_size, 0

    def ended(orders: Any) -> Any:
        nonlocal count
        if orders is None or not orders.store_jobs:
            return None
        count += sum(len(job.dst_spec.chunk_ids) for job in orders.store_jobs.values())
        return OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(orders.store_jobs, ranks))

    engine = Engine(vllm_config, kv_cache_config, ended)
    engine.compute(tokens)
    engine.close()
    spec: Any = OffloadingSpecFactory.create_spec(build_offloading_config(vllm_config, kv_cache_config))
    return count * int(spec.kv_bytes_per_chunk)
