"""The metrics of shares: few labels, however many there are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from prometheus_client.core import Metric

from kvsidecar.cache.shares import Share
from kvsidecar.core import metric_families
from kvsidecar.core.shares import REST
from kvsidecar.tiers.backend import ShareUse

S = TypeVar("S", Share, ShareUse)

SHARES_SHOWN = 32
"""Shares with a label of their own in the metrics: those with the most bytes."""


def share_metrics(shares: Sequence[Share]) -> Iterable[Metric]:
    """Nothing without shares. Only the largest have a label of their own."""
    if len(shares) < 2:
        return
    ordered = sorted(shares, key=lambda share: -share.used)
    labelled = by_label(ordered)
    values: tuple[tuple[str, str, Callable[[Share], float]], ...] = (
        ("used_bytes", "Bytes of the pool that the share uses.", lambda share: share.used),
        ("pinned_bytes", "Used bytes that cannot be evicted now.", lambda share: share.busy),
        ("guaranteed_bytes", "Bytes that no other share can take.", lambda share: share.guaranteed),
        ("borrowed_bytes", "Used bytes beyond the guarantee.", lambda share: max(0, share.used - share.guaranteed)),
    )
    for name, text, value in values:
        sums = {label: sum(map(value, members)) for label, members in labelled.items()}
        yield metric_families.gauge(f"share_{name}", text, ["share"], sums)
    most = {share.name: share.most for share in ordered[:SHARES_SHOWN] if share.most is not None}
    text = "Maximum bytes that the share may use. Absent if it may use the whole pool."
    yield metric_families.gauge("share_max_bytes", text, ["share"], most)
    evicted = {label: sum([share.evicted for share in members]) for label, members in labelled.items()}
    text = "Bytes of the share's blocks that were evicted."
    yield metric_families.counter("share_evicted_bytes", text, ["share"], evicted)


def by_label(ordered: Sequence[S]) -> dict[str, Sequence[S]]:
    """The shares whose sum each label shows."""
    labelled: dict[str, Sequence[S]] = {share.name: [share] for share in ordered[:SHARES_SHOWN]}
    if rest := ordered[SHARES_SHOWN:]:
        labelled[REST] = rest
    return labelled
