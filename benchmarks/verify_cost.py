"""What checksums cost: the demo's stores and loads under --verify off, sample and always, on a GPU or the host device.

python benchmarks/verify_cost.py [--blocks 1024] [--device auto|cuda|host]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvsidecar.bench.processes import private_daemon
from kvsidecar.cli.demo.run import engine_command
from kvsidecar.cli.demo.shape import choose, pool_bytes
from kvsidecar.device.platforms import open_platform


def run(mode: str, kind: str, blocks: int, directory: Path) -> list[tuple[str, float, float]]:
    """(what, GB/s of the copies, GB/s with RPC) of one daemon."""
    shape = choose(blocks=blocks, cuda=kind == "cuda", lockable_bytes=None)
    results = []
    with private_daemon(directory, kind, pool_bytes(shape), ["--verify", mode]) as daemon:
        for action in ("store", "load"):
            command = engine_command(action, action, kind, shape, daemon.socket)
            ran = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=True)
            lines = [line for line in map(json.loads, ran.stdout.splitlines()) if "rank" in line]
            nbytes = sum(line["bytes"] for line in lines)
            results.append(
                (
                    action,
                    nbytes / sum(line["copy_seconds"] for line in lines) / 1e9,
                    nbytes / sum(line["seconds"] for line in lines) / 1e9,
                )
            )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=1024)
    parser.add_argument("--device", choices=["auto", "cuda", "host"], default="auto")
    options = parser.parse_args()
    platform, _ = open_platform(options.device)
    kind = platform.name
    platform.close()
    table = Table(title=f"--verify on {kind}, {options.blocks} blocks, jobs of 64")
    for column in ("verify", "did", "copy GB/s", "RPC GB/s"):
        table.add_column(column, justify="left" if column in ("verify", "did") else "right")
    with tempfile.TemporaryDirectory() as directory:
        for mode in ("off", "sample", "always"):
            for did, copy, rpc in run(mode, kind, options.blocks, Path(directory)):
                table.add_row(mode, did, f"{copy:.1f}", f"{rpc:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
