"""What a start costs that finds the cache of a killed daemon, beside a cold one: seconds until it is ready.

In turns: a cold start without a pool that is kept; a cold start with ``--pool-dir``, which is then filled and killed by
SIGKILL; the warm start after it, which must have every block, and a sample of them byte for byte.

python -m benchmarks.warm_restart [--pool-size 64GiB] [--dir /dev/shm] [--rounds 3] [--json FILE] [-- SERVE_OPTION...]
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from kvsidecar.bench import machine
from kvsidecar.bench.engine import TIMEOUT, AttachedEngine, attached
from kvsidecar.bench.errors import BadOption, BenchError
from kvsidecar.bench.layouts import CONTIGUOUS, Layout
from kvsidecar.bench.options import BenchOptions
from kvsidecar.bench.pinning import PIN_FIELDS
from kvsidecar.bench.processes import PrivateDaemon
from kvsidecar.bench.report import BenchReport, Measurement, Row
from kvsidecar.bench.run import run
from kvsidecar.bench.setting import Setting
from kvsidecar.bench.tables import new_table, number
from kvsidecar.bench.verify import Content
from kvsidecar.client import Blocks, LookupMode
from kvsidecar.errors import KVSidecarError
from kvsidecar.support.polling import wait_readable
from kvsidecar.support.units import GiB, format_size

NAME = "warm-restart"
NOT_KEPT, COLD, WARM = "not kept", "cold", "warm"
FILLED = 0.9
"""The share of the pool that is filled if ``--blocks`` is not given: nothing is evicted."""
JOB_BLOCKS = 512
SAMPLE_BLOCKS = 256
END_SECONDS = 120.0
"""A killed process that has some hundred GiB pinned takes a while to unpin them."""
LIMIT_SECONDS = 1800


@dataclass(frozen=True, slots=True)
class Plan:
    """How to measure."""

    directory: Path
    """On tmpfs or hugetlbfs; the pools are kept in directories of their own there, which are removed."""
    rounds: int = 3
    blocks: int | None = None
    """To store before the daemon is killed; None for 90 % of the pool."""
    seconds: int = LIMIT_SECONDS
    """For all rounds."""


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """After this time, end the run as SIGTERM does: in order, and with the rows that there are."""
    before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGTERM))
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def measure(plan: Plan, setting: Setting, out: Measurement) -> None:
    with limited(plan.seconds):
        measure_rounds(plan, setting, out)


def measure_rounds(plan: Plan, setting: Setting, out: Measurement) -> None:
    layout = setting.sized(CONTIGUOUS.scaled(setting.divisor))
    most = int(setting.pool_bytes * FILLED) // layout.block_bytes
    count = min(plan.blocks or most, most)
    content = Content(count, layout.block_bytes, setting.rng)
    check_room(plan.directory, setting.pool_bytes)
    for number_of_round in range(1, plan.rounds + 1):
        # Removed in any case: it would hold the memory of a whole pool.
        with tempfile.TemporaryDirectory(prefix="kvs-", dir=plan.directory) as directory:
            keeping = ("--pool-dir", f"{directory}/pool")
            with started(setting, NOT_KEPT, ()) as (_, row):
                pass
            add(out, number_of_round, row)
            with started(setting, COLD, keeping) as (daemon, row), rank(setting, daemon, layout) as engine:
                hashes = fill(engine, content, count)
            add(out, number_of_round, row)
            with started(setting, WARM, keeping) as (daemon, row), rank(setting, daemon, layout) as engine:
                row |= check(engine, content, hashes, setting.rng)
            add(out, number_of_round, row)
        if row["hits"] != count or row["wrong_blocks"]:
            raise BenchError(
                f"{row['hits']} of {count} blocks hit after the warm start, and "
                f"{row['wrong_blocks']} of {row['compared_blocks']} had other bytes"
            )


def check_room(directory: Path, pool_bytes: int) -> None:
    """Raises BenchError before the time of a cold start is spent. The daemon looks again, for its table, too."""
    found = os.statvfs(directory)
    room = found.f_bavail * found.f_frsize
    if found.f_blocks and room < pool_bytes:
        raise BenchError(f"{directory} has room for {format_size(room)}: name another directory with --dir")


def add(out: Measurement, number_of_round: int, row: Row) -> None:
    out.add(round=number_of_round, **row)
    print(
        f"round {number_of_round}: {row['start']}: ready after {row['ready_seconds']:.2f} s, "
        f"{row['kept_blocks']} blocks kept; killed, and gone after {row['gone_seconds']:.2f} s",
        file=sys.stderr, flush=True,
    )  # fmt: skip


@contextmanager
def started(setting: Setting, kind: str, flags: Sequence[str]) -> Iterator[tuple[PrivateDaemon, Row]]:
    """A daemon that is ready, and what its start has cost. It is killed at the end of the block, which completes the
    row."""
    setting.say(f"{kind}: a daemon starts with {format_size(setting.pool_bytes)}")
    with setting.private_daemon(setting.pool_bytes, flags) as daemon:
        row = cost(daemon, kind)
        yield daemon, row
        setting.say(f"{kind}: the daemon is killed")
        row["gone_seconds"] = kill(daemon)


def cost(daemon: PrivateDaemon, kind: str) -> Row:
    """Raises BenchError if the start was of another kind."""
    if kind == NOT_KEPT:
        found: dict[str, Any] = {}
    elif (found := daemon.said.get("warm start") or daemon.said["cold start"])["carrier"] == "none":
        raise BenchError(f"the pool is not kept: {found['reason']}")
    elif (found["event"] == "warm start") != (kind == WARM):
        raise BenchError(f"a {found['event']} instead of a {kind} one: {found['reason'] or 'a pool was found'}")
    ready = daemon.said["ready"]
    pin, prefault, register = (float(ready[name]) for name in PIN_FIELDS)
    return {
        "start": kind,
        "pool_bytes": daemon.pool_bytes,
        "pages": ready["pages"],
        "ready_seconds": round(daemon.times["ready"] - daemon.started, 3),
        # Without the interpreter, its imports and the copiers' contexts, which no start is spared.
        "pool_seconds": round(ready["seconds"] - daemon.said["copiers started"]["seconds"], 3),
        "pin_seconds": pin,
        "prefault_seconds": prefault,
        "register_seconds": register,
        "pin_ms_per_gib": round(pin * 1e3 / (daemon.pool_bytes / GiB), 2),
        "adoption_seconds": found.get("seconds") if kind == WARM else None,
        "kept_blocks": found.get("kept_blocks", 0),
        "dropped_blocks": sum(found.get("dropped_blocks", {}).values()),
    }


def kill(daemon: PrivateDaemon) -> float:
    """SIGKILL. Returns after how many seconds the daemon and its copiers were gone: with them goes what they pinned,
    and a new daemon would wait for it."""
    assert daemon.pid is not None
    with ExitStack() as opened:
        pidfds = [os.pidfd_open(pid) for pid in (daemon.pid, *machine.children_of(daemon.pid))]
        for pidfd in pidfds:
            opened.callback(os.close, pidfd)
        began = time.perf_counter()
        os.kill(daemon.pid, signal.SIGKILL)
        for pidfd in pidfds:
            if not wait_readable(pidfd, END_SECONDS):
                raise BenchError(f"a process of the daemon was not gone {END_SECONDS:g} s after SIGKILL")
        return round(time.perf_counter() - began, 3)


def rank(setting: Setting, daemon: PrivateDaemon, layout: Layout) -> AbstractContextManager[AttachedEngine]:
    return attached(daemon.socket, layout, setting.cuda, run=setting.run, rng=setting.rng)


def fill(engine: AttachedEngine, content: Content, count: int) -> list[bytes]:
    """Store so many blocks, each with content of its own. Returns their hashes."""
    hashes = engine.fresh(count)
    for first in range(0, count, JOB_BLOCKS):
        part = hashes[first : first + JOB_BLOCKS]
        ids = list(range(len(part)))
        for block_id in ids:
            engine.memory.write(block_id, content.of(first + block_id))
        engine.memory.settle()
        engine.finish(engine.client.store([Blocks(0, part, ids)]))
    return hashes


def check(engine: AttachedEngine, content: Content, hashes: list[bytes], rng: np.random.Generator) -> Row:
    """Look up all blocks, and load a sample of those that are there."""
    found = np.zeros(len(hashes), bool)
    for first in range(0, len(hashes), JOB_BLOCKS):
        part = hashes[first : first + JOB_BLOCKS]
        query = {0: b"".join(part)}
        result = engine.client.lookup(engine.namespace, query, mode=LookupMode.BITMAP, timeout=TIMEOUT)
        found[first : first + len(part)] = result.groups[0].found
    there = np.flatnonzero(found)
    sample = rng.choice(there, min(SAMPLE_BLOCKS, len(there)), replace=False).tolist()
    wrong = 0
    if sample:
        ids = list(range(len(sample)))
        engine.finish(engine.client.load([Blocks(0, [hashes[index] for index in sample], ids)]))
        loaded = np.empty((len(sample), engine.layout.block_bytes), np.uint8)
        for block_id in ids:
            engine.memory.read(block_id, loaded[block_id])
        engine.memory.settle()
        wrong = sum(not np.array_equal(loaded[at], content.of(index)) for at, index in enumerate(sample))
    return {
        "stored_blocks": len(hashes), "hits": len(there), "compared_blocks": len(sample), "wrong_blocks": wrong,
    }  # fmt: skip


def tables(report: BenchReport, rows: list[Row]) -> Iterable[Table]:
    size = format_size(rows[0]["pool_bytes"])
    columns = (
        "start", "round", "pages", "ready", "pool", "pin", "prefault", "register", "ms/GiB", "adoption", "kept",
        "dropped", "hits", "compared", "wrong", "gone",
    )  # fmt: skip
    table = new_table(f"A pool of {size}: each start, in seconds, and milliseconds of pinning a GiB", *columns)
    for row in rows:
        phases = (row[f"{name}_seconds"] for name in ("ready", "pool", "pin", "prefault", "register"))
        counts = ("kept_blocks", "dropped_blocks", "hits", "compared_blocks", "wrong_blocks")
        table.add_row(
            row["start"], str(row["round"]), row["pages"], *(number(seconds, 2) for seconds in phases),
            number(row["pin_ms_per_gib"]), number(row["adoption_seconds"], 2),
            *(str(row.get(name, "-")) for name in counts), number(row.get("gone_seconds"), 2),
        )  # fmt: skip
    yield table
    table = new_table(
        "Median, smallest to largest", "start", "ready", "", "of it pool", "", "ms/GiB", ""
    )  # fmt: skip
    for kind in (NOT_KEPT, COLD, WARM):
        of_kind = [row for row in rows if row["start"] == kind]
        cells = []
        for name in ("ready_seconds", "pool_seconds", "pin_ms_per_gib"):
            values = [row[name] for row in of_kind]
            cells += [number(statistics.median(values), 2), f"{min(values):.2f} to {max(values):.2f}"] if values else []
        table.add_row(kind, *cells)
    yield table


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.warm_restart", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--device", choices=("auto", "cuda", "host"), default="auto")
    parser.add_argument("--pool-size", metavar="SIZE", help="default: as kvsidecar bench")
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"), help="on tmpfs or hugetlbfs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--blocks", type=int, help="to store before the kill; default: 90 %% of the pool")
    parser.add_argument("--limit", type=int, default=LIMIT_SECONDS, help="seconds, for the whole run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE|-")
    parser.add_argument("serve_flags", nargs="*", metavar="-- SERVE_OPTION", help="of each daemon that is started")
    chosen = vars(parser.parse_args())
    plan = Plan(chosen.pop("dir"), chosen.pop("rounds"), chosen.pop("blocks"), chosen.pop("limit"))
    try:
        if not os.access(plan.directory, os.W_OK):
            raise BadOption(f"--dir={str(plan.directory)!r} is not a directory to write to")
        for name, value in (("rounds", plan.rounds), ("blocks", plan.blocks or 1), ("limit", plan.seconds)):
            if value < 1:
                raise BadOption(f"--{name}={value} is not at least 1")
        options = BenchOptions.checked(only=None, **chosen)
        sys.exit(run(options, {NAME: partial(measure, plan)}, {NAME: tables}))
    except KVSidecarError as error:
        sys.exit(f"benchmarks.warm_restart: {error}")


if __name__ == "__main__":
    main()
