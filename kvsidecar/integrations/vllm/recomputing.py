"""Makes vLLM recompute steps that ran on KV whose load failed.

vLLM learns which blocks a load within a step has failed to fill, and drops the step's tokens. With asynchronous
scheduling the next step has been scheduled by then, its tokens would be delivered, and the blocks of both are in the
prefix cache. So all running requests are preempted and their blocks forgotten, as after an update of the weights.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from kvsidecar.integrations.callers import attribute_of_caller, caller_with
from kvsidecar.integrations.vllm.groups import Group, GroupKind

_log = logging.getLogger("kvsidecar.vllm")

Recompute = Callable[[Iterable[int]], None]
"""Takes the ids of further GPU blocks whose content is wrong."""


def of_caller(vllm_config: Any, kv_cache_config: Any, groups: Sequence[Group]) -> Recompute | None:
    """The recomputation in the scheduler that is being constructed by a caller of this function, which vLLM does not
    hand to a connector. None, and logged, if its steps cannot load."""
    scheduler = caller_with("reset_prefix_cache", callable)
    if (why_not := _why_not(scheduler, vllm_config, kv_cache_config, groups)) is not None:
        asked = "load_chunks" in (vllm_config.kv_transfer_config.kv_connector_extra_config or {})
        _log.log(logging.WARNING if asked else logging.INFO, "kvsidecar: load_chunks has no effect: %s", why_not)
        return None
    return partial(_recompute, scheduler)


def _why_not(scheduler: Any, vllm_config: Any, kv_cache_config: Any, groups: Sequence[Group]) -> str | None:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    parallel = vllm_config.parallel_config
    if (
        not hasattr(SchedulerOutput, "has_sync_kv_loads")
        or "drop_stale_output" not in Request.__init__.__code__.co_names
    ):
        return "this vLLM does not let a step drop the tokens of an earlier one: use 0.33 or later"
    if scheduler is None or "reset_running_requests" not in inspect.signature(scheduler.reset_prefix_cache).parameters:
        return "this vLLM's scheduler is unknown"
    # vLLM ends an engine with several groups when a connector reports blocks that were not loaded.
    if len(kv_cache_config.kv_cache_groups) > 1 or groups[0].kind is not GroupKind.FULL:
        return "the model has several KV cache groups, or a window"
    if getattr(vllm_config, "speculative_config", None) is not None:
        return "a draft model computes after the step has ended"
    if parallel.pipeline_parallel_size > 1 or parallel.data_parallel_size > 1:
        return "other stages or replicas would wait with a step"
    if getattr(vllm_config, "lora_config", None) is not None:
        return "the engine has adapters"
    # Each connector sees a configuration of its own, but is constructed in a method of the one that holds them all.
    if attribute_of_caller("_connectors", lambda found: isinstance(found, list)) is not None:
        return "another connector may store what a step computes before its load has ended, or failed"
    return None


def _recompute(scheduler: Any, block_ids: Iterable[int]) -> None:
    manager = scheduler.kv_cache_manager
    wrong = set(block_ids)
    for request in scheduler.running:
        wrong.update(*manager.get_block_ids(request.request_id))
    manager.evict_blocks(wrong)
    try:
        scheduler.reset_prefix_cache(reset_running_requests=True)
    except RuntimeError:
        # Raised after all has been preempted, if stores or loads hold other blocks. Those are right, and stay.
        _log.debug("the rest of the prefix cache is kept", exc_info=True)
