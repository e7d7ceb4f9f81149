from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvsidecar.cache.stats import CacheStats
from kvsidecar.core.metrics import LOOKUP_SECONDS_BUCKETS, Gauges, Metrics
from kvsidecar.errors import Refusal
from kvsidecar.types import Direction, Readiness, State


def gauges(state: State = State.READY) -> Gauges:
    return Gauges(
        readiness=Readiness(state, pool_bytes=100, pinned_bytes=100),
        cache=CacheStats(
            total_bytes=100,
            used_bytes=40,
            free_bytes=48,
            reserved_bytes=10,
            quarantined_bytes=0,
            wasted_bytes=2,
            evictable_bytes=35,
            leased_bytes=5,
            blocks=5,
            readable_blocks=4,
            leases=1,
            loads=0,
            evicted_blocks=7,
            spaces_not_kept=9,
            evicted_bytes=70,
        ),
        attached_ranks=2,
        jobs_queued={Direction.STORE: 3},
        imported_bytes={"GPU-1": 12},
    )


def scrape(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def test_every_refusal_reason_is_exported_at_zero_before_it_happens() -> None:
    samples = scrape(Metrics("host"))
    for reason in Refusal:
        assert samples["kvsidecar_refusals_total", (("reason", reason.value),)] == 0


def test_gauges_are_read_at_the_scrape() -> None:
    metrics = Metrics("host")
    metrics.read_gauges_from(gauges)
    samples = scrape(metrics)
    assert samples["kvsidecar_pool_used_bytes", ()] == 40
    assert samples["kvsidecar_pool_free_bytes", ()] == 48
    assert samples["kvsidecar_pool_rounding_bytes", ()] == 2, "what no slot can have is shown as free"
    assert samples["kvsidecar_blocks", ()] == 4
    assert samples["kvsidecar_jobs_queued", (("direction", "store"),)] == 3
    assert samples["kvsidecar_jobs_queued", (("direction", "load"),)] == 0
    assert samples["kvsidecar_imported_gpu_bytes", (("device", "GPU-1"),)] == 12
    assert samples["kvsidecar_evicted_blocks_total", ()] == 7
    assert samples["kvsidecar_spaces_not_kept_total", ()] == 9
    assert samples["kvsidecar_ready", ()] == 1


def test_exactly_one_state_is_set() -> None:
    metrics = Metrics("host")
    metrics.read_gauges_from(lambda: gauges(State.PINNING))
    samples = scrape(metrics)
    states = {state: samples["kvsidecar_state", (("state", state.value),)] for state in State}
    assert [state for state, value in states.items() if value] == [State.PINNING]
    assert samples["kvsidecar_ready", ()] == 0


def test_copy_seconds_resolve_a_single_block() -> None:
    metrics = Metrics("cuda")
    metrics.copy_seconds.labels("load").observe(45e-6)
    samples = scrape(metrics)
    assert samples["kvsidecar_copy_seconds_bucket", (("direction", "load"), ("le", "5e-05"))] == 1


def test_a_lookup_is_counted_in_the_buckets_that_it_fits() -> None:
    metrics = Metrics("host")
    before, *bounds = (0.0, *LOOKUP_SECONDS_BUCKETS)
    for bound in bounds:
        metrics.lookup_seconds.observe((before + bound) / 2)
        before = bound
    metrics.lookup_seconds.observe(bounds[0])  # a bound belongs to its bucket
    metrics.lookup_seconds.observe(2 * bounds[-1])
    samples = scrape(metrics)
    found = [samples["kvsidecar_lookup_seconds_bucket", (("le", str(bound)),)] for bound in (*bounds, "+Inf")]
    assert found == [*range(2, len(bounds) + 2), len(bounds) + 2]
    assert samples["kvsidecar_lookup_seconds_count", ()] == len(bounds) + 2
    wanted = sum(map(sum, zip((0.0, *bounds[:-1]), bounds, strict=True))) / 2 + bounds[0] + 2 * bounds[-1]
    assert samples["kvsidecar_lookup_seconds_sum", ()] == pytest.approx(wanted)
    assert samples["kvsidecar_job_seconds_count", (("direction", "load"),)] == 0


def test_no_series_says_when_another_was_created() -> None:
    names = {name for name, _ in scrape(Metrics("host"))}
    assert {"kvsidecar_jobs_total", "kvsidecar_copy_seconds_bucket"} <= names
    assert [name for name in names if name.endswith("_created")] == []


def test_refusal_counts_list_what_happened_only() -> None:
    metrics = Metrics("host")
    metrics.refuse(Refusal.POOL_FULL, 3)
    assert metrics.refusal_counts() == {"pool_full": 3}


def test_a_series_that_has_not_begun_is_zero_without_a_scrape() -> None:
    scrapes = []

    def source() -> Gauges:
        scrapes.append(1)
        return gauges()

    metrics = Metrics("host")
    metrics.read_gauges_from(source)
    assert metrics.value("kvsidecar_copier_deaths_total", device="GPU-1") == 0
    assert metrics.value("kvsidecar_refusals_total", reason="no such") == 0
    assert not scrapes, "a Status with a few of them costs as many scrapes"
    metrics.copier_deaths.labels("GPU-1").inc()
    assert metrics.value("kvsidecar_copier_deaths_total", device="GPU-1") == 1
    assert metrics.value("kvsidecar_pool_used_bytes") == 40
    assert metrics.value("kvsidecar_no_such_thing") == 0
