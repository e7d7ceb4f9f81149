"""``python -m benchmarks.soak``: exits non-zero if a byte was wrong, or anything was left behind."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.soak.run import Result, Soak


def show(result: Result) -> None:
    table = Table(title=f"soak of {result.seconds:.0f} s")
    table.add_column("what")
    table.add_column("count", justify="right")
    first = (
        "engines", "kills", "stops", "daemons", "daemon_kills", "copier_kills", "tier_kills", "tier_stops", "stores",
        "stored_bytes", "loads", "loaded_bytes", "hits", "disk_hits", "misses", "evicted_blocks", "disk_writes",
        "disk_reads", "disk_corrupt", "checked_bytes", "wrong_bytes",
    )  # fmt: skip
    for name in first:
        table.add_row(name.replace("_", " "), str(result.counts[name]))
    for name in sorted(set(result.counts) - set(first)):
        table.add_row(name, str(result.counts[name]))
    for name, leaked in result.leaks.items():
        table.add_row(f"leaked: {name}", f"{leaked:g}")
    console = Console()
    console.print(table)
    for problem in result.problems:
        console.print(f"problem: {problem}", markup=False)


def main() -> None:
    parser = argparse.ArgumentParser(description="a daemon under engines that are killed at random")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--device", choices=("host", "cuda"), default="host")
    parser.add_argument(
        "--daemon-kills",
        type=int,
        default=0,
        metavar="N",
        help="kill the daemon, its copiers and its tier N times, too",
    )
    parser.add_argument("--seed", type=int, default=0, help="of who is killed when")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvs-soak-") as directory:
        soak = Soak(
            Path(directory), device=options.device, seed=options.seed, progress=lambda line: print(line, flush=True)
        )
        result = soak.run(options.seconds, daemon_kills=options.daemon_kills)
    show(result)
    sys.exit(0 if result.good else 1)


if __name__ == "__main__":
    main()
