"""Two versions of the code by the JSON files of ``kvsidecar bench --json``, from runs in turns on one machine.

    python -m benchmarks.compare --old before-1.json --old before-2.json --new after-1.json --new after-2.json

Prints how many GB/s (and device milliseconds of a job's copies) the new code reaches as a share of the old: the
geometric mean over the layouts of the mean over the runs, and beside it the same of the last old run over the first,
which is what the machine does by itself.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import geometric_mean, mean
from typing import Any

Cell = tuple[str, str, int, int]
"""Direction, mode, blocks a job, jobs in flight."""


def cells(runs: Iterable[dict[str, Any]], field: str) -> dict[Cell, dict[str, float]]:
    """The mean over the runs of one field of each cell, by layout and block ids."""
    found: dict[Cell, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        for row in run["measurements"]["bandwidth"]["rows"]:
            if row.get(field):
                cell = (row["direction"], row["mode"], row["blocks"], row["in_flight"])
                found[cell][f"{row['layout']} {row.get('ids', '')}"].append(row[field])
    return {cell: {layout: mean(values) for layout, values in layouts.items()} for cell, layouts in found.items()}


def share(new: dict[str, float], old: dict[str, float]) -> float:
    """Over the layouts that both have."""
    return geometric_mean([new[layout] / old[layout] for layout in new.keys() & old.keys()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for side in ("old", "new"):
        parser.add_argument(f"--{side}", action="append", required=True, type=Path, metavar="FILE")
    arguments = parser.parse_args()
    old, new = ([json.loads(path.read_text()) for path in paths] for paths in (arguments.old, arguments.new))
    print(f"{'direction':9} {'mode':9} blocks in flight   GB/s   old again   device ms   old again")
    fields = ("gbps", "copy_ms_p50")
    sides = [[cells(runs, field) for runs in (new, old, old[-1:], old[:1])] for field in fields]
    for cell in sorted(sides[0][0]):
        shares = []
        for after, before, last, first in sides:
            for above, below in ((after, before), (last, first)):
                both = above.get(cell, {}).keys() & below.get(cell, {}).keys()
                shares.append(f"{share(above[cell], below[cell]):.3f}" if both else "-")
        direction, mode, blocks, in_flight = cell
        print(f"{direction:9} {mode:9} {blocks:6} {in_flight:9}   {shares[0]:>4} {shares[1]:>11} "
              f"{shares[2]:>11} {shares[3]:>11}")  # fmt: skip


if __name__ == "__main__":
    main()
