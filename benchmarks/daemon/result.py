"""What ``--json`` wrote, and figures of other systems, read from their files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvsidecar.bench.errors import BadOption
from kvsidecar.bench.report import SCHEMA, BenchReport, Measurement, Row


def read(files: Sequence[Path]) -> BenchReport:
    """One report of several runs on a machine: what each has measured, or the last of those that have the same.

    Raises:
        BadOption: a file cannot be read, or is no such result.
    """
    reports = [_report(file, _content(file)) for file in files]
    for report in reports[1:]:
        reports[0].measurements.update(report.measurements)
    return reports[0]


def _report(file: Path, content: Any) -> BenchReport:
    try:
        _check_schema(content)
        measured = {name: Measurement(**fields) for name, fields in content["measurements"].items()}
        about = {name: content[name] for name in ("version", "date", "device", "machine", "options")}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _no_result(file, error) from error
    return BenchReport(**about, measurements=measured)


def _content(file: Path) -> Any:
    try:
        return json.loads(file.read_text())
    except OSError as error:
        raise BadOption(f"{str(file)!r} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BadOption(f"{str(file)!r} is not JSON: {error}") from error


def _no_result(file: Path, error: Exception) -> BadOption:
    return BadOption(f"{str(file)!r} is not a result: {type(error).__name__}: {error}")


def _check_schema(content: Row) -> None:
    if content["schema"] != SCHEMA:
        raise ValueError(f"its schema is {content['schema']}, this version reads {SCHEMA}")


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
    """Figures of other systems for ``--compare``.

    ``{"rows": [...], "lookups": [...]}``: a row is ``{"system", "layout", "blocks", "in_flight", "direction",
    "gbps"}``, and may have ``variant`` (part of the system's name), ``ids`` (``random`` or ``consecutive``),
    ``of_limit`` (share of the limit of its own run) and ``valid`` (false: it is left out); a lookup is ``{"system",
    "hashes", "hit", "us_p50"}``.

    Returns:
        Rows with ``gbps``, and rows with ``hashes``, of each system.

    Raises:
        BadOption: it cannot be read, or a row is not of that form.
    """
    content = _content(file)
    try:
        rows = [_transfer(row) for row in content["rows"] if row.get("valid", True)]
        return [*rows, *(_lookup(row) for row in content.get("lookups", []))]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _no_result(file, error) from error


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
