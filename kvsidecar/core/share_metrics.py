"""The metrics of shares: few labels, however many there are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvsidecar.cache.shares import Share
from kvsidecar.core.shares import REST

SHARES_SHOWN = 32
"""Shares with a label of their own in the metrics: those with the most bytes."""


def share_metrics(shares: Sequence[Share]) -> Iterable[Metric]:
    """Nothing without shares. Only the largest have a label of their own."""
    if len(shares) < 2:
        return
    ordered = sorted(shares, key=lambda share: -share.used)
    labels = [(share.name, [share]) for share in ordered[:SHARES_SHOWN]]
    if rest := ordered[SHARES_SHOWN:]:
        labels.append((REST, rest))
    values: tuple[tuple[str, str, Callable[[Share], float]], ...] = (
        (
            "used_bytes",
            "Bytes of the pool that the share uses.",
            lambda share: share.used,
        ),
        ("pinned_bytes", "Used bytes that cannot be evicted now.", lambda share: share.busy),
        ("guaranteed_bytes", "Bytes that no other share can take.", lambda share: share.guaranteed),
        ("borrowed_bytes", "Used bytes beyond the guarantee.", lambda share: max(0, share.used - share.guaranteed)),
    )
    for name, text, value in values:
        family = GaugeMetricFamily(f"kvsidecar_share_{name}", text, labels=["share"])
        for label, members in labels:
            family.add_metric([label], sum(map(value, members)))
        yield family
    most = GaugeMetricFamily(
        "kvsidecar_share_max_bytes",
        "The most bytes that the share may have. Absent for the whole pool.",
        labels=["share"],
    )
    for share in ordered[:SHARES_SHOWN]:
        if share.most is not None:
            most.add_metric([share.name], share.most)
    yield most
    evicted = CounterMetricFamily(
        "kvsidecar_share_evicted_bytes", "Bytes of the share's blocks that were evicted.", labels=["share"]
    )
    for label, members in labels:
        evicted.add_metric([label], sum([share.evicted for share in members]))
    yield evicted
