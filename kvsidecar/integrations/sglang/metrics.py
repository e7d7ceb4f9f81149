"""The linker's counters on SGLang's ``/metrics`` (with ``--enable-metrics``). Imports prometheus_client."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from kvsidecar.integrations.offload_condition import ATTACHED, GAUGES, NOT_OFFLOADING
from kvsidecar.integrations.sglang.counters import HELP, RankCounters

PUBLISH_SECONDS = 1.0
PREFIX = "sglang:kvsidecar_"


class LinkerMetrics:
    """Publishes the counters' increments, and this rank's gauges, at most once a second.

    Args:
        instance: name of the engine deployment, the metrics' label.
        gauges: returns the gauges' values by name; that of `NOT_OFFLOADING` is followed by ``|`` and the reason.
    """

    def __init__(self, counters: RankCounters, instance: str, gauges: Callable[[], Mapping[str, int]]) -> None:
        # Not before: SGLang says in the environment where its processes collect their metrics.
        import prometheus_client

        self._counters, self._gauges, self._instance = counters, gauges, instance
        self._families: dict[str, Any] = {}
        known: Any = prometheus_client.REGISTRY._names_to_collectors
        for name, text in GAUGES.items():
            labels = ["instance", "reason"] if name == NOT_OFFLOADING else ["instance"]
            # Of several ranks the one that is worst off: one that is not attached keeps all from hits.
            mode: Any = "livemin" if name == ATTACHED else "livemax"
            self._families[name] = known.get(PREFIX + name) or prometheus_client.Gauge(
                PREFIX + name, text, labels, multiprocess_mode=mode
            )
        self._counts: dict[str, Any] = {}
        for name, text in HELP.items():
            family = known.get(PREFIX + name) or prometheus_client.Counter(PREFIX + name, text, ["instance"])
            self._counts[name] = family.labels(instance)
        self._next = 0.0

    def publish(self) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + PUBLISH_SECONDS
        for name, more in self._counters.take().items():
            self._counts[name].inc(more)
        for name, value in self._gauges().items():
            family, _, reason = name.partition("|")
            self._families[family].labels(self._instance, *([reason] if reason else [])).set(value)
