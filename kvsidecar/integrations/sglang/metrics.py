"""The linker's counters on SGLang's ``/metrics`` (with ``--enable-metrics``). Imports prometheus_client."""

from __future__ import annotations

import time
from typing import Any

from kvsidecar.integrations.sglang.counters import HELP, Counters

PUBLISH_SECONDS = 1.0
PREFIX = "sglang:kvsidecar_"


class Metrics:
    """Publishes what was counted, at most once a second.

    Args:
        instance: name of the engine deployment, the metrics' label.
    """

    def __init__(self, counters: Counters, instance: str) -> None:
        # Not before: SGLang says in the environment where its processes collect their metrics.
        import prometheus_client

        self._counters = counters
        self._published = dict.fromkeys(HELP, 0)
        self._series: dict[str, Any] = {}
        for name, text in HELP.items():
            known: Any = prometheus_client.REGISTRY._names_to_collectors.get(PREFIX + name)
            series = known or prometheus_client.Counter(PREFIX + name, text, ["instance"])
            self._series[name] = series.labels(instance)
        self._next = 0.0

    def publish(self) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + PUBLISH_SECONDS
        for name, before in self._published.items():
            value = getattr(self._counters, name)
            if value != before:
                self._series[name].inc(value - before)
                self._published[name] = value
