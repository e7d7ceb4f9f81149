"""The connector's metrics in vLLM, under the names that vLLM's in-tree offloading uses. The daemon exports those of the
pool, which all engines of the node share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import prometheus_client
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvsidecar.integrations.vllm.counters import COUNTED, GAUGES

if TYPE_CHECKING:
    from kvsidecar.integrations.vllm.worker import Transfers

LOAD_BYTES = "vllm:kv_offload_load_bytes"
LOAD_TIME = "vllm:kv_offload_load_time"
LOAD_SIZE = "vllm:kv_offload_load_size"
STORE_BYTES = "vllm:kv_offload_store_bytes"
STORE_TIME = "vllm:kv_offload_store_time"
STORE_SIZE = "vllm:kv_offload_store_size"
ALLOCATION_FAILURE = "vllm:kv_offload_allocation_failure"
LOOKUP_DELAY = "vllm:kv_offload_lookup_sync_delay_seconds"
LOOKUP_DEFERRED = "vllm:kv_offload_lookup_async_delay_seconds"

COUNTERS = {
    LOAD_BYTES: "Total bytes loaded from offload storage to GPU.",
    LOAD_TIME: "Total load time from offload storage to GPU, in seconds.",
    STORE_BYTES: "Total bytes stored from GPU to offload storage.",
    STORE_TIME: "Total store time from GPU to offload storage, in seconds.",
    ALLOCATION_FAILURE: "Number of KV offload store allocation attempts that failed.",
}
OWN = "vllm:kvsidecar_"
OWN_COUNTERS = {f"{OWN}{name}": text for name, text in COUNTED.items()}
"""Metrics that vLLM has no name for, named like those of its other connectors."""
OWN_GAUGES = {f"{OWN}{name}": text for name, text in GAUGES.items()}
_SIZES = (1e6, 5e6, 10e6, 20e6, 40e6, 60e6, 80e6, 100e6, 150e6, 200e6)
_SECONDS = (1e-5, 5e-5, 1e-4, 5e-4, 1e-3, 5e-3, 1e-2, 5e-2, 0.1, 0.5, 1)
HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    LOAD_SIZE: ("Histogram of KV offload load operation size, in bytes.", _SIZES),
    STORE_SIZE: ("Histogram of KV offload store operation size, in bytes.", _SIZES),
    LOOKUP_DELAY: ("Histogram of the time spent in a single offload lookup call, in seconds.", _SECONDS),
    LOOKUP_DEFERRED: (
        "Histogram of time between a request's offload lookup first deferring and the following lookup resolving, or "
        "request finish, in seconds.",
        (*_SECONDS[2:], 5, 10),
    ),
}
"""Help texts and buckets, the same as vLLM's (`offloading/metrics.py`)."""


@dataclass
class SidecarStats(KVConnectorStats):  # type: ignore[misc]
    """``data`` has sums by counter name and lists of observations by histogram name."""

    @classmethod
    def of_transfers(cls, stores: Transfers, loads: Transfers) -> SidecarStats:
        """The statistics of one rank's copies."""
        data: dict[str, Any] = {}
        for each, nbytes, seconds, sizes in (
            (stores, STORE_BYTES, STORE_TIME, STORE_SIZE),
            (loads, LOAD_BYTES, LOAD_TIME, LOAD_SIZE),
        ):
            if each.sizes:
                data |= {nbytes: each.nbytes, seconds: each.seconds, sizes: each.sizes}
        if stores.declined:
            data[ALLOCATION_FAILURE] = stores.declined
        return cls(data)

    @classmethod
    def of_scheduler(cls, observed: Mapping[str, Any], counted: Mapping[str, int]) -> SidecarStats:
        """The statistics of the scheduler side.

        Args:
            observed: observations by histogram name.
            counted: increments by name of `Counters`, and values by name of `GAUGES`. The value of the label
                ``reason`` follows the name, as in ``not_offloading|unsupported``.
        """
        return cls({**observed, **{f"{OWN}{name}": value for name, value in counted.items()}})

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> SidecarStats:
        for name, value in other.data.items():
            self.data[name] = value if _is_gauge(name) else self.data.get(name, type(value)()) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        reduced: dict[str, int | float] = {}
        for name, value in self.data.items():
            if isinstance(value, list):
                reduced |= {f"{name}_count": len(value), f"{name}_sum": sum(value)}
            else:
                reduced[name] = value
        return reduced

    def is_empty(self) -> bool:
        return not self.data


class SidecarPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Creates each series when it is first observed, or shares the one that vLLM's in-tree offloading has created in a
    MultiConnector. Created at the start, it would make vLLM's own registration fail."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, Any] = {}

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            family, _, reason = name.partition("|")
            labels = (*self.per_engine_labelvalues[engine_idx], *([reason] if reason else []))
            metric = self._metric(family, ["reason"] if reason else []).labels(*labels)
            if isinstance(value, list):
                for each in value:
                    metric.observe(each)
            elif _is_gauge(name):
                metric.set(value)
            else:
                metric.inc(value)

    def _metric(self, name: str, more_labels: Sequence[str]) -> Any:
        if name not in self._metrics:
            known = prometheus_client.REGISTRY._names_to_collectors.get(name)
            self._metrics[name] = known or self._made(name, more_labels)
        return self._metrics[name]

    def _made(self, name: str, more_labels: Sequence[str]) -> Any:
        if (counter := COUNTERS.get(name) or OWN_COUNTERS.get(name)) is not None:
            return self._counter_cls(name=name, documentation=counter, labelnames=self._labelnames)
        if (gauge := OWN_GAUGES.get(name)) is not None:
            labels = [*self._labelnames, *more_labels]
            return self._gauge_cls(name=name, documentation=gauge, labelnames=labels, multiprocess_mode="mostrecent")
        text, buckets = HISTOGRAMS[name]
        return self._histogram_cls(name=name, documentation=text, buckets=buckets, labelnames=self._labelnames)


def _is_gauge(name: str) -> bool:
    return name.partition("|")[0] in OWN_GAUGES
