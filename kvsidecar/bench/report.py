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
    """One measurement: the rows that it completed, and its outcome."""

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

_TRANSFER: dict[str, Any] = {
    "system": str,
    "layout": str,
    "blocks": int,
    "in_flight": int,
    "direction": str,
    "gbps": (int, float),
}
_LOOKUP: dict[str, Any] = {"system": str, "hashes": int, "hit": bool, "us_p50": (int, float)}


def load_peers(file: Path) -> list[Row]:
    """Figures of other systems, or of another run of this one, for ``--compare``.

    Either ``{"rows": [...], "lookups": [...]}``: a row is ``{"system", "layout", "blocks", "in_flight", "direction",
    "gbps"}``, and may have ``variant`` (part of the system's name), ``ids`` (``random`` or ``consecutive``),
    ``of_limit`` (share of the limit of its own run) and ``valid`` (false: it is left out); a lookup is ``{"system",
    "hashes", "hit", "us_p50"}``. Or what ``--json`` wrote: the system is then ``kvsidecar VERSION (DATE)``.

    Returns:
        Rows with ``gbps``, and rows with ``hashes``, as those of `Report.peers`.

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
        if "schema" in content:
            return _own_rows(content)
        rows = [_transfer(row) for row in content["rows"] if row.get("valid", True)]
        return [*rows, *(_lookup(row) for row in content.get("lookups", []))]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadOption(f"--compare={str(file)!r} is not a result: {type(error).__name__}: {error}") from error


def _own_rows(content: dict[str, Any]) -> list[Row]:
    if content["schema"] != SCHEMA:
        raise ValueError(f"its schema is {content['schema']}, this version reads {SCHEMA}")
    system = f"{SYSTEM} {content['version']} ({content['date'][:10]})"
    rows: dict[str, list[Row]] = {name: each["rows"] for name, each in content["measurements"].items()}
    limits = {row["direction"]: row["gbps"] for row in rows.get("limit", [])}
    bandwidth = [
        {**row, "system": system, "of_limit": row["gbps"] / limits[row["direction"]]}
        for row in rows.get("bandwidth", [])
        if row["mode"] == "unpaced" and row["direction"] in ("store", "load") and row["direction"] in limits
    ]
    lookups = [
        {**row, "system": system}
        for row in rows.get("lookup", [])
        if row["lease"] or (not row["hits"] and row["mode"] == "prefix")
    ]
    return [*bandwidth, *lookups]


def _transfer(row: Row) -> Row:
    _check(row, _TRANSFER)
    if row["direction"] not in ("store", "load"):
        raise ValueError(f"a row has direction={row['direction']!r}, which is neither store nor load")
    # Here the order of the ids is part of a layout's name.
    consecutive = row.get("ids") == "consecutive" and not row["layout"].endswith("-consecutive")
    return {
        **{key: row[key] for key in _TRANSFER},
        "system": f"{row['system']} {row.get('variant') or ''}".strip(),
        "layout": row["layout"] + ("-consecutive" if consecutive else ""),
        "of_limit": row.get("of_limit"),
    }


def _lookup(row: Row) -> Row:
    _check(row, _LOOKUP)
    hits = row["hashes"] if row["hit"] else 0
    return {"system": row["system"], "hashes": row["hashes"], "hits": hits, "p50_us": row["us_p50"]}


def _check(row: Row, fields: dict[str, Any]) -> None:
    for key, kind in fields.items():
        if not isinstance(row.get(key), kind):
            raise ValueError(f"a row has {key}={row.get(key)!r}: {row}")  # noqa: TRY004 - a value in a file
