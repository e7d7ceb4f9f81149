"""The disk tier's engine beside fio, on the same file in the same run, in turns: what share of the disk it reaches.

    python benchmarks/disk_tier.py DIRECTORY [--bytes 1GiB] [--rounds 5] [--json FILE]

The engine writes blocks that are new to it, and reads them in random order and verifies them, from several threads with
one call each in flight. fio (Debian and Ubuntu: apt install fio) moves as many bytes in pieces of the same size and at
random places of the engine's file, with as many in flight. A share is the median over the rounds of engine / fio.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from kvsidecar.support.units import KiB, MiB, parse_size
from kvsidecar.tiers.backend import ReadEnd, ShardSpace, WriteEnd
from kvsidecar.tiers.disk.backend import DiskBackend
from kvsidecar.tiers.disk.directory import EXTENTS
from kvsidecar.types import Namespace

PAGE = 4096


class Shape(NamedTuple):
    name: str
    shard_bytes: int
    blocks: int
    """Of one call."""


SHAPES = [
    Shape("2 MiB", 2 * MiB, 1),
    Shape("2 MiB, 4 a call", 2 * MiB, 4),
    Shape("160 x 4 KiB, 8 a call", 160 * 4 * KiB, 8),
    Shape("160 x 4 KiB", 160 * 4 * KiB, 1),
    Shape("61 x 18 KiB, 8 a call", 61 * 18 * KiB, 8),
    Shape("61 x 18 KiB", 61 * 18 * KiB, 1),
]


class Speeds(NamedTuple):
    """Bytes a second."""

    write: float
    read: float


def engine_speeds(tier: DiskBackend, shape: Shape, nbytes: int, in_flight: int, seed: int) -> Speeds:
    space = ShardSpace(Namespace("m", "bf16", "l", 16, 1, 1, "h"), 0, 0, 1, shape.shard_bytes)
    tier.forget(None)
    rng = random.Random(seed)
    hashes = [rng.randbytes(32) for _ in range(nbytes // shape.shard_bytes // shape.blocks * shape.blocks)]
    extent = -(-shape.shard_bytes // PAGE) * PAGE
    area = memoryview(mmap.mmap(-1, in_flight * shape.blocks * extent))
    area[:] = rng.randbytes(len(area))
    slots = [area[at : at + shape.shard_bytes] for at in range(0, len(area), extent)]
    free = [slots[at : at + shape.blocks] for at in range(0, len(slots), shape.blocks)]

    def move(call: Callable[[list[bytes], list[memoryview]], object]) -> float:
        def one(at: int) -> None:
            memory = free.pop()
            call(hashes[at : at + shape.blocks], memory)
            free.append(memory)

        with ThreadPoolExecutor(in_flight) as threads:
            began = time.perf_counter()
            for _ in threads.map(one, range(0, len(hashes), shape.blocks)):
                pass
            return len(hashes) * shape.shard_bytes / (time.perf_counter() - began)

    def write(names: list[bytes], memory: list[memoryview]) -> None:
        if set(tier.write(space, names, memory, [None] * len(names))) != {WriteEnd.DONE}:
            sys.exit("the engine has not written everything")

    def read(names: list[bytes], memory: list[memoryview]) -> None:
        if set(tier.read(space, names, memory)) != {ReadEnd.DONE}:
            sys.exit("the engine has not read everything")

    written = move(write)
    calls = [hashes[at : at + shape.blocks] for at in range(0, len(hashes), shape.blocks)]
    rng.shuffle(calls)
    hashes = [name for call in calls for name in call]
    return Speeds(written, move(read))


def fio_speeds(path: Path, shape: Shape, nbytes: int, in_flight: int) -> Speeds:
    # A call of the engine moves neighbours: so does a piece of fio's.
    piece = -(-shape.shard_bytes // PAGE) * PAGE * shape.blocks
    found = {}
    for action in ("write", "read"):
        command = [
            *("fio", "--name=disk", f"--filename={path}", f"--rw=rand{action}", f"--bs={piece}", "--direct=1"),
            *("--ioengine=" + fio_engine(), f"--iodepth={in_flight}", f"--size={nbytes // piece * piece}"),
            *("--output-format=json", "--allow_file_create=0", "--randrepeat=0"),
        ]
        ran = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        found[action] = float(json.loads(ran.stdout)["jobs"][0][action]["bw_bytes"])
    return Speeds(**found)


def fio_engine() -> str:
    """io_uring, where this machine lets programs use it."""
    try:
        return "libaio" if Path("/proc/sys/kernel/io_uring_disabled").read_text().strip() == "2" else "io_uring"
    except FileNotFoundError:
        return "libaio"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="on the disk to measure; its files are deleted afterwards")
    parser.add_argument("--bytes", type=parse_size, default="1GiB", help="to move in each direction")
    parser.add_argument("--in-flight", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shapes", default="", help="only those whose name contains this")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if shutil.which("fio") is None:
        sys.exit("fio is not installed (Debian and Ubuntu: apt install fio)")
    made = not options.directory.exists()
    tier = DiskBackend(options.directory, options.bytes + options.bytes // 4)
    direct = tier._files.direct
    rows = []
    table = Table(title=f"GB/s, {options.in_flight} in flight, fio {fio_engine()}, direct: {direct}")
    for column in ("shape", "", "engine", "fio", "share", "shares of the rounds"):
        table.add_column(column, justify="left" if column in ("shape", "") else "right")
    try:
        for shape in SHAPES:
            if options.shapes not in shape.name:
                continue
            rounds = []
            for number in range(options.rounds):
                ours = engine_speeds(tier, shape, options.bytes, options.in_flight, number)
                rounds.append((ours, fio_speeds(options.directory / EXTENTS, shape, options.bytes, options.in_flight)))
            for action in Speeds._fields:
                pairs = [(getattr(ours, action), getattr(fio, action)) for ours, fio in rounds]
                shares = [ours / fio for ours, fio in pairs]
                engine_speed, fio_speed = (statistics.median(column) for column in zip(*pairs, strict=True))
                share = statistics.median(shares)
                rows.append(
                    {"shape": shape.name, "action": action, "engine": engine_speed, "fio": fio_speed, "share": share}
                )
                each = " ".join(f"{share:.2f}" for share in shares)
                cells = f"{engine_speed / 1e9:.2f}", f"{fio_speed / 1e9:.2f}", f"{share:.0%}"
                table.add_row(shape.name, action, *cells, each)
    finally:
        tier.close()
        if made:
            shutil.rmtree(options.directory)
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps({"cores": os.cpu_count(), "direct": direct, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
