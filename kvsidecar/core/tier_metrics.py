"""The metrics of the slower tiers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from prometheus_client.core import Metric

from kvsidecar.core import metric_families
from kvsidecar.core.share_metrics import by_label
from kvsidecar.tiers.backend import BackendStats
from kvsidecar.tiers.tier import TierCounts


@dataclass(frozen=True, slots=True)
class TierGauges:
    """What a slower tier has, and what it has done since the daemon started."""

    name: str
    off: str
    """Why it is not used at present; empty while it is."""
    stats: BackendStats | None
    """The last report of its process; None if it has never worked."""
    counts: TierCounts
    reading_bytes: int = 0
    writing_bytes: int = 0
    write_budget_bytes: int | None = None
    """Bytes that may be written now; None for no limit."""
    deaths: int = 0


def _tier_share_metrics(tiers: Sequence[TierGauges]) -> Iterable[Metric]:
    """Metrics of tiers that are divided among shares; see `share_metrics`."""
    used: dict[tuple[str, ...], float] = {}
    guaranteed: dict[tuple[str, ...], float] = {}
    for tier in tiers:
        ordered = sorted(() if tier.stats is None else tier.stats.shares, key=lambda share: -share.used)
        for label, members in by_label(ordered).items():
            used[tier.name, label] = sum([share.used for share in members])
            guaranteed[tier.name, label] = sum([share.guaranteed for share in members])
    labels = ["tier", "share"]
    yield metric_families.gauge("tier_share_used_bytes", "Bytes of the tier that the share uses.", labels, used)
    text = "Bytes of the tier that no other share can take."
    yield metric_families.gauge("tier_share_guaranteed_bytes", text, labels, guaranteed)


def tier_metrics(tiers: Sequence[TierGauges]) -> Iterable[Metric]:
    """Nothing without a tier."""
    if not tiers:
        return

    def stat(name: str) -> Callable[[TierGauges], float]:
        return lambda tier: getattr(tier.stats, name, 0)

    gauges: tuple[tuple[str, str, Callable[[TierGauges], float]], ...] = (
        ("up", "1 if the tier is used, 0 if it has failed or is too slow.", lambda tier: not tier.off),
        ("capacity_bytes", "Bytes that the tier can hold.", stat("capacity_bytes")),
        ("used_bytes", "Bytes that the tier holds.", stat("used_bytes")),
        ("blocks", "Shards that the tier holds.", stat("blocks")),
        ("reading_bytes", "Bytes that are being read from the tier.", lambda tier: tier.reading_bytes),
        (
            "writing_bytes",
            "Bytes that are waiting to be written, or are being written.",
            lambda tier: tier.writing_bytes,
        ),
    )
    for name, text, value in gauges:
        yield metric_families.gauge(f"tier_{name}", text, ["tier"], {tier.name: value(tier) for tier in tiers})
    budgets = {tier.name: tier.write_budget_bytes for tier in tiers if tier.write_budget_bytes is not None}
    text = "Bytes of the day's budget that may be written now. Absent without a limit."
    yield metric_families.gauge("tier_write_budget_bytes", text, ["tier"], budgets)
    counters: tuple[tuple[str, str, Callable[[TierGauges], float]], ...] = (
        ("failures", "Calls to the tier that failed or took too long.", lambda tier: tier.counts.failures),
        ("deaths", "Processes of the tier that ended unexpectedly.", lambda tier: tier.deaths),
        (
            "corrupt_blocks",
            "Shards whose checksums show that their bytes differ from those written. They count as misses.",
            lambda tier: tier.counts.corrupt_blocks,
        ),
        ("evicted_blocks", "Shards evicted to make room for others.", stat("evicted_blocks")),
        (
            "quota_blocks",
            "Shards that were not read or written because the bytes are guaranteed to other shares.",
            stat("quota_blocks"),
        ),
    )
    for name, text, value in counters:
        yield metric_families.counter(f"tier_{name}", text, ["tier"], {tier.name: value(tier) for tier in tiers})
    yield from _tier_share_metrics(tiers)
    for unit, text in (
        ("blocks", "Shards copied between the pool and the tier."),
        ("bytes", "Bytes copied between the pool and the tier."),
        ("seconds", "Time spent in calls to the tier; several may run at the same time."),
    ):
        copied = {(tier.name, way): tier.counts.copied[way, unit] for tier in tiers for way in ("read", "write")}
        yield metric_families.counter(f"tier_copied_{unit}", text, ["tier", "direction"], copied)
