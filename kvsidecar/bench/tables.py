"""A report as tables for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvsidecar.bench.bandwidth import EVICTING, PACED, UNPACED
from kvsidecar.bench.layouts import BLOCK_COUNTS, IN_FLIGHT
from kvsidecar.bench.report import BenchReport, Row
from kvsidecar.support.units import format_size

Tables = Callable[[BenchReport, list[Row]], Iterable[Table]]
"""Makes the tables that show the rows of a measurement."""
WIDTH = 100
"""Columns where standard output is no terminal. Every table fits."""
_MODES = {
    UNPACED: "the whole link",
    PACED: "paced: the engine is not idle",
    EVICTING: "into a full pool: every block evicts another one",
}


def console_of(width: int, *, stderr: bool = False) -> Console:
    """A console, with this width if the output is no terminal."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=width)


def print_tables(console: Console, tables: Iterable[Table]) -> None:
    """Print tables, their titles on lines of their own: rich would fold them at the width of the table."""
    for table in tables:
        console.print(Text(f"\n{table.title}", style="bold"))
        table.title = None
        console.print(table)


def new_table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    return table


def number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def share(gbps: float, limit: float | None) -> str:
    text = f"{gbps:.1f}" if gbps >= 10 else f"{gbps:.2f}"
    return f"{text} {gbps / limit:4.0%}" if limit else text


Cell = str | tuple[str, int]
"""A field of the row as it is, or a field and its number of digits; a dash if the row has no such field."""
TIMES: Mapping[str, Cell] = {"p50 µs": ("p50_us", 1), "p99 µs": ("p99_us", 1), "max µs": ("max_us", 1)}
RATES: Mapping[str, Cell] = {"store GB/s": ("store_gbps", 1), "load GB/s": ("load_gbps", 1)}


def table_of(title: str, rows: Iterable[Row], columns: Mapping[str, Cell]) -> Table:
    """A table with a line for each row, and in each column the field that its cell names."""
    table = new_table(title, *columns)
    for row in rows:
        table.add_row(*(_cell(row, cell) for cell in columns.values()))
    return table


def _cell(row: Row, cell: Cell) -> str:
    if isinstance(cell, tuple):
        return number(row.get(cell[0]), cell[1])
    value = row.get(cell, "-")
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


# -- one part a measurement --------------------------------------------------------------------------------------


def _limit(_: BenchReport, rows: list[Row]) -> Iterable[Table]:
    table = new_table("Bulk limit: one large copy of pinned memory", "direction", "GB/s (median)", "best", "bytes")
    for row in rows:
        numbers = number(row["gbps"]), number(row["best_gbps"])
        table.add_row(row["direction"], *numbers, format_size(row["nbytes"]))
    yield table


def _verify(_: BenchReport, rows: list[Row]) -> Iterable[Table]:
    table = new_table("Stored, loaded to other blocks, compared", "layout", "what", "blocks", "bytes", "wrong blocks")
    for row in rows:
        wrong = Text(str(row["wrong_blocks"]), style="bold red" if row["wrong_blocks"] else "")
        table.add_row(row["layout"], row["what"], str(row["blocks"]), format_size(row["nbytes"]), wrong)
    yield table


def _bandwidth(report: BenchReport, rows: list[Row]) -> Iterable[Table]:
    for mode, meaning in _MODES.items():
        for direction in ("store", "load"):
            chosen = [row for row in rows if row["mode"] == mode and row["direction"] == direction]
            if chosen:
                yield _bandwidth_table(f"{direction}, {meaning}", report.limit(direction), chosen)
    both = [row for row in rows if row["direction"] == "both"]
    if both:
        title = f"Both directions at once: {both[0]['blocks']} blocks a job, {both[0]['in_flight']} in flight each way"
        table = new_table(title, "layout", "store GB/s", "load GB/s", "both GB/s, % of the limit")
        for row in both:
            limit = share(row["gbps"], report.limit("both"))
            table.add_row(row["layout"], number(row["store_gbps"]), number(row["load_gbps"]), limit)
        yield table


def _bandwidth_table(what: str, limit: float | None, rows: list[Row]) -> Table:
    title = f"GB/s of a {what} (RPC included; % of the limit; below: p50 / p99 ms of a job)"
    blocks = [f"{count} block{'s' if count > 1 else ''}" for count in BLOCK_COUNTS]
    table = new_table(title, "layout, its rows", "in flight", *blocks)
    for name in dict.fromkeys(row["layout"] for row in rows):
        head = True
        for in_flight in IN_FLIGHT:
            cells = {row["blocks"]: row for row in rows if (row["layout"], row["in_flight"]) == (name, in_flight)}
            if not cells:
                continue
            any_row = next(iter(cells.values()))
            shape = f"{any_row['rows']} x {format_size(any_row['row_bytes'])}"
            layout = Text.assemble(name, (f"\n{shape}", "dim")) if head else ""
            figures = (_bandwidth_cell(cells.get(count), limit) for count in BLOCK_COUNTS)
            table.add_row(layout, str(in_flight), *figures)
            head = False
    return table


def _bandwidth_cell(row: Row | None, limit: float | None) -> Text:
    if row is None:
        return Text("-")
    return Text.assemble(share(row["gbps"], limit), (f"\n{_ms(row['ms_p50'])} / {_ms(row['ms_p99'])}", "dim"))


def _ms(value: float) -> str:
    """Milliseconds, in at most four characters up to ten seconds, so that the cells of a row fit."""
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def _lookup(_: BenchReport, rows: list[Row]) -> Iterable[Table]:
    asked = {name: name for name in ("hashes", "hits", "mode", "lease")}
    yield table_of("Lookups", rows, {**asked, **TIMES, "n": "n"})


def _submit(_: BenchReport, rows: list[Row]) -> Iterable[Table]:
    yield table_of("What the engine's thread spends", rows, {"call": "call", "blocks": "blocks", **TIMES, "n": "n"})


def _jobs(_: BenchReport, rows: list[Row]) -> Iterable[Table]:
    # Older results were of one copier.
    names = ("attached", "device", *(["copiers"] if any("copiers" in row for row in rows) else []), "cores")
    columns = {"jobs": "direction", "ranks at work": "ranks", **{name: name for name in names}}
    yield table_of("One-block jobs", rows, {**columns, "jobs a second": ("jobs_per_second", 0)})


def _scaling(_: BenchReport, rows: list[Row]) -> Iterable[Table]:
    title = "Stores and loads at once on one device after another, 2 jobs in flight each way"
    names = "layout", "blocks a job", "devices"
    table = new_table(title, *names, "GB/s of all", "store", "load", "times one", "% of bulk")
    one: dict[tuple[str, int], float] = {}
    bulk: dict[int, float] = {row["devices"]: row["gbps"] for row in rows if not row["blocks"]}
    for row in rows:
        devices = row["devices"]
        first = one.setdefault((row["layout"], row["blocks"]), row["gbps"])
        table.add_row(
            *_scaled(row), *(number(row.get(key)) for key in ("gbps", "store_gbps", "load_gbps")),
            number(row["gbps"] / first, 2),
            number(100 * row["gbps"] / bulk[devices], 0) if devices in bulk else "-",
        )  # fmt: skip
    yield table
    asked = [row for row in rows if row["blocks"]]
    if asked:
        title = "Meanwhile: cores that the daemon keeps busy, and lookups"
        table = new_table(title, *names, "daemon's cores", "copiers' cores", "lookup p50 µs", "times idle")
        for row in asked:
            idle = row.get("lookup_idle_us")
            table.add_row(
                *_scaled(row), *(number(row.get(key), 2) for key in ("daemon_cores", "copier_cores")),
                number(row.get("lookup_us"), 0), number(row["lookup_us"] / idle, 2) if idle else "-",
            )  # fmt: skip
        yield table


def _scaled(row: Row) -> tuple[str, str, str]:
    return row["layout"], str(row["blocks"] or "-"), str(row["devices"])


def _token(_: BenchReport, rows: list[Row]) -> Iterable[Table]:
    columns = {"daemon's traffic": "traffic", "mode": "mode", **TIMES, **RATES}
    yield table_of("An engine's 4 KiB device-to-host copy meanwhile", rows, columns)


def _pin(_: BenchReport, rows: list[Row]) -> Iterable[Table]:
    steps = [row for row in rows if "max_ms" in row]
    if steps:
        times = {"p50 ms": ("p50_ms", 3), "p99 ms": ("p99_ms", 3), "longest ms": ("max_ms", 3)}
        title = f"Steps of an engine ({steps[0]['what']})"
        yield table_of(title, steps, {"phase": "phase", "steps": "steps", **times})
    pools = [{**row, "pool": format_size(row["pool_bytes"])} for row in rows if "pin_seconds" in row]
    columns: dict[str, Cell] = {
        "pool": "pool",
        "pages": "pages",
        "pin s": ("pin_seconds", 2),
        "ms/GiB": ("ms_per_gib", 1),
        "prefault s": ("prefault_seconds", 2),
        "register s": ("register_seconds", 2),
        "after prefault ms/GiB": ("beyond_prefault_ms_per_gib", 1),
        "start to ready s": ("start_to_ready_seconds", 2),
    }
    for pool in pools:
        yield table_of("Pinning", [pool], columns)


TABLES: Mapping[str, Tables] = {
    "limit": _limit,
    "verify": _verify,
    "bandwidth": _bandwidth,
    "lookup": _lookup,
    "submit": _submit,
    "jobs": _jobs,
    "scaling": _scaling,
    "token": _token,
    "pin": _pin,
}


def print_report(report: BenchReport, console: Console, tables: Mapping[str, Tables] = TABLES) -> None:
    """Print everything that was measured, and what was not and why."""
    console.print(Text(report.title, style="bold"))
    for measurement in report.measurements.values():
        if measurement.rows:
            print_tables(console, tables[measurement.name](report, measurement.rows))
        if measurement.status in ("failed", "skipped", "interrupted"):
            style = "yellow" if measurement.status == "skipped" else "bold red"
            console.print(Text.assemble("\n", (f"{measurement.name}: {measurement.status}", style)), end="")
            console.print(f": {measurement.reason}" if measurement.reason else "", markup=False, highlight=False)
        for note in measurement.notes:
            console.print(Text(f"  {note}", style="dim"))
