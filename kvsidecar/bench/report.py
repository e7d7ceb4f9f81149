"""The result of a run as data: what ``--json`` writes and the tables show.

``benchmarks/README.md`` documents the form.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA = 1
"""Incremented whenever a reader of the older form would be wrong."""

Row = dict[str, Any]
SYSTEM = "kvsidecar"


@dataclass(slots=True)
class Measurement:
    """One measurement: the rows that it completed, and its outcome."""

    name: str
    status: str = "running"
    """``ok``, ``failed``, ``skipped`` or ``interrupted``."""
    reason: str = ""
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Notes for readers of the table: what was left out, and why."""

    def add(self, **row: Any) -> None:
        self.rows.append(row)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


@dataclass(slots=True)
class BenchReport:
    """The result of a whole run."""

    version: str
    date: str
    """ISO 8601, UTC."""
    device: str
    machine: dict[str, Any]
    options: dict[str, Any]
    measurements: dict[str, Measurement] = field(default_factory=dict)

    def rows(self, name: str, **match: Any) -> Iterator[Row]:
        """The rows of a measurement with these values."""
        measurement = self.measurements.get(name)
        for row in measurement.rows if measurement else ():
            if all(row.get(key) == value for key, value in match.items()):
                yield row

    def find(self, name: str, **match: Any) -> Row | None:
        return next(self.rows(name, **match), None)

    def limit(self, direction: str) -> float | None:
        """GB/s of the bulk limit: ``store``, ``load`` or ``both``."""
        row = self.find("limit", direction=direction)
        return None if row is None else float(row["gbps"])

    @property
    def title(self) -> str:
        """Machine, version and day, for the head of a table or a plot."""
        where = self.machine.get("gpu") or f"host device, {self.machine.get('cpu') or 'unknown CPU'}"
        pcie = self.machine.get("pcie")
        return f"{where}{f' ({pcie})' if pcie else ''}, kvsidecar {self.version}, {self.date[:10]}"

    def to_json(self) -> str:
        return json.dumps({"schema": SCHEMA, "system": SYSTEM, **asdict(self)}, indent=1, allow_nan=False)
