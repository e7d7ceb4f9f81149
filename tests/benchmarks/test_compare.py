"""`benchmarks.compare`: shares of one version's figures in another's."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import compare


def run_of(path: Path, *, gbps: dict[str, float]) -> str:
    rows = [
        {"layout": layout, "direction": "store", "mode": "paced", "blocks": 8, "in_flight": 1, "gbps": value}
        for layout, value in gbps.items()
    ]
    path.write_text(json.dumps({"measurements": {"bandwidth": {"rows": rows}}}))
    return str(path)


def test_shares_are_over_the_layouts_that_both_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [
        "--old", run_of(tmp_path / "1", gbps={"mla": 10.0, "tp8": 20.0}),
        "--old", run_of(tmp_path / "2", gbps={"mla": 30.0, "tp8": 20.0, "gone": 5.0}),
        "--new", run_of(tmp_path / "3", gbps={"mla": 10.0, "tp8": 40.0, "added": 7.0}),
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["compare", *files])
    compare.main()
    *_, line = capsys.readouterr().out.splitlines()
    # New over the old mean: 10/20 and 40/20; the second old run over the first: 30/10 and 20/20.
    assert line.split() == ["store", "paced", "8", "1", "1.000", "1.732", "-", "-"]
