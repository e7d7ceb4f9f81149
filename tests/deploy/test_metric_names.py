"""Dashboard, alerts and runbook speak of what a running daemon exports: a wrong name in any of them fails here."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvsidecar.integrations import offload_condition
from kvsidecar.integrations.vllm import counters as vllm
from tests.deploy.support import ADDED_LABELS, DEPLOY, ROOT, Exported, alerts, exported, problems
from tests.harness import DaemonProcess, Rank, eventually

DASHBOARD = DEPLOY / "grafana" / "kvsidecar.json"

NUMBERS = {"$link": "55e9", "$prefill": "8000", "$price": "2.5"}
"""Variables of the dashboard for which a user gives a number."""

NOT_ON_A_PANEL = {
    "kvsidecar_ready": "the state says it",
    "kvsidecar_copy_size_bytes": "for a question that a panel raises",
    "kvsidecar_evicted_blocks": "its bytes are on a panel",
    "kvsidecar_expired_blocks": "for a question that a panel raises",
    "kvsidecar_spaces_not_kept": "of a restart: it says why the next one will lose blocks",
    "kvsidecar_spaces_cleared": "of a user who leaves very many namespaces, whom the log names",
    "kvsidecar_pin_register_seconds": "for a question that a panel raises",
    "kvsidecar_warm_start_blocks": "of a start, which its log line and status say",
    "kvsidecar_warm_start_seconds": "of a start, which its log line says",
    "kvsidecar_serves_kept_blocks": "of the seconds before a warm start is ready, which the log says",
    "kvsidecar_unexpected_errors": "the log has each, and nothing is to be watched for",
    "kvsidecar_log_lines_lost": "the log says it, when it can",
    "kvsidecar_malformed_traceparents": "an engine's mistake, and of tracing alone",
    "kvsidecar_pool_unzeroed_bytes": "for a question: is all zeroed that was cleared",
    "kvsidecar_zeroed_bytes": "for a question that a panel raises",
    "kvsidecar_tier_blocks": "the bytes are on a panel",
    "kvsidecar_tier_evicted_blocks": "for a question that a panel raises",
    "kvsidecar_tier_quota_blocks": "for a question that a panel raises",
    "kvsidecar_tier_copied_blocks": "the bytes are on a panel",
    "kvsidecar_tier_copied_seconds": "for a question that a panel raises",
    "kvsidecar_tier_reading_bytes": "for a question that a panel raises",
    "kvsidecar_tier_writing_bytes": "the queue that is full is on a panel",
    "kvsidecar_tier_write_budget_bytes": "status says it, and what it refuses is on a panel",
    "kvsidecar_watchers": "of engines with KV events alone",
    "kvsidecar_residency_messages": "of engines with KV events alone",
    "kvsidecar_residency_blocks": "of engines with KV events alone",
    "kvsidecar_residency_resets": "of engines with KV events alone; operating.md says when to look at it",
    "kvsidecar_residency_notes_bytes": "of engines with KV events alone",
    "kvsidecar_residency_dropped_notes": "of engines with KV events alone",
    "kvsidecar_share_pinned_bytes": "status says it",
    "kvsidecar_share_borrowed_bytes": "used and guaranteed bytes are on a panel",
    "kvsidecar_device_copies": "the bytes are on a panel",
    "kvsidecar_model_lookup_blocks": "what lookups find is no hit rate; of all models it is on a panel",
    "kvsidecar_model_copies": "the bytes are on a panel",
    "kvsidecar_model_copied_bytes": "of models, bytes in the pool and hits are on panels",
    "kvsidecar_spans": "of the tracing, which is off by default",
}

ENGINES = {"vllm": vllm.GAUGES, "sglang": offload_condition.GAUGES}
"""What the integrations export with the engines' own metrics."""


@pytest.fixture(scope="module")
def known() -> Exported:
    with tempfile.TemporaryDirectory(prefix="kvs-") as directory:
        disk = ("--disk-dir", f"{directory}/disk", "--disk-size", "1MiB", "--disk-writes-per-day", "1MiB")
        config = Path(directory, "shares.toml")
        config.write_text(
            '[[share]]\nname = "a"\nnamespaces = ["*"]\nguaranteed = "256KiB"\nmax = "512KiB"\n'
            'disk_guaranteed = "512KiB"\n'
        )
        with DaemonProcess(Path(directory), "--config", str(config), *disk) as daemon:
            eventually(lambda: "kvsidecar_tier_share_used_bytes{" in daemon.get("/metrics")[1])
            return exported(scrape(daemon))


def scrape(daemon: DaemonProcess) -> str:
    rank = Rank(daemon.wait_ready())  # some series are there only while an engine is attached
    text: str = daemon.get("/metrics")[1]
    rank.close()
    return text


@cache
def dashboard() -> dict[str, Any]:
    read: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return read


def panel_expressions() -> Iterator[tuple[str, str]]:
    """(title, PromQL) of every query, with Grafana's variables replaced as Grafana does."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            text = target["expr"].replace("$__rate_interval", "5m")
            for name, value in NUMBERS.items():
                text = text.replace(name, value)
            yield panel["title"], re.sub(r'=~"\$\w+"', '=~".*"', text)


def test_every_query_of_the_dashboard_asks_for_what_is_exported(known: Exported) -> None:
    expressions = list(panel_expressions())
    assert len(expressions) > 20
    assert [(title, found) for title, text in expressions if (found := problems(text, known))] == []


def test_the_variables_of_the_dashboard_are_defined_and_ask_for_what_is_exported(known: Exported) -> None:
    variables = {each["name"]: each for each in dashboard()["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard()["panels"]))) - {"__rate_interval", "__all"}
    assert used <= set(variables)
    queries = [each["query"]["query"] for each in variables.values() if each["type"] == "query"]
    assert queries
    for query in queries:
        metric = re.fullmatch(r"label_values\((\w+)(?:\{.*\})?, (instance|job)\)", query)
        assert metric, query
        assert metric[1] in known


def test_every_metric_is_on_the_dashboard_or_left_out_for_a_reason(known: Exported) -> None:
    def family(name: str) -> str:
        return re.sub(r"_(total|bucket|sum|count|created)$", "", name)

    shown = {family(name) for _, text in panel_expressions() for name in re.findall(r"kvsidecar_\w+", text)}
    own = {family(name) for name in known if name.startswith("kvsidecar_")}
    assert own - shown == set(NOT_ON_A_PANEL)


def test_every_alert_asks_for_what_is_exported(known: Exported) -> None:
    engines = {f"{engine}:kvsidecar_{name}": dict[str, set[str]]() for engine in ENGINES for name in ENGINES[engine]}
    assert alerts()
    found = [(rule["alert"], found) for rule in alerts() if (found := problems(rule["expr"], {**known, **engines}))]
    assert found == []


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_the_texts_of_an_alert_name_labels_that_its_series_have(known: Exported, rule: dict[str, Any]) -> None:
    """Prometheus writes nothing in the place of one that there is not."""
    named = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
    exports = [known.get(metric, {}) for metric in re.findall(r"\bkvsidecar_\w+", rule["expr"])]
    assert named <= ADDED_LABELS.union(*exports)
    for how, labels in re.findall(r"\b(by|without) \(([^)]*)\)", rule["expr"]):
        of_those = named & set(re.findall(r"\w+", labels))
        assert of_those == (named if how == "by" else set()), "the sum does not have it any more"


def test_every_recording_rule_asks_for_what_is_exported(known: Exported) -> None:
    (group,) = yaml.safe_load((DEPLOY / "prometheus" / "savings.yaml").read_text())["groups"]
    recorded = {rule["record"]: dict[str, set[str]]() for rule in group["rules"]}
    for rule in group["rules"]:
        assert problems(rule["expr"], {**known, **recorded}) == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_every_query_that_a_page_shows_asks_for_what_is_exported(known: Exported, page: Path) -> None:
    queries = re.findall(r"^```promql\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert [(query, found) for query in queries if (found := problems(query, known))] == []


@pytest.mark.parametrize("page", ["docs/runbook.md", "deploy/kubernetes/README.md"])
def test_every_metric_that_a_page_names_is_exported(known: Exported, page: str) -> None:
    named = set(re.findall(r"(?<!:)\bkvsidecar_[a-z_]+", (ROOT / page).read_text()))
    assert named - set(known) == set()


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    taken: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(ids) == len(set(ids))
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("kvsidecar_pool_byte", "kvsidecar_pool_byte is not exported"),
        ("rate(kvsidecar_refusals[5m])", "kvsidecar_refusals is not exported"),
        ('kvsidecar_refusals_total{raeson="pool_full"}', "kvsidecar_refusals_total has no label raeson"),
        ('kvsidecar_refusals_total{reason=~"pool_full|poolfull"}', "kvsidecar_refusals_total has no reason='poolfull'"),
        ("sum by (directoin) (kvsidecar_jobs_queued)", "no metric of it has the label directoin"),
        ("kvsidecar_ready == on (host) kvsidecar_leases", "no metric of it has the label host"),
    ],
)
def test_a_wrong_name_is_found(known: Exported, expression: str, problem: str) -> None:
    assert problems(expression, known) == [problem]


def test_what_is_no_promql_is_found(known: Exported) -> None:
    with pytest.raises(ValueError, match="parenthesis"):
        problems("sum(kvsidecar_ready", known)
