"""A report as tables."""

from __future__ import annotations

import io

from rich.console import Console

from kvsidecar.bench import tables
from kvsidecar.bench.report import Measurement, Report
from tests.bench import support


def shown(report: Report) -> str:
    console = Console(file=io.StringIO(), width=tables.WIDTH)
    tables.print_report(report, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_failures_and_notes_are_shown_with_their_reasons() -> None:
    report = support.report()
    report.measurements["pin"] = Measurement("pin", "failed", "the daemon cannot pin [64 GiB]")
    report.measurements["jobs"] = Measurement("jobs", "skipped", "needs a daemon", notes=["and [patience]"])
    text = shown(report)
    assert "pin: failed: the daemon cannot pin [64 GiB]" in text
    assert "jobs: skipped: needs a daemon" in text
    assert "and [patience]" in text


def test_a_cell_that_was_not_measured_is_a_dash_and_the_others_stay_in_their_columns() -> None:
    report = support.report()
    rows = report.measurements["bandwidth"].rows
    report.measurements["bandwidth"].rows = [row for row in rows if row["blocks"] != 8]
    first = next(line for line in shown(report).splitlines() if line.startswith("contiguous"))
    assert first.split() == ["contiguous", "1", "x", "2", "MiB", "1", "53.4", "97%", "-", "53.4", "97%", "53.4", "97%"]
