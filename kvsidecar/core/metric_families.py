"""Makes the families of metrics that are read at a scrape."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

from prometheus_client import disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from kvsidecar.support import log

# The series that say when another one began: a line for each that anybody asks for. This process is a daemon's or a
# publisher's, so nobody else misses them.
disable_created_metrics()  # type: ignore[no-untyped-call]

L = TypeVar("L", bound=Sequence[str])
"""The value of the label, or the values of the labels."""


def gauge(name: str, text: str, labels: Sequence[str], values: Mapping[L, float]) -> GaugeMetricFamily:
    """Args: name: without the prefix ``kvsidecar_``."""
    family = GaugeMetricFamily(f"kvsidecar_{name}", text, labels=labels)
    _fill(family, values)
    return family


def counter(name: str, text: str, labels: Sequence[str], values: Mapping[L, float]) -> CounterMetricFamily:
    """As `gauge`; without the suffix ``_total``."""
    family = CounterMetricFamily(f"kvsidecar_{name}", text, labels=labels)
    _fill(family, values)
    return family


def _fill(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[L, float]) -> None:
    for label, value in values.items():
        family.add_metric([label] if isinstance(label, str) else label, value)


class Durations:
    """A histogram of seconds, for every request: it takes a fraction of the time of prometheus_client's, which locks.

    Args:
        bounds: of the buckets, in seconds.
    """

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Of the exposition: how many were at most as long."""
        return list(zip([*map(str, self._bounds), "+Inf"], accumulate(self._counts), strict=True))

    @property
    def sum(self) -> float:
        return self._sum


def histogram(
    name: str, text: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], Durations]]
) -> HistogramMetricFamily:
    """As `gauge`."""
    family = HistogramMetricFamily(f"kvsidecar_{name}", text, labels=labels)
    for label, durations in values:
        family.add_metric(label, durations.buckets(), durations.sum)
    return family


def lost_log_lines(name: str) -> CounterMetricFamily:
    return counter(name, "Log lines that standard error did not accept.", ["reason"], log.lost())
