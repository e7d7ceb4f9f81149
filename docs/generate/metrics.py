"""docs/metrics.md, from the registry of `kvsidecar.core.metrics.Metrics` and the reasons of
`kvsidecar.errors.Refusal`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from prometheus_client import Metric

from docs.generate.markdown import attribute_docs, code, prose, table
from kvsidecar import errors
from kvsidecar.cache.shares import Share
from kvsidecar.cache.stats import CacheStats
from kvsidecar.core.metrics import Gauges, Metrics
from kvsidecar.core.tier_metrics import TierGauges
from kvsidecar.errors import Refusal
from kvsidecar.publisher import metrics as publisher
from kvsidecar.support.units import format_duration, format_size
from kvsidecar.tiers.backend import BackendStats, ShareUse
from kvsidecar.tiers.policy import FetchRefusal, WriteRefusal
from kvsidecar.tiers.tier import TierCounts
from kvsidecar.types import Readiness, State

HEAD = """\
<!-- Made by `make docs` from kvsidecar/{core,publisher}/metrics.py and kvsidecar/errors.py: change those. -->
# Metrics

`GET /metrics` on the HTTP port returns the metrics in the Prometheus text format. Names follow the Prometheus
conventions: base units, and `_total` on counters. A histogram `NAME` is exported as `NAME_bucket`, `NAME_sum` and
`NAME_count`. Every series whose labels are known in advance exists from the start, at 0, so that an alert on its first
event works. A single scraper gets the figures at the time of its request. If several scrape at the same time, they
share one reading per second, so a figure may be up to 1 s old.

[The dashboard](../deploy/grafana/kvsidecar.json) and [the alerts](../deploy/prometheus/alerts.yaml) use these names,
and `make check` verifies them against a running daemon. [runbook.md](runbook.md) says what to do about each alert. The
recording rules of [savings.yaml](../deploy/prometheus/savings.yaml) say [what is saved](operating.md#what-it-saves).
"""

OPEN = {
    "version": "version of kvsidecar",
    "backend": "`cuda` or `host`",
    "device": "a GPU's UUID, or `host`",
    "model": "the model of a namespace, cut at 128 characters; `other`: all but 32",
    "served_name": "the name that requests give the model, cut at 128 characters; until an engine says it, as `model`",
    "share": "a share's name; `unassigned`: all namespaces that no share covers; `other`: all but the 32 largest",
}
"""Labels whose values depend on the machine."""

GROUPS = {
    "State": (
        "build_info",
        "ready",
        "state",
        "pin_",
        "attached_ranks",
        "copier_deaths",
        "imported_gpu",
        "event_loop",
        "log_",
    ),
    "Pool and blocks": ("pool_", "blocks", "leases", "evicted_", "expired_"),
    "The hit rate": ("prompt_tokens_", "loaded_tokens", "lookup_blocks"),
    "Shares": ("share_",),
    "Models and devices": ("model_", "device_"),
    "Lookups, jobs and copies": ("lookup_", "job_", "jobs", "copied_", "copy_", "queue_", "oldest_"),
    "Slower tiers": ("tier_",),
    "Refusals": ("refusals",),
}
"""Title -> how the names of its metrics begin, after ``kvsidecar_``."""

HIT_RATE = """\
A hit is a prompt token that an engine did not have in its own cache, and has loaded instead of computing it. Engines
report what they needed and what they have loaded when they begin a request, so the hit rate that `kvsidecar status`,
`kvsidecar top`, the page, the dashboard and the alerts show is `kvsidecar_prompt_tokens_loaded_total` divided by
`kvsidecar_prompt_tokens_needed_total`. Without a report there is none: a client of your own makes it with
`report_prompts_nowait` ([client.md](client.md#look-up-and-load)). What lookups find is counted apart, and says what is
there, not what it was good for: vLLM asks for a prompt when it arrives, also for what the GPU has, and again while the
request waits.
"""

MODELS = """\
Namespaces are counted by their model. At most 32 models have labels of their own at a time: the first ones or, after a
restart, those with the most bytes. A model without activity for an hour makes room for another one. With a policy,
models are not named, because anyone who reaches the HTTP port would learn their names; shares are named.

The model of an engine's namespace is the name of its weights, such as `LlamaForCausalLM-6576b1cd210c`: it stays with
the blocks while names of models come and go. `kvsidecar_model_info` says under which name engines serve each of them
now, the latest engine's if there are several, and an engine says it when it attaches. Join it to have that name in
place of the weights' or beside it, as the dashboard does:

```promql
sum by (served_name) (
  kvsidecar_model_used_bytes * on (job, instance, model) group_left (served_name) kvsidecar_model_info
)
```

vLLM's own metrics have the same name in their label `model_name`.
"""

REASONS = """\
Refused requests and declined jobs are counted by reason in `kvsidecar_refusals_total`. A declined job carries the same
`reason` ([client.md](client.md#when-a-job-ends)). None of these is an error of the daemon: a declined store is a miss
later, and the engine computes the blocks of a declined load.
"""

PUBLISHER = """\
[`kvsidecar publish`](routers.md) serves these metrics, and those of its process, at the address of its option
`--metrics`. Refusals are also logged, each reason at most once a second.
"""

TEXTS = {"The hit rate": (HIT_RATE,), "Models and devices": (MODELS,)}
"""Title -> what is said above the table."""

PROCESS = """\
Metrics of the daemon's process, from the standard Prometheus process collector.
"""


def families() -> list[Metric]:
    """All families of a daemon with one engine on the host device, in the order of a scrape."""
    metrics = Metrics("host")
    metrics.copier_deaths.labels("host")
    cache = CacheStats(**dict.fromkeys(CacheStats.__annotations__, 0))
    gauges = Gauges(Readiness(State.READY, pool_bytes=0), cache, attached_ranks=0, imported_bytes={"host": 0})
    stats = BackendStats(0, 0, 0, 0, 0, {}, shares=[ShareUse("chat", 0, 0, None, 0, 0)])
    tiers = [
        TierGauges(name, "", stats if name == "disk" else None, TierCounts(), write_budget_bytes=0)
        for name in ("disk", "cluster", "shared")
    ]
    gauges = replace(gauges, tiers=tiers, shares=[Share("chat", most=0), Share()], used_by_model={})
    metrics.devices.of("host")
    for refused, reasons in (metrics.unfetched, FetchRefusal), (metrics.unwritten, WriteRefusal):
        for reason, tier in product(reasons, tiers):
            refused.labels(tier.name, reason.value)
    metrics.read_gauges_from(lambda: gauges)
    return list(metrics.registry.collect())


def publisher_families() -> list[Metric]:
    """Those of `kvsidecar publish`, without its process."""
    return [
        family for family in publisher.PublisherMetrics().registry.collect() if family.name.startswith("kvsidecar_")
    ]


def exported_name(family: Metric) -> str:
    """As Prometheus names it: the client library drops the suffix of counters."""
    return f"{family.name}_total" if family.type == "counter" else family.name


def page() -> str:
    own = [family for family in families() if family.name.startswith("kvsidecar_")]
    parts = [HEAD]
    for title, prefixes in GROUPS.items():
        members = [each for each in own if each.name.removeprefix("kvsidecar_").startswith(prefixes)]
        parts += [f"## {title}\n", *TEXTS.get(title, ()), _table(members) + "\n"]
        own = [each for each in own if each not in members]
    if own:  # nobody has found a place for these yet
        parts += ["## Other metrics\n", _table(own) + "\n"]
    parts += ["## Reasons of refusals\n", REASONS, _reasons() + "\n"]
    rest = [family for family in families() if not family.name.startswith("kvsidecar_")]
    parts += ["## The process\n", PROCESS, _table(rest) + "\n"]
    reasons = attribute_docs(publisher, "Reason")
    rows = [(code(reason.value), prose(reasons[reason.name])) for reason in publisher.Reason]
    parts += ["## The publisher\n", PUBLISHER, _table(publisher_families()) + "\n", table(("Reason", "When"), rows)]
    return "\n".join(parts) + "\n"


def _table(members: list[Metric]) -> str:
    rows = [
        (code(exported_name(family)), family.type, "<br>".join(_labels(family)) or "none", _text(family))
        for family in members
    ]
    return table(("Metric", "Type", "Labels", "What it is"), rows)


def _text(family: Metric) -> str:
    text = prose(family.documentation)
    bounds = [sample.labels["le"] for sample in family.samples if sample.name.endswith("_bucket")]
    if bounds:
        numbers = sorted({float(bound) for bound in bounds})[:-1]
        text += f" {len(numbers)} buckets, {_bound(family.name, numbers[0])} to {_bound(family.name, numbers[-1])}."
    return text


def _bound(name: str, bound: float) -> str:
    return format_size(int(bound)) if name.endswith("_bytes") else format_duration(bound)


def _labels(family: Metric) -> Iterator[str]:
    found: dict[str, list[str]] = {}
    for sample in family.samples:
        for name, value in sample.labels.items():
            if name != "le" and value not in found.setdefault(name, []):
                found[name].append(value)
    for name, values in found.items():
        if name in OPEN:
            yield f"`{name}`: {OPEN[name]}"
        elif family.name == "kvsidecar_refusals":
            yield f"`{name}`: [below](#reasons-of-refusals)"
        else:
            yield f"`{name}`: " + ", ".join(map(code, values))


def _reasons() -> str:
    texts = attribute_docs(errors, "Refusal")
    return table(("Reason", "When"), [(code(reason.value), prose(texts[reason.name])) for reason in Refusal])
