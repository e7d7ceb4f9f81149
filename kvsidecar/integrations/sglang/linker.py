"""The linker: SGLang's hooks, and the parts of SGLang that they use.

SGLang makes one in the scheduler process of each rank, and calls it from the scheduler's thread alone. The linker hands
the rank's KV pools to the daemon, and from then on only names pages: no KV passes through this process.
"""

from __future__ import annotations

import atexit
import logging
import socket
import time
from contextlib import ExitStack
from typing import Any

import sglang
import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.disaggregation import kv_events
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_parallel, get_serving

from kvsidecar.client import Client
from kvsidecar.errors import KVSidecarError
from kvsidecar.integrations.kv_heads import kv_heads_of, ranks_per_head
from kvsidecar.integrations.offload_condition import ATTACHED, WhyNot, reason_gauges
from kvsidecar.integrations.sglang import adapters, endings, pools, ranks, sleeping
from kvsidecar.integrations.sglang.counters import RankCounters
from kvsidecar.integrations.sglang.events import MIN_PAGE_TOKENS, PageEvents
from kvsidecar.integrations.sglang.groups import KV, MAMBA, SWA, groups_of
from kvsidecar.integrations.sglang.metrics import LinkerMetrics
from kvsidecar.integrations.sglang.namespace import identity_of, kept_beside_kv
from kvsidecar.integrations.sglang.options import LinkerOptions
from kvsidecar.integrations.sglang.rank_side import RankFacts, RankSide, no_notes
from kvsidecar.integrations.sglang.staging import staging_for
from kvsidecar.integrations.sglang.transfers import HASH_BYTES
from kvsidecar.integrations.sglang.weights import Weights, holds_no_kv, watch

_log = logging.getLogger("kvsidecar.sglang")

SMALL_PAGE_TOKENS = 16
"""Tokens in a page below which pieces of KV are so small that the GPU's copy engine is slower than the link."""


class KVSidecarLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """Offloads the KV cache to the daemon of this node. If it cannot be offloaded, does nothing; the log says why.

    Args:
        params: SGLang's ``CacheInitParams``.
        components: the components of the tree.
        extra_config: see `LinkerOptions`.
        forward_stream: the stream that writes the pools; None if the current one does.

    Raises:
        ValueError: an option is unknown or has a bad value.
    """

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: set[Any],
        extra_config: dict[str, Any] | None = None,
        forward_stream: Any = None,
    ) -> None:
        options = LinkerOptions.parse(extra_config or {})
        self.forward_stream = forward_stream
        self.pools: dict[PoolName, object] = {}
        self.layer_done_counter: object = LayerWiseLoadCounter(1)
        self.counters = RankCounters()
        self._side: RankSide | None = None
        self._metrics: LinkerMetrics | None = None
        self._events: Announcing | None = None
        self._ends = ExitStack()
        """The functions that `close` calls, the latest first."""
        began = time.monotonic()
        mine = ranks.ranks_of(params)
        token = mine.token()
        prepared, problem = None, None
        try:
            prepared = self._prepared(server_args, params, components, options, mine, token)
        except (KVSidecarError, ValueError) as error:
            problem = str(error)
        # Either all ranks offload or none: SGLang's ranks count each other's calls.
        found = mine.gather((problem, socket.gethostname()))
        problems = [each for each, _ in found if each is not None]
        several_nodes = len({host for _, host in found}) > 1
        if several_nodes:
            problems.append("the tensor-parallel ranks are on several nodes, each of which has a daemon of its own")
        if problems or prepared is None:
            _log.error("kvsidecar: no offload: %s", problems[0])
            if params.enable_metrics:
                why_not = WhyNot.SEVERAL_NODES if several_nodes else WhyNot.UNSUPPORTED
                gauges = {ATTACHED: 0, **reason_gauges(why_not)}
                LinkerMetrics(self.counters, options.instance, lambda: gauges).publish()
            return
        facts, found_pools = prepared
        self._events = _announcing(options, facts, params, self._weights)
        notes = no_notes if self._events is None else self._events.notes
        side = self._side = RankSide(options, facts, mine, self._weights, self.counters, notes)
        allocator = params.token_to_kv_pool_allocator
        end_watch = watch(
            SchedulerWeightUpdaterManager,
            side.weights_changing,
            lambda updater: side.weights_changed(lambda: holds_no_kv(updater, allocator)),
        )
        ends = self._ends
        ends.callback(side.close)
        ends.callback(end_watch)
        ends.callback(sleeping.watch(SchedulerWeightUpdaterManager, self._released))
        ends.callback(adapters.wrap(Req, adapters.RankAdapters(adapters.manager_of_caller(), token)))
        if mine.rank == 0:  # the pages are the same on all ranks
            ends.callback(endings.watch(UnifiedRadixCache, self.is_mine, self._request_ended, side.session_ended))
        self.layer_done_counter = side.loads
        self.pools = {PoolName(pool.name): pool for pool in found_pools}
        if PoolName.MAMBA in self.pools:
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        if self._events is not None:
            self._events.start(self)
            ends.callback(self._events.close)
        if params.enable_metrics:
            self._metrics = LinkerMetrics(self.counters, options.instance, side.gauges)
        atexit.register(self.close)
        _warn_of_small_pages(facts)
        _log.info("kvsidecar: the KV cache was registered in %.1f ms", (time.monotonic() - began) * 1e3)

    def _prepared(
        self, server_args: Any, params: Any, components: set[Any], options: LinkerOptions, mine: ranks.Ranks, token: str
    ) -> tuple[RankFacts, list[pools.PagePool]]:
        """Prepare everything that may fail.

        Raises:
            KVSidecarError, ValueError: this cache cannot be offloaded.
        """
        if (problem := ranks.problem_of(params, getattr(get_parallel(), "attn_dcp_size", 1))) is not None:
            raise ValueError(f"{problem} is not supported")
        if (option := kept_beside_kv(server_args)) is not None:
            raise ValueError(
                f"{option} is not supported: SGLang keeps what it returns or checks of each token on the engine, and "
                "would take that of other tokens for those that are loaded"
            )
        kvcache = params.token_to_kv_pool_allocator.get_kvcache()
        pools.share_on_cpu(kvcache, params)
        found, num_layers = pools.pools_of(kvcache, params, params.page_size, components)
        model = ModelConfig.from_server_args(server_args)
        heads = kv_heads_of(model.hf_text_config.to_dict(), model.get_total_num_kv_heads())
        groups = groups_of(
            [(pool.name, pool.layers, pool.replicated) for pool in found],
            num_layers,
            options.load_chunks,
            {pool.name: ranks_per_head(heads, mine.size) for pool in found if pool.heads == 1},
        )
        device = next(iter(found[0].layers.values()))[0].device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        identity = identity_of(
            server_args,
            groups,
            hf_config=model.hf_config,
            page_size=params.page_size,
            tp_size=mine.size,
            is_eagle=params.is_eagle,
            facts={"SGLang": sglang.__version__, "device": name, "pools": pools.facts_of(found)},
            private=token,
            name=options.model_name,
        )
        memory = pools.export(found, groups, mine.rank, mine.size)
        reader = pools.SlotReader(device, self.forward_stream) if device.type == "cuda" else None
        self._weights = Weights(HASH_BYTES, lambda: get_serving().weight_version, token)
        instance = f"{options.instance} {token[:8]}"
        window = -(-(params.swa_retain_window or 0) // params.page_size)
        trailing = {SWA: window, MAMBA: 1}
        staging = staging_for(found, groups, memory.groups, options.staging)
        return RankFacts(identity, instance, groups, memory, params.page_size, reader, staging, trailing), found

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        return [] if self._side is None else self._side.lookup(rid, transfers)

    def load(self, rid: str, transfers: list[Any]) -> bool:
        return self._side is not None and self._side.load(rid, transfers)

    def start_layer_wise_loading(self) -> int:
        return -1 if self._side is None else self._side.loads.start()

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return self._side is None or self._side.loads.finish(counter_index)

    def cancel_queued_load(self, rid: str) -> bool:
        return self._side is not None and self._side.loads.cancel(rid)

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        return self._side is not None and self._side.offload(transfers)

    def num_completed_offloads(self) -> int:
        if self._side is None:
            return 0
        if self._metrics is not None:
            self._metrics.publish()
        return self._side.completed()

    def pop_completed_offload(self) -> bool:
        return self._side is not None and self._side.pop()

    def reset(self) -> None:
        if self._side is not None:
            self._side.reset()

    def is_mine(self, tree: UnifiedRadixCache) -> bool:
        """Whether this is the linker of that tree."""
        return tree.linker is not None and tree.linker.cache_linker is self

    def _request_ended(self, tree: UnifiedRadixCache, request: Any) -> None:
        if self._side is not None:
            self._side.request_ended(
                lambda: endings.hashes_of_request(tree, request),
                endings.session_of(request),
                request.sampling_params.custom_params,
                request.output_ids,
            )

    def _released(self) -> None:
        """Stop offloading for good: SGLang's pages and its loads refer to this registration, so it is not renewed."""
        if self._side is not None:
            _log.warning(
                "kvsidecar: SGLang releases the memory of its KV cache: the daemon unmaps it, and this engine runs "
                "without offload until it is restarted"
            )
            self.close()

    def close(self) -> None:
        atexit.unregister(self.close)
        self._side = None
        self._ends.close()


def _warn_of_small_pages(facts: RankFacts) -> None:
    if facts.staging is None and facts.page_size < SMALL_PAGE_TOKENS:
        _log.warning(
            "kvsidecar: the page size is %d, so KV is copied in small pieces, slower than the link: use "
            "--page-size 64 if the attention backend supports it",
            facts.page_size,
        )


class Announcing:
    """KV events of the daemon's pages, received by a client of its own, so that they never delay a lookup. With the
    option ``publisher`` there are only notes, and the client receives nothing."""

    def __init__(self, options: LinkerOptions, facts: RankFacts, group: int, weights: Weights) -> None:
        self._namespace, self._watches = facts.identity.namespace, not options.publisher
        self._client = Client(
            options.socket, name=f"{facts.instance} events", local_protocol=options.local_protocol, quiet=True
        )
        self._events = PageEvents(kv_events, group, facts.page_size, self._client, weights.keys)
        self.notes = self._events.notes

    def start(self, linker: KVSidecarLinker) -> None:
        self._end_wrap = self._events.wrap(UnifiedRadixCache, linker.is_mine)
        if self._watches:
            self._client.watch(self._namespace)

    def close(self) -> None:
        self._end_wrap()
        self._client.close()


def _announcing(options: LinkerOptions, facts: RankFacts, params: Any, weights: Weights) -> Announcing | None:
    """The announcing of the daemon's pages; None if there is none, which is logged where a user might expect it."""
    if options.publisher and not params.enable_kv_cache_events:
        _log.warning(
            "kvsidecar: this engine's pages will not be announced to routers: the option publisher needs "
            "SGLang's --kv-events-config, from which the tokens come"
        )
    full = facts.groups.of(KV)
    if full is None or not (params.enable_kv_cache_events and (options.residency or options.publisher)):
        return None
    if facts.page_size < MIN_PAGE_TOKENS:
        _log.warning(
            "kvsidecar: KV events do not include the daemon's pages: with %d tokens each they would take the "
            "scheduler too long; use --page-size %d or more",
            facts.page_size,
            MIN_PAGE_TOKENS,
        )
        return None
    return Announcing(options, facts, full.index, weights)
