"""docs/getting-started.md: its commands run as they stand, beside a clone of the repository.

Only what two runs on one machine cannot share is replaced: the ports, the socket, and 1 GiB by the 8 MiB that the page
offers for an ordinary user.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.harness import eventually
from tests.packages.support import git
from tests.page.browser import BROWSER, DRIVER, Browser
from tests.terminals import Terminals, blocks_of

pytestmark = pytest.mark.timeout(900)  # the first test installs, also where the machine has others to serve
ROOT = Path(__file__).parents[2]
BLOCKS = blocks_of("getting-started.md")


@pytest.fixture(scope="module")
def terminals(tmp_path_factory: pytest.TempPathFactory, source: Path) -> Iterator[Terminals]:
    """The daemon of the page is ready, and the repository lies beside it."""
    directory = tmp_path_factory.mktemp("beside")
    git(directory, "clone", "--quiet", f"file://{source}", "checkout")
    with tempfile.TemporaryDirectory(prefix="kvs-") as sockets:  # short: the path of a socket is
        terminals = Terminals(
            directory, Path(sockets), ("9464", "9090", "3000"), {"1GiB": "8MiB", "--seconds 60": "--seconds 1"}
        )
        try:
            (install,) = BLOCKS["Install"]
            serve, look = BLOCKS["Run"]
            terminals.run(install)
            terminals.start(serve)
            eventually(lambda: terminals.answers("9464", "/ready"), terminals.logs)
            said = terminals.run(look)
            assert '"ready": true' in said
            assert "kvsidecar_ready 1" in said
            assert "kvsidecar ready" in said
            (engine,) = BLOCKS["Store and load"]
            said = terminals.run(engine)
            assert "3 blocks can be loaded" in said
            assert re.search(r"\b3 blocks, ", said), "the status after the engine has exited"
            yield terminals
        finally:
            terminals.close()


def needs(*programs: str | None) -> pytest.MarkDecorator:
    """Debian and Ubuntu: apt install chromium chromium-driver jq prometheus."""
    missing = [str(each) for each in programs if each is None or shutil.which(each) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def test_every_block_of_the_page_is_run_here() -> None:
    assert {section: len(blocks) for section, blocks in BLOCKS.items() if blocks} == {
        "Install": 1,
        "Run": 2,
        "Store and load": 1,
        "Watch it": 2,
        "Prometheus": 2,
        "Grafana": 2,
        "A complete scenario": 1,
    }
    _, compose = BLOCKS["Grafana"]
    assert compose.split() == ["docker", "compose", "--file", "checkout/examples/compose.yaml", "up"], (
        "tests/examples looks at what that file says"
    )


def test_there_is_something_to_see(terminals: Terminals) -> None:
    load, look = BLOCKS["Watch it"]
    assert "blocks were hits" in terminals.run(load)
    top, _ = look.splitlines()
    assert "Hits" in terminals.run(f"{top} --once")


@needs(BROWSER, DRIVER)
def test_the_page_opens_in_a_browser(terminals: Terminals) -> None:
    _, open_page = BLOCKS["Watch it"][1].splitlines()
    assert open_page == "xdg-open http://localhost:9464"
    browser = Browser()
    try:
        browser.open(terminals.url("9464"))
        browser.until("#state", "ready")
    finally:
        browser.close()


def test_the_scenario_runs(terminals: Terminals) -> None:
    (demo,) = BLOCKS["A complete scenario"]
    terminals.run(demo)


# -- Prometheus and Grafana -------------------------------------------------------------------------------------------

DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "kvsidecar.json").read_text())
VARIABLES = {"$job": ".*", "$instance": ".*", "$link": "55e9", "$__rate_interval": "20s", "$__range": "5m"}


def queries() -> Iterator[str]:
    """Of every panel, with what Grafana fills in by default."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"]
            for name, value in VARIABLES.items():
                query = query.replace(name, value).replace(f"${{{name[1:]}}}", value)
            assert "$" not in query, query
            yield query


@needs("prometheus", "promtool")
def test_a_real_prometheus_scrapes_the_daemon_and_answers_the_dashboard(terminals: Terminals) -> None:
    prometheus, ask = BLOCKS["Prometheus"]
    terminals.start(prometheus)
    eventually(lambda: terminals.answers("9090", "/api/v1/query?query=kvsidecar_ready"), terminals.logs, pause=0.2)
    eventually(lambda: json.loads(terminals.run(ask))["data"]["result"], terminals.logs, pause=0.2)
    (ready,) = json.loads(terminals.run(ask))["data"]["result"]
    assert ready["value"][1] == "1"
    flags = terminals.answers("9090", "/api/v1/status/flags")["data"]
    assert flags["storage.tsdb.path"] == "prometheus-data", "Debian's default belongs to another user"
    (group, *_) = terminals.answers("9090", "/api/v1/rules")["data"]["groups"]
    assert group["rules"]
    wanted = list(queries())
    assert len(wanted) > 20
    for query in wanted:
        said = terminals.answers("9090", "/api/v1/query?" + urllib.parse.urlencode({"query": query}))
        assert said is not None, f"Prometheus refuses {query}"
        assert said["status"] == "success"


class Grafana(BaseHTTPRequestHandler):
    """Its API for dashboards: takes what its own model of dashboards reads."""

    got: ClassVar[list[Any]] = []

    def do_POST(self) -> None:
        dashboard = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fits = self.path == "/api/dashboards/db" and self.headers["Authorization"].startswith("Basic ")
        self.got.append(dashboard.Dashboard.from_json(body["dashboard"]) if fits else None)
        self.send_response(200 if fits else 404)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@needs("jq", "curl")
def test_the_dashboard_is_imported_by_a_command(terminals: Terminals) -> None:
    pytest.importorskip("grafana_foundation_sdk", reason="the group dev is not installed")
    import_dashboard, _ = BLOCKS["Grafana"]
    with ThreadingHTTPServer(("127.0.0.1", terminals.ports["3000"]), Grafana) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            terminals.run(import_dashboard)
        finally:
            server.shutdown()
            thread.join()
    (read,) = Grafana.got
    assert (read.title, len(read.panels)) == (DASHBOARD["title"], len(DASHBOARD["panels"]))
