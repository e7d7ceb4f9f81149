"""The result of a run as data: what ``--json`` writes, ``--compare`` reads, and tables and plots show.

``benchmarks/README.md`` documents the form.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvsidecar.bench.errors import BadOption

SCHEMA = 1
"""Raised whenever a reader of the older form would be wrong."""

Row = dict[str, Any]
SYSTEM = "kvsidecar"


@dataclass(slots=True)
class Measurement:
    """One measurement: its rows as far as it came, and what became of it."""

    name: str
    status: str = "running"
    """``ok``, ``failed``, ``skipped`` or ``interrupted``."""
    reason: str = ""
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """For who reads the table: what was left out, and why."""

    def add(self, **row: Any) -> None:
        self.rows.append(row)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


@dataclass(slots=True)
class Report:
    """A whole run."""

    version: str
    date: str
    """ISO 8601, UTC."""
    device: str
    machine: dict[str, Any]
    options: dict[str, Any]
    measurements: dict[str, Measurement] = field(default_factory=dict)
    peers: list[Row] = field(default_factory=list)
    """Rows of other systems, from ``--compare``."""
    targets: list[Row] = field(default_factory=list)

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
        fields = {
            "schema": SCHEMA,
            "system": SYSTEM,
            "version": self.version,
            "date": self.date,
            "device": self.device,
            "machine": self.machine,
            "options": self.options,
            "measurements": {name: asdict(each) for name, each in self.measurements.items()},
            "peers": self.peers,
            "targets": self.targets,
        }
        return json.dumps(fields, indent=1, allow_nan=False)


# -- other systems -----------------------------------------------------------------------------------------------

_BANDWIDTH: dict[str, Any] = {
    "system": str,
    "layout": str,
    "blocks": int,
    "in_flight": int,
    "direction": str,
    "gbps": (int, float),
}
_LOOKUP: dict[str, Any] = {"system": str, "hashes": int, "p50_us": (int, float)}


def load_peers(file: Path) -> list[Row]:
    """Rows of another system, or of another run of this one, for ``--compare``.

    Either ``{"rows": [...]}`` (a list alone will do), a row being ``{"system", "layout", "blocks", "in_flight",
    "direction", "gbps"}`` or, for lookups, ``{"system", "hashes", "p50_us"}`` with ``"hits": 0`` for misses. Or what
    ``--json`` wrote, whose rows are then those of the system ``kvsidecar VERSION (DATE)``.

    Raises:
        BadOption: it cannot be read, or a row is not of that form.
    """
    try:
        content = json.loads(file.read_text())
    except OSError as error:
        raise BadOption(f"--compare={str(file)!r} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BadOption(f"--compare={str(file)!r} is not JSON: {error}") from error
    try:
        if isinstance(content, dict) and "schema" in content:
            rows = _own_rows(content)
        else:
            rows = content["rows"] if isinstance(content, dict) else content
        return [_peer_row(row) for row in rows]
    except (KeyError, TypeError, ValueError) as error:
        raise BadOption(f"--compare={str(file)!r} is not a result: {error}") from error


def _own_rows(content: dict[str, Any]) -> list[Row]:
    if content["schema"] != SCHEMA:
        raise ValueError(f"its schema is {content['schema']}, this version reads {SCHEMA}")
    system = f"{SYSTEM} {content['version']} ({content['date'][:10]})"
    measured = content["measurements"]
    bandwidth = [row for row in measured.get("bandwidth", {}).get("rows", []) if row.get("mode") == "unpaced"]
    lookups = [row for row in measured.get("lookup", {}).get("rows", []) if row["lease"] or not row["hits"]]
    return [{**row, "system": system} for row in (*bandwidth, *lookups) if row.get("direction") != "both"]


def _peer_row(row: Any) -> Row:
    if not isinstance(row, dict):
        raise TypeError(f"{row!r} is not a row")
    for key, kind in (_LOOKUP if "hashes" in row else _BANDWIDTH).items():
        if not isinstance(row.get(key), kind):
            raise ValueError(f"a row has {key}={row.get(key)!r}: {row}")  # noqa: TRY004 - a value in a file
    if "direction" in row and row["direction"] not in ("store", "load"):
        raise ValueError(f"a row has direction={row['direction']!r}, which is neither store nor load")
    return dict(row)
