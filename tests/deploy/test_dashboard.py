"""The dashboard is one that Grafana's own model of dashboards reads."""

from __future__ import annotations

import json

import pytest

from tests.deploy.support import DEPLOY

dashboard = pytest.importorskip("grafana_foundation_sdk.models.dashboard", reason="the group dev is not installed")
plugins = pytest.importorskip("grafana_foundation_sdk.cog.plugins")


def test_grafana_reads_the_dashboard_and_every_panel_of_it() -> None:
    plugins.register_default_plugins()
    written = json.loads((DEPLOY / "grafana" / "kvsidecar.json").read_text())
    read = dashboard.Dashboard.from_json(written)
    assert (read.title, read.uid, len(read.panels)) == (written["title"], written["uid"], len(written["panels"]))
    for panel, wanted in zip(read.panels, written["panels"], strict=True):
        queries = [target.expr for target in getattr(panel, "targets", None) or ()]
        assert queries == [target["expr"] for target in wanted.get("targets", ())], wanted["title"]
