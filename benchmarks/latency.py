"""What the engine's thread and a scheduler pay for the daemon: submission, poll, lookup, and jobs of one block.

A private daemon on the host device, one measuring process (more for the job rate), both carriers:

    python benchmarks/latency.py [--carrier lane|grpc|both] [--seconds 2] [--json]

Times are of this machine and of what else runs on it; compare within one run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np

from kvsidecar.client import (
    Blocks,
    Client,
    GroupLayout,
    HostBuffer,
    LookupMode,
    LookupResult,
    Namespace,
    Outcome,
    Region,
)

NAMESPACE = Namespace("latency", "bf16", "LBNHC", 16, 1, 1, "sha256")
BLOCK_BYTES = 4096
NUM_BLOCKS = 1024
"""Of a rank's own buffer."""
WAIT = 60.0


@dataclass(frozen=True, slots=True)
class Microseconds:
    """Quantiles of one kind of call."""

    p50: float
    p99: float
    count: int

    @classmethod
    def of(cls, seconds: list[float]) -> Microseconds:
        p50, p99 = np.percentile(seconds, (50, 99)) * 1e6
        return cls(round(float(p50), 1), round(float(p99), 1), len(seconds))

    def __str__(self) -> str:
        return f"{self.p50:9.1f} {self.p99:9.1f}   {self.count}"


def hashes(kind: int, start: int, count: int) -> bytes:
    """``count`` packed block hashes: no two calls with other arguments have one in common."""
    numbers = np.zeros((count, 4), "<u8")
    numbers[:, 0] = np.arange(start, start + count)
    numbers[:, 1] = kind
    numbers[:, 2] = numbers[:, 0] * 0x9E3779B97F4A7C15  # engines' hashes are spread evenly
    return numbers.tobytes()


class Rank:
    """An attached client whose KV cache has blocks of one row."""

    def __init__(self, socket: str, *, fast_lane: bool, instance: str = "latency") -> None:
        self.buffer = HostBuffer(NUM_BLOCKS * BLOCK_BYTES)
        self.client = Client(socket, fast_lane=fast_lane, timeout=WAIT, step_budget=WAIT, job_timeout=None)
        region = Region(0, 0, NUM_BLOCKS * BLOCK_BYTES, BLOCK_BYTES, BLOCK_BYTES, 1)
        self.client.attach(
            instance=instance,
            namespace=NAMESPACE,
            buffers=self.buffer.kv_buffers(),
            groups=[GroupLayout(0, NUM_BLOCKS, 0, 1, (region,))],
            retry=True,
        )
        assert self.client.wait_ready(WAIT).ready
        assert self.client.fast_lane == fast_lane

    def close(self) -> None:
        self.client.close()
        self.buffer.close()


def repeat(seconds: float, call: Callable[[int], float | None], *, between: float = 0.0) -> list[float]:
    """Time calls for so long, at least 20 of them. The first tenth warms up.

    Args:
        call: of the number of the repetition; may return its own time.
        between: seconds to wait after each, as between the steps of an engine.
    """
    took: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(took) < 20:
        began = time.perf_counter()
        own = call(len(took))
        took.append(time.perf_counter() - began if own is None else own)
        if between:
            time.sleep(between)
    return took[len(took) // 10 :]


def submit_cost(rank: Rank, blocks: int, seconds: float) -> Microseconds:
    """Of the engine's thread, for a store of so many blocks; one job at a time is under way."""
    ids = np.arange(blocks, dtype=np.int64)

    def submit(number: int) -> float:
        part = [Blocks(0, hashes(1, number * blocks, blocks), ids)]
        began = time.perf_counter()
        job = rank.client.store(part)
        took = time.perf_counter() - began
        assert rank.client.wait([job], WAIT)[job].outcome is Outcome.DONE
        return took

    return Microseconds.of(repeat(seconds, submit))


def empty_poll_cost(rank: Rank, seconds: float) -> Microseconds:
    def poll(_: int) -> None:
        assert not rank.client.poll()

    return Microseconds.of(repeat(seconds, poll))


def lookup_cost(
    client: Client, count: int, seconds: float, *, hit: bool, mode: LookupMode = LookupMode.PREFIX
) -> Microseconds:
    """Of so many hashes, as bytes apart as engines have them; hits must have been stored by `fill`."""
    packed = hashes(0 if hit else 99, 0, count)
    groups = {0: [packed[start : start + 32] for start in range(0, len(packed), 32)]}
    found: LookupResult | None = None

    def lookup(_: int) -> None:
        nonlocal found
        found = client.lookup(NAMESPACE, groups, mode=mode)

    took = repeat(seconds, lookup)
    assert found is not None
    assert found.groups[0].hits == (count if hit else 0)
    return Microseconds.of(took)


def fill(rank: Rank, count: int) -> None:
    """Store what `lookup_cost` finds."""
    job = rank.client.store([Blocks(0, hashes(0, 0, count), np.arange(count, dtype=np.int64))])
    assert rank.client.wait([job], WAIT)[job].outcome is Outcome.DONE


def round_trip(rank: Rank, *, load: bool, seconds: float) -> Microseconds:
    """A job of one block, from its submission until the engine's thread knows its end."""
    submit = rank.client.load if load else rank.client.store

    def trip(number: int) -> float:
        block = [Blocks(0, hashes(0, 0, 1) if load else hashes(2, number, 1), [0])]
        began = time.perf_counter()
        job = submit(block)
        done = rank.client.wait([job], WAIT)
        took = time.perf_counter() - began
        assert done[job].outcome is Outcome.DONE
        return took

    return Microseconds.of(repeat(seconds, trip))


def job_rate(socket: str, *, ranks: int, fast_lane: bool, seconds: float, outstanding: int = 8) -> float:
    """Jobs of one block a second, stores and loads in turn, over all ranks; each is a process."""
    context = get_context("spawn")
    barrier = context.Barrier(ranks)
    with context.Pool(ranks, _share, (barrier,)) as pool:
        arguments = [(socket, rank, fast_lane, seconds, outstanding) for rank in range(ranks)]
        return sum(pool.starmap(_rate_of_one, arguments, chunksize=1))


_barrier: Barrier


def _share(barrier: Barrier) -> None:
    global _barrier
    _barrier = barrier


def _rate_of_one(socket: str, number: int, fast_lane: bool, seconds: float, outstanding: int) -> float:
    rank = Rank(socket, fast_lane=fast_lane, instance=f"rate-{number}")
    fill(rank, 1)
    known = hashes(0, 0, 1)
    client, submitted, ended, running = rank.client, 0, 0, 0
    _barrier.wait(WAIT)
    began = time.perf_counter()
    while time.perf_counter() < began + seconds:
        while running < outstanding:
            if submitted % 2:
                client.load([Blocks(0, known, [1 + submitted % 512])])
            else:
                client.store([Blocks(0, hashes(1000 + number, submitted, 1), [0])])
            submitted += 1
            running += 1
        done = client.poll()
        assert all(each.outcome is Outcome.DONE for each in done)
        ended += len(done)
        running -= len(done)
        if not done:
            time.sleep(0.0005)  # an engine polls once a step
    took = time.perf_counter() - began
    rank.close()
    return ended / took


@contextlib.contextmanager
def private_daemon(*flags: str) -> Iterator[str]:
    """A daemon on the host device; its socket."""
    with tempfile.TemporaryDirectory(prefix="kvs-") as directory:
        socket = str(Path(directory) / "kvs.sock")
        command = [sys.executable, "-m", "kvsidecar", "serve", "--device", "host", "--socket", socket]
        command += ["--pool-size", "64MiB", "--http-port", "0", "--log-level", "warning", *flags]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("KVSIDECAR_")}
        with subprocess.Popen(command, env=clean) as process:
            try:
                yield socket
            finally:
                process.terminate()


def measure(socket: str, *, fast_lane: bool, seconds: float) -> dict[str, Any]:
    """Every row, by name."""
    with contextlib.ExitStack() as stack:
        scheduler = stack.enter_context(Client(socket, fast_lane=fast_lane, timeout=WAIT, step_budget=WAIT))
        rank = Rank(socket, fast_lane=fast_lane)
        stack.callback(rank.close)
        fill(rank, 512)
        rows: dict[str, Any] = {
            "submit 1 block": submit_cost(rank, 1, seconds),
            "submit 512 blocks": submit_cost(rank, 512, seconds),
            "empty poll": empty_poll_cost(rank, seconds / 4),
        }
        fill(rank, 512)  # the stores above may have evicted them
        for count in (1, 64, 512):
            rows[f"lookup {count} hits"] = lookup_cost(scheduler, count, seconds, hit=True)
        rows["lookup 4096 misses"] = lookup_cost(scheduler, 4096, seconds, hit=False)
        rows["lookup 4096 misses, bitmap"] = lookup_cost(scheduler, 4096, seconds, hit=False, mode=LookupMode.BITMAP)
        rows["store 1 block, round trip"] = round_trip(rank, load=False, seconds=seconds)
        fill(rank, 1)
        rows["load 1 block, round trip"] = round_trip(rank, load=True, seconds=seconds)
    for ranks in (1, 8):
        rate = job_rate(socket, ranks=ranks, fast_lane=fast_lane, seconds=seconds)
        rows[f"jobs per second, {ranks} ranks"] = round(rate)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--carrier", choices=("lane", "grpc", "both"), default="both")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each row")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    for carrier in ("lane", "grpc") if options.carrier == "both" else (options.carrier,):
        with private_daemon() as socket:
            results[carrier] = measure(socket, fast_lane=carrier == "lane", seconds=options.seconds)
        if not options.json:
            print(f"{carrier + ', us':34} {'p50':>9} {'p99':>9}   calls")
            for name, value in results[carrier].items():
                print(f"{name:34} {value!s:>9}")
    if options.json:
        print(json.dumps(results, default=asdict, indent=2))


if __name__ == "__main__":
    main()
