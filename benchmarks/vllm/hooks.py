"""What a connector costs the engine's thread: the time in its hooks, step by step.

Both sides of the connector run in one thread where the engine core runs in this process, so that the hooks of a step
add up to what the step waits for them.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "take_events",
    "has_pending_push_work",
    "has_pending_block_frees",
    "handle_preemptions",
    "bind_connector_metadata",
    "clear_connector_metadata",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_finished",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    "get_kv_connector_kv_cache_events",
    "build_connector_worker_meta",
)
"""Those that vLLM calls in a step; a version lacks some."""
LAST = "build_connector_meta"
"""A step begins behind it: what follows belongs to the step that it plans."""


class Hooks:
    """Wraps the hooks of connectors and adds up their times."""

    def __init__(self) -> None:
        self._steps: list[float] = []
        self._step = 0.0
        self._depth = 0
        self._totals: dict[str, float] = defaultdict(float)
        self._worst: dict[str, float] = defaultdict(float)

    def watch(self, connector: Any) -> None:
        for name in HOOKS:
            if hasattr(connector, name):
                setattr(connector, name, self._timed(name, getattr(connector, name)))

    def take(self) -> dict[str, Any]:
        """Microseconds since the last call: of each step, and of each hook in all and at most."""
        taken = {
            "steps_us": [seconds * 1e6 for seconds in self._steps],
            "hooks_us": {name: seconds * 1e6 for name, seconds in self._totals.items()},
            "worst_us": {name: seconds * 1e6 for name, seconds in self._worst.items()},
        }
        self._steps.clear()
        self._totals.clear()
        self._worst.clear()
        self._step = 0.0
        return taken

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            if self._depth:  # one hook's default calls another
                return call(*arguments, **options)
            if name == LAST and self._totals:
                self._steps.append(self._step)
                self._step = 0.0
            self._depth += 1
            began = time.perf_counter()
            try:
                return call(*arguments, **options)
            finally:
                seconds = time.perf_counter() - began
                self._depth -= 1
                self._step += seconds
                self._totals[name] += seconds
                self._worst[name] = max(self._worst[name], seconds)

        return timed
