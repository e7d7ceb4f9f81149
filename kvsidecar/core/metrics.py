"""Prometheus metrics of the daemon. Counters and histograms are updated by events, gauges are read at a scrape.

Names follow prometheus.io/docs/practices/naming: base units, ``_total`` on counters, few label values.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvsidecar import __version__
from kvsidecar.cache.shares import Share
from kvsidecar.cache.stats import CacheStats
from kvsidecar.core import metric_families
from kvsidecar.core.labelled_counts import DeviceCounts, ModelCounts
from kvsidecar.core.process_metrics import ProcessMetrics
from kvsidecar.core.readiness import WarmStart
from kvsidecar.core.share_metrics import share_metrics
from kvsidecar.core.tier_metrics import TierGauges, tier_metrics
from kvsidecar.errors import Refusal
from kvsidecar.support.tasks import run_all_steps
from kvsidecar.types import Direction, Outcome, Readiness, Residency, State

COPY_SECONDS_BUCKETS = (
    *(50e-6, 100e-6, 200e-6, 400e-6, 800e-6, 1.6e-3, 3.2e-3, 6.4e-3),
    *(12.8e-3, 25.6e-3, 51.2e-3, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 10.0),
)
"""A 2 MiB block takes 40 us at the limit of PCIe 5 x16 (55 GB/s), a gigabyte 20 ms."""

LOOKUP_SECONDS_BUCKETS = (100e-6, 200e-6, 400e-6, 800e-6, 1.6e-3, 3.2e-3, 10e-3, 50e-3, 0.25, 1.0)
"""A lookup takes 0.1 to 0.3 ms, and engines wait for none longer than some milliseconds."""

JOB_SECONDS_BUCKETS = (1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)

COPY_BYTES_BUCKETS = tuple(float(4**k) for k in range(7, 18))
"""16 KiB to 16 GiB."""


class SpanFate(StrEnum):
    """The fate of a span of a traced job, or of the spans that a job did not get."""

    EXPORTED = "exported"
    EXPORT_FAILED = "export_failed"
    """The collector refused the spans, or did not answer."""
    QUEUE_FULL = "queue_full"
    """A job got no spans, because the export queue was full."""


class ResetReason(StrEnum):
    """Why a watcher gets a snapshot."""

    NEW = "new"
    """It has just begun to watch."""
    UNREAD = "unread"
    """It did not read what it was sent."""
    FLOOD = "flood"
    """More has changed at once than is kept to be sent."""
    FAILED = "failed"
    """An unexpected error, which is in the log, has lost what was to be sent."""


@dataclass(frozen=True, slots=True)
class Gauges:
    """The values that a scrape reads, in bytes and seconds; mappings are per direction or per device."""

    readiness: Readiness
    cache: CacheStats
    attached_ranks: int
    watchers: int = 0
    notes_bytes: int = 0
    jobs_queued: Mapping[Direction, int] = field(default_factory=dict)
    jobs_running: Mapping[Direction, int] = field(default_factory=dict)
    oldest_inflight_seconds: Mapping[Direction, float] = field(default_factory=dict)
    imported_bytes: Mapping[str, int] = field(default_factory=dict)
    tiers: Sequence[TierGauges] = ()
    shares: Sequence[Share] = ()
    """The last one is the share of the namespaces that no other covers."""
    used_by_model: Mapping[str, int] | None = None
    """Bytes of the pool; None if readers of the metrics may not learn which models there are."""
    served_name: Callable[[str], str] = lambda model: ""
    """Returns the name that requests give a model; empty if no engine has reported it."""


class Metrics:
    """All metrics of one daemon, in a registry of its own.

    Args:
        backend: ``cuda`` or ``host``, for the build-info metric.
    """

    content_type = CONTENT_TYPE_LATEST
    """The media type of what `rendering` returns."""

    def __init__(self, backend: str) -> None:
        self.registry = CollectorRegistry()
        self._gauges: Callable[[], Gauges] | None = None
        self._count: Callable[[], Iterable[None]] = lambda: ()
        self._backend = backend
        counter = partial(Counter, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        self.refusals = counter("kvsidecar_refusals", "Requests and jobs that were refused, by reason.", ["reason"])
        self.copied_bytes = counter("kvsidecar_copied_bytes", "Bytes moved by successful copies.", ["direction"])
        self.loaded_tokens = counter(
            "kvsidecar_loaded_tokens",
            "Prompt tokens whose KV was loaded, so that engines did not have to compute them. Only the first rank of "
            "an engine is counted.",
        )
        self.copy_seconds = histogram(
            "kvsidecar_copy_seconds",
            "Time during which the device moved bytes of a job, measured with CUDA events (on the host device, with "
            "the host's clock). Excludes queueing, planning and gaps between copies.",
            ["direction"],
            buckets=COPY_SECONDS_BUCKETS,
        )
        self.queue_seconds = histogram(
            "kvsidecar_queue_seconds",
            "Time from the submission of a job to the end of its copies, less kvsidecar_copy_seconds: queueing, "
            "planning and pacing.",
            ["direction"],
            buckets=COPY_SECONDS_BUCKETS,
        )
        self.copy_bytes = histogram(
            "kvsidecar_copy_size_bytes", "Bytes moved by one job.", ["direction"], buckets=COPY_BYTES_BUCKETS
        )
        self.jobs = counter("kvsidecar_jobs", "Finished jobs, by direction and outcome.", ["direction", "outcome"])
        self.copier_deaths = counter(
            "kvsidecar_copier_deaths",
            "Copier processes that ended unexpectedly, by device. Each is replaced, and the ranks of its device attach "
            "again.",
            ["device"],
        )
        self.unexpected_errors = counter(
            "kvsidecar_unexpected_errors",
            "Errors that no part of the daemon expects. The log has each, with its traceback; the part goes on. Please "
            "report them.",
        )
        self.spaces_cleared = counter(
            "kvsidecar_spaces_cleared",
            "KV cache groups that were cleared because their user had left very many without an engine in one share: "
            "the least recently used ones.",
        )
        self.zeroed_bytes = counter("kvsidecar_zeroed_bytes", "Bytes that were zeroed after they were freed.")
        self.lookup_blocks = counter(
            "kvsidecar_lookup_blocks",
            "Blocks requested by lookups, by result. Not what engines gain: they also ask for blocks that they have "
            "themselves, and again while a request waits.",
            ["result"],
        )
        self.prompt_tokens_needed = counter(
            "kvsidecar_prompt_tokens_needed",
            "Prompt tokens, in whole blocks, that engines did not have in their own caches, as they report them. "
            "Includes requests that were preempted and begin again.",
        )
        self.prompt_tokens_loaded = counter(
            "kvsidecar_prompt_tokens_loaded",
            "Those of kvsidecar_prompt_tokens_needed_total that engines have loaded instead of computing them. Divided "
            "by it, this is the hit rate.",
        )
        self.spans = counter(
            "kvsidecar_spans",
            "Spans of traced jobs, by result. queue_full counts jobs that got no spans because the export queue was "
            "full.",
            ["result"],
        )
        self.malformed_traceparents = counter(
            "kvsidecar_malformed_traceparents",
            "Jobs whose traceparent was malformed, and ignored. Counted only while tracing is on.",
        )
        self.pin_seconds = histogram(
            "kvsidecar_pin_seconds",
            "Time to pin the whole pool.",
            buckets=(0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800),
        )
        self.register_seconds = gauge(
            "kvsidecar_pin_register_seconds",
            "Part of the pinning time spent in the pinning calls themselves. The rest was spent waiting for "
            "prefaulted pages.",
        )
        self.warm_start_blocks = gauge(
            "kvsidecar_warm_start_blocks",
            "Blocks of an earlier daemon that this one found when it started, by result.",
            ["result"],
        )
        self.warm_start_seconds = gauge(
            "kvsidecar_warm_start_seconds",
            "Time that this daemon took to find the blocks of an earlier one, excluding pinning.",
        )
        self.unfetched = counter(
            "kvsidecar_tier_unfetched_blocks",
            "Blocks that were not fetched although a slower tier has them, or may have them, by reason.",
            ["tier", "reason"],
        )
        self.unwritten = counter(
            "kvsidecar_tier_unwritten_blocks",
            "Blocks that should have been written to a slower tier but were not, by reason.",
            ["tier", "reason"],
        )
        self.residency_messages = counter(
            "kvsidecar_residency_messages",
            "Messages to watchers, such as engines with KV events, about the blocks in the pool and on the disk.",
        )
        self.residency_blocks = counter(
            "kvsidecar_residency_blocks", "Blocks in messages to watchers, by kind of change.", ["change"]
        )
        self.residency_dropped_notes = counter(
            "kvsidecar_residency_dropped_notes",
            "Blocks whose notes were dropped because the notes of all users exceeded their limit: the oldest of the "
            "user with the most. Future watchers do not learn the tokens of these blocks, and do not announce them to "
            "routers.",
        )
        self.residency_resets = counter(
            "kvsidecar_residency_resets",
            "Snapshots sent to watchers, by reason: new (the watcher has just started), unread (it did not read), "
            "flood (more changed at once than may be queued), failed (by an unexpected error).",
            ["reason"],
        )
        self.loop_lag_seconds = histogram(
            "kvsidecar_event_loop_lag_seconds",
            "Delay between the time a timer was due and the time the event loop ran it.",
            buckets=(1e-3, 5e-3, 20e-3, 0.1, 0.5, 2.0, 10.0),
        )
        self.lookup_seconds = histogram(
            "kvsidecar_lookup_seconds",
            "Time from the arrival of a lookup at the daemon to its answer, including the wait for its turn.",
            buckets=LOOKUP_SECONDS_BUCKETS,
        )
        self.job_seconds = histogram(
            "kvsidecar_job_seconds",
            "Time from the arrival of a job that moved bytes to its answer: kvsidecar_copy_seconds, "
            "kvsidecar_queue_seconds, and what the daemon decides before and after.",
            ["direction"],
            buckets=JOB_SECONDS_BUCKETS,
        )
        self.models, self.devices = ModelCounts(), DeviceCounts()
        # No alert can be set on a series that appears with its first event: create them all at zero.
        for reason in Refusal:
            self.refusals.labels(reason.value)
        for direction in Direction:
            for series in (self.copy_seconds, self.queue_seconds, self.copy_bytes, self.job_seconds):
                series.labels(direction.value)
            self.copied_bytes.labels(direction.value)
            for outcome in Outcome:
                self.jobs.labels(direction.value, outcome.value)
        for fate in SpanFate:
            self.spans.labels(fate.value)
        for kind in Residency:
            if kind.is_change:
                self.residency_blocks.labels(kind.value)
        for reset in ResetReason:
            self.residency_resets.labels(reset.value)
        for result in ("hit", "miss"):
            self.lookup_blocks.labels(result)
        self.warm_started(WarmStart())
        self._by_events = frozenset(family.name for family in self.registry.collect())
        """Families that events update. Their samples may have a suffix, such as ``_total``."""
        self.registry.register(ProcessMetrics())
        self.registry.register(self)

    def read_gauges_from(self, source: Callable[[], Gauges], count: Callable[[], Iterable[None]] = lambda: ()) -> None:
        """Call ``source`` at every scrape from now on, behind the steps of ``count``."""
        self._gauges, self._count = source, count

    def warm_started(self, found: WarmStart) -> None:
        """Record what the start has kept."""
        self.warm_start_blocks.labels("kept").set(found.kept_blocks)
        self.warm_start_blocks.labels("dropped").set(found.dropped_blocks)
        self.warm_start_seconds.set(found.seconds)

    def refuse(self, reason: Refusal, count: int = 1) -> None:
        """Count a refusal."""
        self.refusals.labels(reason.value).inc(count)

    def refusal_counts(self) -> dict[str, int]:
        """Refusals so far, by reason; reasons that never occurred are left out."""
        (family,) = self.refusals.collect()
        return {
            sample.labels["reason"]: int(sample.value)
            for sample in family.samples
            if sample.name.endswith("_total") and sample.value
        }

    def value(self, name: str, **labels: str) -> float:
        """Current value of one series; 0 if it has none. A gauge that is read at a scrape costs as much as all."""
        # Not `get_sample_value`, which collects everything for it: a Status needs many values.
        by_events = name.rpartition("_")[0] in self._by_events or name in self._by_events
        for family in self.registry.restricted_registry([name]).collect() if by_events else self.collect():
            for sample in family.samples:
                if sample.name == name and sample.labels == labels:
                    return sample.value
        return 0.0

    def render(self) -> bytes:
        """The text exposition format."""
        return run_all_steps(self.rendering())

    def rendering(self) -> Generator[None, None, bytes]:
        """`render`, one family in each step: all of them take milliseconds."""
        parts = []
        yield from self._count()
        for family in self.registry.collect():
            parts.append(generate_latest(_OneFamily(family)))
            yield
        return b"".join(parts)

    def describe(self) -> Iterable[Metric]:
        """Nothing: otherwise the registry would call `collect` before the gauges have a source."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Called by the registry at a scrape."""
        yield metric_families.gauge(
            "build_info", "Always 1.", ["version", "backend"], {(__version__, self._backend): 1}
        )
        yield metric_families.lost_log_lines("log_lines_lost")
        if self._gauges is None:
            return
        now = self._gauges()
        pool, cache = now.readiness, now.cache
        ready = pool.state is State.READY
        yield GaugeMetricFamily("kvsidecar_ready", "1 if the daemon is ready, else 0.", value=ready)
        states = {each.value: each is pool.state for each in State}
        yield metric_families.gauge("state", "1 for the current state, 0 for the others.", ["state"], states)
        for name, text, value in (
            ("pool_total_bytes", "Configured size of the host pool, in bytes.", pool.pool_bytes),
            ("pool_pinned_bytes", "Bytes of the pool that are pinned.", pool.pinned_bytes),
            (
                "serves_kept_blocks",
                "1 while blocks of an earlier daemon are served before this one is ready, else 0.",
                pool.serves_kept,
            ),
            ("pool_used_bytes", "Bytes in slots that hold a sealed shard.", cache.used_bytes),
            ("pool_free_bytes", "Bytes that are available for slots.", cache.free_bytes),
            (
                "pool_rounding_bytes",
                "Bytes lost to rounding: ends of slabs, and gaps between them, that are too short for a slot of any "
                "size in use.",
                cache.wasted_bytes,
            ),
            ("pool_reserved_bytes", "Bytes in reserved slots, which stores are filling.", cache.reserved_bytes),
            ("pool_leased_bytes", "Used bytes that a lease protects from eviction.", cache.leased_bytes),
            ("pool_quarantined_bytes", "Bytes in quarantined slots.", cache.quarantined_bytes),
            (
                "pool_unzeroed_bytes",
                "Freed or cleared bytes that have yet to be zeroed; 0 without --zero-freed.",
                cache.unzeroed_bytes,
            ),
            ("blocks", "Readable blocks: all shards are sealed.", cache.readable_blocks),
            ("leases", "Active leases.", cache.leases),
            ("attached_ranks", "Attached engine ranks.", now.attached_ranks),
            ("watchers", "Clients that watch which blocks can be looked up.", now.watchers),
            ("residency_notes_bytes", "Engines' notes on blocks, kept for future watchers.", now.notes_bytes),
        ):
            yield GaugeMetricFamily(f"kvsidecar_{name}", text, value=value)
        for name, text, value in (
            ("evicted_blocks", "Blocks evicted, to make room or because they had expired.", cache.evicted_blocks),
            ("evicted_bytes", "Bytes of the slots freed by eviction.", cache.evicted_bytes),
            ("expired_blocks", "Evicted blocks that had expired.", cache.expired_blocks),
            (
                "spaces_not_kept",
                "KV cache groups whose blocks a restart will lose: their namespaces' names are too long, or there are "
                "too many.",
                cache.spaces_not_kept,
            ),
        ):
            yield CounterMetricFamily(f"kvsidecar_{name}", text, value=value)
        for name, text, values in (
            ("jobs_queued", "Jobs waiting in the queue of their device.", now.jobs_queued),
            ("jobs_running", "Jobs whose copies are in flight.", now.jobs_running),
            ("oldest_inflight_seconds", "Age of the oldest unfinished job; 0 if none.", now.oldest_inflight_seconds),
        ):
            yield metric_families.gauge(
                name, text, ["direction"], {each.value: values.get(each, 0) for each in Direction}
            )
        yield metric_families.gauge(
            "imported_gpu_bytes", "Engine memory mapped by the daemon.", ["device"], now.imported_bytes
        )
        yield from tier_metrics(now.tiers)
        yield from share_metrics(now.shares)
        yield from self.devices.metrics()
        if now.used_by_model is not None:
            yield from self.models.metrics(now.used_by_model, now.served_name)


class _OneFamily(Collector):
    """Stands in for a registry that has only this family."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        return (self._family,)
