"""The doctor's findings as text and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvsidecar.cli.doctor.findings import Finding, Verdict
from kvsidecar.cli.status_view import printable
from kvsidecar.support.units import count

_STYLES = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.PROBLEM: "bold red", Verdict.NOT_CHECKED: "dim"}


def render(findings: Sequence[Finding]) -> RenderableType:
    """One line per finding with its fix below, then the counts."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        style = _STYLES[finding.verdict]
        text = printable(finding.text)
        if finding.verdict is Verdict.NOT_CHECKED:
            text.stylize("dim")
        table.add_row(Text(finding.verdict.value, style=style), Text(finding.check), text)
        if finding.fix:
            table.add_row("", "", Text.assemble(("fix: ", "bold"), printable(finding.fix)))
    return Group(table, Text(f"\n{summary(findings)}", style="bold"))


def summary(findings: Sequence[Finding]) -> str:
    """``2 problems, 1 warning, 9 ok, 3 not checked``"""
    counts = Counter(finding.verdict for finding in findings)
    parts = [
        count(counts[verdict], noun) if counts[verdict] else f"no {noun}s"
        for verdict, noun in ((Verdict.PROBLEM, "problem"), (Verdict.WARNING, "warning"))
    ]
    return ", ".join([*parts, f"{counts[Verdict.OK]} ok", f"{counts[Verdict.NOT_CHECKED]} not checked"])


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """``{"problems": 0, "findings": [{"check", "verdict", "text", "fix"}]}``"""
    problems = sum(finding.verdict is Verdict.PROBLEM for finding in findings)
    return {"problems": problems, "findings": [asdict(finding) for finding in findings]}
