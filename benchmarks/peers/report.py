"""What a run prints: rows that the workers write as JSON lines, one table, and one JSON document. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from benchmarks.peers.shapes import BOTH, Direction, Order


@dataclass(frozen=True)
class Transfer:
    """Jobs of one size in one direction.

    Args:
        variant: the way of copying, where a system has several, e.g. ``kernel``.
        ids: whether block ids and host slots are random or run on from each other.
        blocks: per job.
        in_flight: jobs that were outstanding at a time.
        gbps: GB/s (1e9 bytes). One job at a time: bytes of a job over the median time. Several: all over all time.
        ms_p50: median time of one job, from the call that submits it to the known end of its last byte.
        verified: every byte was compared after a load of this layout; None if nobody looked.
        note: what a reader must know; an invalid row says why here.
        valid: False if the row measures something else than it says.
    """

    system: str
    layout: str
    blocks: int
    in_flight: int
    direction: Direction
    gbps: float
    ms_p50: float
    note: str = ""
    variant: str = ""
    ids: Order = "random"
    verified: bool | None = None
    valid: bool = True


@dataclass(frozen=True)
class Lookup:
    """Lookups of ``hashes`` blocks of 16 tokens, all of them present or all absent."""

    system: str
    hashes: int
    hit: bool
    us_p50: float
    note: str = ""


@dataclass(frozen=True)
class Limit:
    """One pinned copy of at least 1 GiB, in the process that measured the system, GB/s."""

    system: str
    direction: Direction
    gbps: float


@dataclass(frozen=True)
class Problem:
    """Something that was not measured, and why."""

    system: str
    reason: str


Row = Transfer | Lookup | Limit | Problem
_KINDS: Final[dict[str, type[Any]]] = {kind.__name__: kind for kind in (Transfer, Lookup, Limit, Problem)}


def to_line(row: Row) -> str:
    """One JSON line, without its end."""
    return json.dumps({"kind": type(row).__name__, **asdict(row)})


def from_line(line: str) -> Row:
    """The row of a line that `to_line` made.

    Raises:
        ValueError: it is not such a line; the last one of a worker that was killed may be cut short.
    """
    try:
        fields = json.loads(line)
        row: Row = _KINDS[fields.pop("kind")](**fields)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no row: {line!r}") from error
    return row


@dataclass
class Report:
    """All rows of a run, in the order in which they came."""

    transfers: list[Transfer] = field(default_factory=list)
    lookups: list[Lookup] = field(default_factory=list)
    limits: list[Limit] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    machine: dict[str, str] = field(default_factory=dict)

    def add(self, rows: Iterable[Row]) -> None:
        for row in rows:
            match row:
                case Transfer():
                    self.transfers.append(row)
                case Lookup():
                    self.lookups.append(row)
                case Limit():
                    self.limits.append(row)
                case Problem():
                    self.problems.append(row)

    def limit(self, system: str, direction: str) -> float | None:
        """GB/s of one large copy where this system was measured, in its own process."""
        return next((one.gbps for one in self.limits if (one.system, one.direction) == (system, direction)), None)

    def as_json(self) -> str:
        """The document of ``--json``: machine, limits, rows, lookups, problems."""
        rows = []
        for transfer in self.transfers:
            limit = self.limit(transfer.system, transfer.direction)
            rows.append({**asdict(transfer), "of_limit": round(transfer.gbps / limit, 4) if limit else None})
        document = {
            "machine": self.machine,
            "limits": [asdict(one) for one in self.limits],
            "rows": rows,
            "lookups": [asdict(one) for one in self.lookups],
            "problems": [asdict(one) for one in self.problems],
        }
        return json.dumps(document, indent=1)

    def as_text(self) -> str:
        """Markdown: what was measured, as tables that fit a terminal of 150 columns, and what was not."""
        parts = [", ".join(f"{name} {value}" for name, value in self.machine.items())]
        if self.limits:
            parts.append(_table(("the limit, one large copy", "store GB/s", "load GB/s"), self._limit_lines()))
        if self.transfers:
            parts.append(_table(*self._transfer_table()))
        if self.lookups:
            found = [
                (one.system, str(one.hashes), _hit(one.hit), f"{one.us_p50:.0f}", one.note) for one in self.lookups
            ]
            parts.append(_table(("lookup", "blocks", "hit", "p50 us", "note"), found))
        if self.problems:
            parts.append(_table(("not measured", "why"), [(one.system, one.reason) for one in self.problems]))
        return "\n\n".join(part for part in parts if part) + "\n"

    def _limit_lines(self) -> list[Sequence[str]]:
        systems = dict.fromkeys(one.system for one in self.limits)
        return [(system, *(_rate(self.limit(system, direction)) for direction in BOTH)) for system in systems]

    def _transfer_table(self) -> tuple[Sequence[str], list[Sequence[str]]]:
        """One line per system, variant, layout, order of ids and depth; a column per direction and size, in GB/s."""
        sizes = sorted({row.blocks for row in self.transfers})
        lines: dict[tuple[str, ...], list[Transfer]] = {}
        for row in self.transfers:
            who = f"{row.system} {row.variant}".strip()
            lines.setdefault((who, row.layout, row.ids, str(row.in_flight)), []).append(row)
        head = ["GB/s by blocks per job", "layout", "ids", "in flight"]
        head += [f"{direction} {size}" for direction in BOTH for size in sizes]
        head += ["1 block ms", "checked", "note"]
        body: list[Sequence[str]] = []
        for key, rows in lines.items():
            cells = {(row.direction, row.blocks): row for row in rows}
            rates = [_cell(cells.get((way, size))) for way in BOTH for size in sizes]
            one = [cells.get((way, 1)) for way in BOTH]
            times = " / ".join(f"{row.ms_p50:.2f}" if row else "-" for row in one) if any(one) else "-"
            notes = "; ".join(dict.fromkeys(row.note for row in rows if row.note))
            body.append((*key, *rates, times, _checked(rows), notes))
        return head, body


def _cell(row: Transfer | None) -> str:
    if row is None:
        return "-"
    return _rate(row.gbps) if row.valid else f"({_rate(row.gbps)})"


def _rate(gbps: float | None) -> str:
    return "-" if gbps is None else f"{gbps:.1f}" if gbps >= 2 else f"{gbps:.2f}"


def _checked(rows: Sequence[Transfer]) -> str:
    if not all(row.valid for row in rows):
        return "INVALID"
    if any(row.verified is False for row in rows):
        return "WRONG BYTES"
    return "yes" if all(row.verified for row in rows) else "NO"


def _hit(hit: bool) -> str:
    return "all" if hit else "none"


def _table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    lines = [tuple(head), *(tuple(line) for line in body)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    texts = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    texts.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(texts)
