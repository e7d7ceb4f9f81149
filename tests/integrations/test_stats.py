"""With vLLM's own base classes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import prometheus_client
import pytest

pytest.importorskip("vllm")

from kvsidecar.integrations.offload_condition import WhyNot, reason_gauges
from kvsidecar.integrations.vllm import stats
from kvsidecar.integrations.vllm.stats import SidecarPromMetrics, SidecarStats
from kvsidecar.integrations.vllm.worker import Transfers

TYPES = {each: each for each in (prometheus_client.Gauge, prometheus_client.Counter, prometheus_client.Histogram)}
LABELS = ["model_name", "engine"]


@pytest.fixture(autouse=True)
def _no_other_series() -> Iterator[None]:
    """An engine that ran in this process before leaves its own behind."""
    registry = prometheus_client.REGISTRY
    ours = {*stats.COUNTERS, *stats.OWN_COUNTERS, *stats.OWN_GAUGES, *stats.HISTOGRAMS}
    others = {registry._names_to_collectors[name] for name in ours if name in registry._names_to_collectors}
    for each in others:
        registry.unregister(each)
    before = set(registry._collector_to_names)
    yield
    for each in set(registry._collector_to_names) - before:
        registry.unregister(each)
    for each in others:
        registry.register(each)


def prom() -> SidecarPromMetrics:
    class Config:
        kv_transfer_config = None

    return SidecarPromMetrics(Config(), TYPES, LABELS, {0: ["m", "0"], 1: ["m", "1"]})


def value(name: str, engine: str = "0", **labels: str) -> float | None:
    return prometheus_client.REGISTRY.get_sample_value(name, {"model_name": "m", "engine": engine, **labels})


def test_ranks_and_steps_add_up() -> None:
    one = SidecarStats.of_transfers(Transfers(10, 0.5, [4, 6]), Transfers())
    other = SidecarStats.of_transfers(Transfers(5, 0.25, [5], declined=1), Transfers(7, 1.0, [7]))
    both = one.aggregate(SidecarStats(other.data))
    assert both.data == {
        stats.STORE_BYTES: 15,
        stats.STORE_TIME: 0.75,
        stats.STORE_SIZE: [4, 6, 5],
        stats.LOAD_BYTES: 7,
        stats.LOAD_TIME: 1.0,
        stats.LOAD_SIZE: [7],
        stats.ALLOCATION_FAILURE: 1,
    }
    assert both.reduce()[f"{stats.STORE_SIZE}_count"] == 3
    assert both.reduce()[f"{stats.STORE_SIZE}_sum"] == both.reduce()[stats.STORE_BYTES] == 15
    assert not both.is_empty()
    both.reset()
    assert both.is_empty()


def test_what_is_observed_is_served_by_engine() -> None:
    metrics = prom()
    metrics.observe({stats.LOAD_BYTES: 5, stats.LOAD_SIZE: [2e6, 3e6], stats.LOOKUP_DELAY: [0.001]}, 1)
    metrics.observe({stats.LOAD_BYTES: 6}, 1)
    assert value("vllm:kv_offload_load_bytes_total", "1") == 11
    assert value("vllm:kv_offload_load_bytes_total", "0") is None
    assert value("vllm:kv_offload_load_size_count", "1") == 2
    assert value("vllm:kv_offload_lookup_sync_delay_seconds_sum", "1") == 0.001


def test_what_the_schedulers_side_has_counted_is_served_under_names_of_its_own() -> None:
    seen = SidecarStats.of_scheduler({stats.LOOKUP_DELAY: [0.001]}, {"loads": 2, "loaded_tokens": 32})
    metrics = prom()
    metrics.observe(seen.aggregate(SidecarStats.of_scheduler({}, {"loads": 1})).data)
    assert value("vllm:kvsidecar_loads_total") == 3
    assert value("vllm:kvsidecar_loaded_tokens_total") == 32
    assert value("vllm:kv_offload_lookup_sync_delay_seconds_count") == 1


def test_what_is_true_is_told_as_it_is_not_summed() -> None:
    seen = SidecarStats.of_scheduler({}, {"own_hashes": 1})
    metrics = prom()
    metrics.observe(SidecarStats(dict(seen.data)).aggregate(seen).data)
    metrics.observe(seen.data)
    assert value("vllm:kvsidecar_own_hashes") == 1
    metrics.observe(SidecarStats.of_scheduler({}, {"own_hashes": 0}).data)
    assert value("vllm:kvsidecar_own_hashes") == 0


def test_a_gauge_of_reasons_has_a_series_for_each() -> None:
    metrics = prom()
    metrics.observe(SidecarStats.of_scheduler({}, dict(reason_gauges(WhyNot.SEVERAL_NODES))).data)
    assert value("vllm:kvsidecar_not_offloading", reason="several_nodes") == 1
    assert value("vllm:kvsidecar_not_offloading", reason="unsupported") == 0


def test_series_that_exist_already_are_shared() -> None:
    theirs = prometheus_client.Counter(stats.STORE_BYTES, "theirs", LABELS)
    theirs.labels("m", "0").inc(1)
    prom().observe({stats.STORE_BYTES: 2})
    assert value("vllm:kv_offload_store_bytes_total") == 3


def test_nothing_is_registered_before_another_connector_can_register_it() -> None:
    metrics = prom()
    prometheus_client.Counter(stats.STORE_BYTES, "theirs, made second", LABELS)
    metrics.observe({stats.STORE_BYTES: 2})
    assert value("vllm:kv_offload_store_bytes_total") == 2


def test_names_help_and_buckets_are_those_of_vllms_own_offloading() -> None:
    metrics: Any = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics")
    theirs = metrics.get_connector_metric_definitions()
    for name, text in stats.COUNTERS.items():
        assert theirs[name].documentation == text
    for name, (text, buckets) in stats.HISTOGRAMS.items():
        assert theirs[name].documentation == text
        assert tuple(theirs[name].buckets) == tuple(buckets)
