"""Results of `kvsidecar bench` and of `benchmarks.daemon`: tables, the project's targets, other systems, plots.

python -m benchmarks.daemon.show run.json more.json [--targets] [--compare peers.json] [--plot DIR]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.daemon import tables, targets
from benchmarks.daemon.result import load_peers, read
from kvsidecar.bench.errors import BadOption
from kvsidecar.bench.tables import TABLES, console_of, print_report, print_tables

WIDTH = 140
"""Where standard output is no terminal: several systems stand beside one another."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.daemon.show", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("results", nargs="+", type=Path, metavar="FILE", help="what --json wrote, of one machine")
    parser.add_argument("--targets", action="store_true", help="the targets for an H200, and whether each is met")
    parser.add_argument(
        "--compare", action="append", default=[], type=Path, metavar="FILE",
        help="of other systems, beside these",
    )  # fmt: skip
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write plots as PNG files; needs matplotlib")
    arguments = parser.parse_args()
    console = console_of(WIDTH)
    try:
        report = read(arguments.results)
        peers = [row for file in arguments.compare for row in load_peers(file)]
    except BadOption as error:
        sys.exit(f"benchmarks.daemon.show: {error}")
    print_report(report, console, {**TABLES, **tables.TABLES})
    print_tables(console, tables.other_systems(report, peers))
    if arguments.targets:
        print_tables(console, [tables.targets(targets.evaluate(report))])
    if arguments.plot is not None:
        from benchmarks.daemon.plots import write_plots

        arguments.plot.mkdir(parents=True, exist_ok=True)
        for file in write_plots(report, peers, arguments.plot):
            console.print(f"wrote {file}", highlight=False, markup=False)


if __name__ == "__main__":
    main()
