"""Notices what vLLM's scheduler does not report to its connector: that the output of a step is processed, that all
requests are aborted, that the engine sleeps, and that a reset begins, which fails, before the connector is asked, while
anything holds a GPU block.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvsidecar.integrations.callers import caller_with
from kvsidecar.integrations.wrapping import End, wrap

if TYPE_CHECKING:
    from kvsidecar.integrations.vllm.scheduler import SchedulerSide


def of_caller() -> Any:
    """The scheduler that is being constructed by a caller of this function.

    Raises:
        ValueError: it does not have the methods that must be wrapped.
    """
    scheduler = caller_with("update_from_output", callable)
    if not hasattr(scheduler, "reset_prefix_cache"):
        raise ValueError("this vLLM's scheduler is unknown, so nobody says which blocks of the GPU are written")
    return scheduler


def engine_core_of_caller() -> Any:
    """The engine core that is being constructed by a caller of this function; None: there is none that can sleep."""
    return caller_with("sleep", callable)


def tell_of_sleep(engine_core: Any, side: SchedulerSide) -> End:
    """Notify ``side``, from now on, when this engine core has fallen asleep, after which its weights may differ: some
    versions of vLLM reset the prefix cache then without the connector."""

    def sleep(original: Callable[..., Any], level: int = 1, *args: Any, **named: Any) -> Any:
        resets = side.counters.resets
        result = original(level, *args, **named)
        # At level 0, the GPU's memory stays. A future is of versions that include the connector when they reset.
        if level > 0 and result is None and side.counters.resets == resets:
            side.reset_cache()
        return result

    return wrap(engine_core, "sleep", sleep)


def tell(scheduler: Any, side: SchedulerSide) -> End:
    """Notify ``side``, from now on, of what this scheduler does."""
    parameters = inspect.signature(scheduler.reset_prefix_cache)

    def update_from_output(original: Callable[..., Any], scheduler_output: Any, model_runner_output: Any) -> Any:
        loads = getattr(model_runner_output, "kv_connector_output", None)
        side.begin_output(scheduler_output, loads.invalid_block_ids if loads is not None else ())
        try:
            return original(scheduler_output, model_runner_output)
        finally:
            side.end_output()

    def reset_prefix_cache(original: Callable[..., Any], *args: Any, **named: Any) -> Any:
        asked = parameters.bind(*args, **named).arguments
        side.begin_reset()
        try:
            return original(*args, **named)
        except Exception:
            if asked.get("reset_connector"):
                side.reset_failed()
            raise
        finally:
            side.end_reset(all_preempted=bool(asked.get("reset_running_requests")))

    def finish_requests(original: Callable[..., Any], request_ids: Any, *others: Any, **named: Any) -> Any:
        if request_ids is None:
            side.abort_all()
        return original(request_ids, *others, **named)

    ends = [
        wrap(scheduler, "finish_requests", finish_requests),
        wrap(scheduler, "update_from_output", update_from_output),
        wrap(scheduler, "reset_prefix_cache", reset_prefix_cache),
    ]

    def end() -> None:
        for each in ends:
            each()

    return end
