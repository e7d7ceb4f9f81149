"""What the files of deploy/ say, and what a running daemon exports."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import promql_parser as promql
import yaml
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"

OF_PROMETHEUS = {"up": frozenset[str]()}
"""Series that Prometheus makes itself for what it scrapes."""
ADDED_LABELS = frozenset({"instance", "job", "namespace", "pod", "container", "node"})
"""Labels that Prometheus and the PodMonitor add to every series."""
OPEN_LABELS = frozenset({"device", "version", "backend", "le"})
"""Labels whose values depend on the machine. Those of the others are fixed, and all exported from the start."""

Exported = Mapping[str, Mapping[str, set[str]]]
"""Metric name as PromQL names it -> label -> values."""


def exported(scrape: str) -> Exported:
    """What a scrape of /metrics has. A family without samples counts with no labels."""
    found: dict[str, dict[str, set[str]]] = {}
    for family in text_string_to_metric_families(scrape):
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for name, value in sample.labels.items():
                labels.setdefault(name, set()).add(value)
    return found


def problems(expression: str, known: Exported) -> list[str]:
    """Names, labels and label values in a PromQL expression that no daemon exports.

    Raises:
        ValueError: it is not PromQL.
    """
    found: list[str] = []
    names: set[str] = set()
    used_labels: set[str] = set()

    def visit(node: promql.Expr) -> bool:
        if isinstance(node, promql.VectorSelector):
            names.add(node.name or "")
            found.extend(_selector_problems(node, known))
        elif isinstance(node, promql.AggregateExpr) and node.modifier is not None:
            used_labels.update(node.modifier.labels)
        elif isinstance(node, promql.BinaryExpr) and node.modifier is not None:
            matching = node.modifier.matching
            used_labels.update(matching.labels if matching is not None else ())
        return True

    promql.walk(promql.parse(expression), pre_visit=visit)
    labels = ADDED_LABELS.union(*(known.get(name, {}) for name in names))
    return found + [f"no metric of it has the label {label}" for label in sorted(used_labels - labels)]


def _selector_problems(selector: promql.VectorSelector, known: Exported) -> Iterator[str]:
    name = selector.name or ""
    if name in OF_PROMETHEUS:
        labels: Mapping[str, Iterable[str]] = {}
    elif name in known:
        labels = known[name]
    else:
        yield f"{name} is not exported"
        return
    for matcher in selector.matchers.matchers:
        if matcher.name in ADDED_LABELS:
            continue
        if matcher.name not in labels:
            yield f"{name} has no label {matcher.name}"
        elif matcher.name not in OPEN_LABELS:
            for value in matcher.value.split("|"):
                if not any(re.fullmatch(value, each) for each in labels[matcher.name]):
                    yield f"{name} has no {matcher.name}={value!r}"


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]
