"""What the measurements of this package, the targets and other systems look like in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.table import Table
from rich.text import Text

from kvsidecar.bench.bandwidth import UNPACED
from kvsidecar.bench.report import SYSTEM, BenchReport, Row
from kvsidecar.bench.tables import RATES, TIMES, Cell, Tables, new_table, number, share, table_of
from kvsidecar.support.units import MiB


def _pacing(_: BenchReport, rows: list[Row]) -> Iterable[Table]:
    named = [{**row, "chunk": row["chunk"] or "no stores"} for row in rows]
    columns = {"chunk": "chunk", **TIMES, "store GB/s": RATES["store GB/s"]}
    yield table_of("The same by --store-chunk of the daemon", named, columns)


def _interference(_: BenchReport, rows: list[Row]) -> Iterable[Table]:
    shown = [{**row, "slower": f"{row['slowdown']:+.2%}"} for row in rows]
    columns: dict[str, Cell] = {"work": "work", "daemon's traffic": "traffic", "alone ms": ("alone_ms", 3)}
    columns |= {"meanwhile ms": ("under_ms", 3), "slower by": "slower", **RATES}
    yield table_of("An engine's work meanwhile", shown, columns)


def _footprint(_: BenchReport, rows: list[Row]) -> Iterable[Table]:
    columns = "GPU memory", "host memory beyond the pool", "blocks", "with them", "bytes a block"
    table = new_table("The daemon itself", *columns)
    for row in rows:
        gpu, host, full = (row.get(key) for key in ("gpu_bytes", "host_bytes", "host_bytes_with_blocks"))
        table.add_row(
            *("-" if size is None else f"{size / MiB:.0f} MiB" for size in (gpu, host)),
            str(row.get("blocks") or "-"),
            "-" if full is None else f"{full / MiB:.0f} MiB",
            number(row.get("bytes_per_block")),
        )
    yield table


TABLES: Mapping[str, Tables] = {"footprint": _footprint, "pacing": _pacing, "interference": _interference}


def other_systems(report: BenchReport, peers: list[Row]) -> Iterable[Table]:
    """Every shape that another system has a figure of."""
    bandwidth = [row for row in peers if "gbps" in row]
    if bandwidth:
        systems = list(dict.fromkeys(row["system"] for row in bandwidth))
        columns = "layout", "direction", "blocks", "in flight", SYSTEM, *systems
        table = new_table("Beside other systems: GB/s, % of the limit", *columns)
        keys = ("layout", "direction", "blocks", "in_flight")
        for shape in sorted({tuple(row[key] for key in keys) for row in bandwidth}):
            match = dict(zip(keys, shape, strict=True))
            limit = report.limit(match["direction"])
            own = report.find("bandwidth", mode=UNPACED, **match)
            others = [
                next((row for row in bandwidth if row["system"] == each and match.items() <= row.items()), None)
                for each in systems
            ]
            table.add_row(*map(str, shape), *(_peer_cell(row, limit) for row in (own, *others)))
        yield table
    lookups = [row for row in peers if "hashes" in row]
    if lookups:
        table = new_table("Beside other systems: lookups", "system", "hashes", "hits", "p50 µs", "p99 µs")
        for row in lookups:
            counts = str(row["hashes"]), str(row["hits"])
            table.add_row(row["system"], *counts, number(row["p50_us"]), number(row.get("p99_us")))
        yield table


def _peer_cell(row: Row | None, limit: float | None) -> str:
    """GB/s, and the share of the limit of the run that it is from."""
    if row is None:
        return "-"
    of_limit = row.get("of_limit")
    return share(row["gbps"], row["gbps"] / of_limit if of_limit else limit)


def targets(rows: list[Row]) -> Table:
    table = new_table("Targets (for an NVIDIA H200)", "what", "target", "measured", "met")
    for row in rows:
        style = {"yes": "green", "no": "red"}.get(row["met"], "yellow")
        table.add_row(row["what"], row["target"], row["measured"], Text(row["met"], style=style))
    return table
