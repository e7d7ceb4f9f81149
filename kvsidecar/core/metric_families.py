"""Makes the families of metrics that are read at a scrape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from prometheus_client import disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

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
    """Args: name: without the prefix ``kvsidecar_`` and the suffix ``_total``."""
    family = CounterMetricFamily(f"kvsidecar_{name}", text, labels=labels)
    _fill(family, values)
    return family


def _fill(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[L, float]) -> None:
    for label, value in values.items():
        family.add_metric([label] if isinstance(label, str) else label, value)


def lost_log_lines(name: str) -> CounterMetricFamily:
    return counter(name, "Log lines that standard error did not accept.", ["reason"], log.lost())
