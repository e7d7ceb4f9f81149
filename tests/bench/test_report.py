"""A report as tables."""

from __future__ import annotations

import io

from rich.console import Console

from kvsidecar.bench import tables
from kvsidecar.bench.report import BenchReport, Measurement
from tests.bench import support


def shown(report: BenchReport, width: int = tables.WIDTH) -> str:
    console = Console(file=io.StringIO(), width=width)
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
    assert first.split() == ["contiguous", "1", "53.4", "97%", "-", "53.4", "97%", "53.4", "97%"]


def test_every_table_fits_a_hundred_columns_unfolded() -> None:
    report = support.whole_report()
    assert set(tables.TABLES) == {name for name, each in report.measurements.items() if each.rows}
    wide = [line.rstrip() for line in shown(report, 1000).splitlines()]
    assert wide == [line.rstrip() for line in shown(report, 100).splitlines()]
    assert max(map(len, wide)) <= 100
