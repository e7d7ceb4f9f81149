"""`python -m benchmarks.daemon` on the host device, and the targets in its tables."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.daemon import __main__ as daemon
from benchmarks.daemon import pacing, show, tables, targets
from kvsidecar.bench.options import Options
from kvsidecar.bench.run import run
from tests.bench import support

pytestmark = pytest.mark.timeout(300)


def test_every_measurement_has_run_or_says_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pacing, "CHUNKS", ("off", "1 MiB"))
    file = tmp_path / "more.json"
    assert run(Options(device="host", quick=True, json=str(file)), daemon.MEASURE, tables.TABLES) == 0
    measured = json.loads(file.read_text())["measurements"]
    statuses = {name: (each["status"], each["reason"]) for name, each in measured.items()}
    assert statuses == {"footprint": ("ok", ""), "pacing": ("ok", ""), "interference": ("skipped", "needs a GPU")}
    (row,) = measured["footprint"]["rows"]
    assert row["gpu_bytes"] is None
    assert row["host_bytes"] > 0
    assert row["blocks"] > 1000
    curve = {row["chunk"]: row["store_gbps"] for row in measured["pacing"]["rows"]}
    assert list(curve) == ["", "off", "1 MiB"]
    assert curve[""] == 0 < min(curve["off"], curve["1 MiB"])
    said = capsys.readouterr().out
    for words in ("The daemon itself", "The same by --store-chunk", "interference: skipped: needs a GPU"):
        assert words in said
    # Beside a run of `kvsidecar bench`, whose tables and targets are shown with these.
    own = tmp_path / "run.json"
    own.write_text(support.report().to_json())
    monkeypatch.setattr(sys, "argv", ["show", str(own), str(file), "--targets"])
    show.main()
    said = " ".join(capsys.readouterr().out.split())
    assert "Bulk limit" in said
    assert "The daemon itself" in said
    for target in targets.TARGETS:
        assert target.goal.split()[1] in said


def test_a_name_that_no_measurement_has_is_one_sentence() -> None:
    command = [sys.executable, "-m", "benchmarks.daemon", "--device", "host", "--only", "pacing-curve"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert refused.stderr == "benchmarks.daemon: --only='pacing-curve' is not a measurement: did you mean pacing?\n"
