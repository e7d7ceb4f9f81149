"""What a disk tier costs those who do not hit it, and what those get who do: daemons without one, with one, and with
one that is broken, measured in turns in one run on the host device.

    python -m benchmarks.tiers [--dir DIRECTORY] [--rounds 40] [--json FILE]

Broken: its process is stopped (SIGSTOP), is killed as soon as it runs, or fails each write as on a full disk. Ratios
are the median over the rounds of a daemon's figure over that of the daemon without a tier in the same round; ``off
again`` is the same of a second daemon without one, hence what the machine does by itself. Larger is better in each row.

Last, blocks that are only on the disk are looked up, fetched and loaded through a daemon, beside the tier's engine
alone, which reads the same blocks of the same directory in calls of the same size.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.metrics import metric
from kvsidecar.bench.engine import AttachedEngine, attached, throughput
from kvsidecar.bench.layouts import CONTIGUOUS, STACKED, Layout
from kvsidecar.bench.machine import children_of
from kvsidecar.bench.processes import PrivateDaemon, private_daemon
from kvsidecar.core.tier_fetches import CHUNK_BYTES
from kvsidecar.support.failpoints import VARIABLE
from kvsidecar.support.units import GiB, MiB
from kvsidecar.tiers.backend import ReadEnd, ShardSpace
from kvsidecar.tiers.disk.backend import DiskBackend

POOL_BYTES = 192 * MiB
LAYOUT = replace(STACKED.scaled(16), num_blocks=512)
"""128 KiB a block: the tier's work of a job is a larger part of it than with real ones."""
JOB_BLOCKS = (32, 256)
HASHES = (64, 512)
LOOKUPS = 40
"""Of one round and count."""
FETCH_SECONDS, SLOW_PREFILL = 10.0, 0.001
"""Everything that is on the disk is worth fetching."""
FETCHED_BLOCKS, FETCHED_AT_A_TIME = 384, 64
TIER = b"kvsidecar.tiers.process"


@dataclass
class Side:
    """One daemon, and its figures: larger is better."""

    name: str
    daemon: PrivateDaemon
    engine: AttachedEngine
    figures: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def metric(self, name: str) -> float:
        return metric(self.daemon, name)


def tier_pids(daemon: PrivateDaemon) -> list[int]:
    found = []
    assert daemon.pid is not None
    for pid in children_of(daemon.pid):
        with suppress(FileNotFoundError, ProcessLookupError):
            if TIER in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def wait(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            sys.exit(f"not within 60 s: {what}")
        time.sleep(0.05)


@contextmanager
def started(
    name: str, directory: Path, flags: Sequence[str], failpoints: str = "", layout: Layout = LAYOUT
) -> Iterator[Side]:
    python = ("env", f"{VARIABLE}={failpoints}", sys.executable)  # a bench's daemon has none of this process's
    with (
        private_daemon(directory, "host", POOL_BYTES, flags, python=python) as daemon,
        attached(daemon.socket, layout, None, run=name, rng=np.random.default_rng(1)) as engine,
    ):
        yield Side(name, daemon, engine)


def disk(directory: Path, name: str) -> list[str]:
    sizes = ["--disk-dir", str(directory / f"disk-{name}"), "--disk-size", str(GiB // 2)]
    return [*sizes, "--stuck-after", "3600"]


@contextmanager
def killed_again_and_again(side: Side) -> Iterator[None]:
    end = threading.Event()

    def kill() -> None:
        while not end.wait(0.05):
            for pid in tier_pids(side.daemon):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def break_it(side: Side) -> None:
    """Let its calls be late, or fail, until the tier is off."""

    def off() -> bool:
        with side.engine.held(32, 1) as held:
            side.engine.run(side.engine.loads(held, 1), 1)
        return not side.metric('kvsidecar_tier_up{tier="disk"}')

    wait(off, f"{side.name}: the tier is off")


# -- what is measured ------------------------------------------------------------------------------------------------


def measure(side: Side) -> Iterator[None]:
    """One step after another, so that the others take the same one in between."""
    engine, figures = side.engine, side.figures
    for count in JOB_BLOCKS:
        jobs = 1024 // count
        finished = engine.run(engine.stores(count, jobs), 2)
        figures[f"store, {count} blocks a job, GB/s"].append(throughput(finished) / 1e9)
        yield
        with engine.held(count, 1) as held:
            first = engine.run(engine.loads(held, 1), 1)
            figures[f"first load, {count} blocks a job, GB/s"].append(throughput(first) / 1e9)
            yield
            if side.name == "on":
                wait(lambda: not side.metric("kvsidecar_tier_writing_bytes"), "the blocks are written")
            finished = engine.run(engine.loads(held, jobs), 2)
            figures[f"load, {count} blocks a job, GB/s"].append(throughput(finished) / 1e9)
            yield
    with engine.held(max(HASHES), 1) as held:
        for count in HASHES:
            look_up(side, f"lookup, {count} misses, 1/ms", [engine.fresh(count) for _ in range(LOOKUPS)], 0)
            yield
            look_up(side, f"lookup, {count} hits, 1/ms", [held[0].hashes[:count]] * LOOKUPS, count)
            yield


def look_up(side: Side, what: str, lookups: Sequence[list[bytes]], hits: int) -> None:
    took = []
    for hashes in lookups:
        groups = {0: b"".join(hashes)}
        began = time.perf_counter()
        found = side.engine.client.lookup(
            side.engine.namespace, groups, fetch_seconds=FETCH_SECONDS, prefill_rate=SLOW_PREFILL
        )
        took.append(time.perf_counter() - began)
        if found.groups[0].hits != hits:
            sys.exit(f"{side.name}: {found.groups[0].hits} hits instead of {hits}")
    side.figures[what].append(1e-3 / statistics.median(took))


def costs(directory: Path, rounds: int) -> dict[str, dict[str, list[float]]]:
    full = "tier.write=raise(no space left on device)"
    with ExitStack() as stack:
        sides = [
            stack.enter_context(started("off", directory, [])),
            stack.enter_context(started("off again", directory, [])),
            stack.enter_context(started("on", directory, disk(directory, "on"))),
            stack.enter_context(started("stopped", directory, disk(directory, "stopped"))),
            stack.enter_context(started("killed", directory, disk(directory, "killed"))),
            stack.enter_context(started("full", directory, disk(directory, "full"), full)),
        ]
        _, _, on, stopped, killed, full_disk = sides
        for side in (on, stopped, killed, full_disk):
            wait(lambda side=side: bool(side.metric('kvsidecar_tier_up{tier="disk"}')), "the tier works")  # type: ignore[misc]
        for pid in tier_pids(stopped.daemon):
            os.kill(pid, signal.SIGSTOP)
        stack.enter_context(killed_again_and_again(killed))
        for side in (stopped, killed, full_disk):
            break_it(side)
        for number in range(-1, rounds):  # the first one warms up
            # Each step of one daemon stands beside the same step of the others, in a new order.
            for _ in zip(*[measure(side) for side in random.sample(sides, len(sides))], strict=True):
                pass
            if number < 0:
                for side in sides:
                    side.figures.clear()
            print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
        if not metric(on.daemon, 'kvsidecar_tier_up{tier="disk"}'):
            sys.exit("the tier that should work does not")
        for side in (stopped, full_disk):
            if metric(side.daemon, 'kvsidecar_tier_up{tier="disk"}'):
                sys.exit(f"{side.name}: the tier that should not work does")
        return {side.name: dict(side.figures) for side in sides}


# -- hits ------------------------------------------------------------------------------------------------------------


def hits(directory: Path, rounds: int) -> dict[str, list[float]]:
    """Bytes a second through a daemon, and by the engine of the disk tier alone."""
    layout = replace(CONTIGUOUS, num_blocks=FETCHED_AT_A_TIME)
    found: dict[str, list[float]] = {"daemon": [], "engine alone": []}
    path, size = directory / "disk-hits", FETCHED_BLOCKS * layout.block_bytes + 128 * MiB
    flags = ["--disk-dir", str(path), "--disk-size", str(size), "--disk-admission", "all"]
    pieces: list[list[bytes]] = []
    rng = random.Random(1)
    for number in range(rounds):
        with started("hits", directory, flags, layout=layout) as side:
            wait(lambda: bool(side.metric('kvsidecar_tier_up{tier="disk"}')), "the tier works")
            engine = side.engine
            if not pieces:
                pieces = [engine.fresh(FETCHED_AT_A_TIME) for _ in range(FETCHED_BLOCKS // FETCHED_AT_A_TIME)]
                for blocks in engine.jobs([piece[at : at + 8] for piece in pieces for at in range(0, len(piece), 8)]):
                    engine.finish(engine.client.store(blocks))
                    wait(lambda: not side.metric("kvsidecar_tier_writing_bytes"), "the blocks are written")
            rng.shuffle(pieces)
            for piece in pieces:
                fetch(side, piece, found["daemon"], evicted=number > 0)
            namespace = engine.namespace
        tier = DiskBackend(path, size)
        space = ShardSpace(namespace, 0, 0, 1, layout.block_bytes)
        memory = mmap.mmap(-1, FETCHED_AT_A_TIME * layout.block_bytes)
        memory.madvise(mmap.MADV_HUGEPAGE)  # as the pool
        area = memoryview(memory)
        area[:] = bytes(len(area))
        slots = [area[at : at + layout.block_bytes] for at in range(0, len(area), layout.block_bytes)]
        count = CHUNK_BYTES // layout.block_bytes
        with ThreadPoolExecutor(8) as threads:
            for piece in pieces:
                began = time.perf_counter()
                calls = [
                    threads.submit(tier.read, space, piece[at : at + count], slots[at : at + count])
                    for at in range(0, len(piece), count)
                ]
                ends = [end for call in calls for end in call.result()]
                took = time.perf_counter() - began
                if set(ends) != {ReadEnd.DONE}:
                    sys.exit("the engine has not read everything")
                found["engine alone"].append(len(piece) * layout.block_bytes / took)
        found["direct"] = [float(tier._files.direct)]
        tier.close()
    return found


def fetch(side: Side, piece: list[bytes], speeds: list[float], *, evicted: bool) -> None:
    """From the first lookup to the end of the load, if all of it is on the disk alone."""
    engine, groups = side.engine, {0: b"".join(piece)}
    (blocks,) = engine.jobs([piece])
    began = time.perf_counter()
    found = engine.client.lookup(engine.namespace, groups, fetch_seconds=FETCH_SECONDS, prefill_rate=SLOW_PREFILL)
    before = found.groups[0].hits
    while found.coming:
        time.sleep(0.001)
        found = engine.client.lookup(engine.namespace, groups, fetch_seconds=FETCH_SECONDS, prefill_rate=SLOW_PREFILL)
    if found.groups[0].hits != len(piece):
        sys.exit(f"{found.groups[0].hits} of {len(piece)} blocks came from the disk")
    nbytes, _ = engine.finish(engine.client.load(blocks))
    if evicted and not before:
        speeds.append(nbytes / (time.perf_counter() - began))


# -- the report ------------------------------------------------------------------------------------------------------


def show(found: dict[str, dict[str, list[float]]]) -> None:
    base = found["off"]
    table = Table(title="over the daemon without a tier: the median of the rounds' ratios (quartiles)")
    table.add_column("")
    table.add_column("off", justify="right")
    for name in list(found)[1:]:
        table.add_column(name, justify="right")
    for what, values in base.items():
        cells = [f"{statistics.median(values):.2f}"]
        for name in list(found)[1:]:
            low, middle, high = statistics.quantiles(
                [value / other for value, other in zip(found[name][what], values, strict=True)], n=4
            )
            cells.append(f"{middle:.3f} ({low:.2f}-{high:.2f})")
        table.add_row(what, *cells)
    Console(width=160).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="on the disk to use; a directory in it is made, and removed")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--fetch-rounds", type=int, default=4)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvs-", dir=options.dir) as directory:
        of_hits = hits(Path(directory), options.fetch_rounds)
        direct = bool(of_hits.pop("direct")[0])
        for what, speeds in of_hits.items():
            low, middle, high = statistics.quantiles(speeds, n=4)
            print(f"{FETCHED_AT_A_TIME} blocks of 2 MiB from disk, {what}: {middle / 1e9:.2f} GB/s "
                  f"({low / 1e9:.2f}-{high / 1e9:.2f}), direct: {direct}")  # fmt: skip
        of_costs = costs(Path(directory), options.rounds)
    show(of_costs)
    if options.json:
        options.json.write_text(json.dumps({"cores": os.cpu_count(), "hits": of_hits, "costs": of_costs}, indent=1))


if __name__ == "__main__":
    main()
