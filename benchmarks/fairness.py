"""What one greedy tenant costs the others: 8 tenants load from one daemon, and one of them keeps many jobs queued.

    python -m benchmarks.fairness [--old ../old/.venv/bin/python] [--rounds 10] [--jobs 100] [--device host]

Seven tenants load 8 blocks of 256 KiB at a time, one tenant after the other; the eighth, a process of its own, keeps 64
jobs of 64 blocks outstanding, or rests. Both are measured in turns, in the same daemon. Printed are the milliseconds of
a job of the seven, and how many times as long it takes beside the greedy tenant. ``--old``: also with the daemon of
another version.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np

from kvsidecar.bench.engine import AttachedEngine, attached
from kvsidecar.bench.layouts import Form, Layout
from kvsidecar.bench.processes import BenchChild, private_daemon, serve
from kvsidecar.client import Blocks
from kvsidecar.support.units import KiB, MiB

BLOCKS, TENANTS = 64, 8
LAYOUT = Layout("fairness", Form.CONTIGUOUS, 1, 256 * KiB, "of a tenant", num_blocks=BLOCKS)
LIGHT, HEAVY, OUTSTANDING = 8, 64, 64


class Tenant:
    """Has stored all of its blocks, and loads some of them."""

    def __init__(self, stack: ExitStack, socket: str, number: int) -> None:
        rng = np.random.default_rng(number)
        self.engine: AttachedEngine = stack.enter_context(
            attached(socket, LAYOUT, None, run=f"tenant-{number}", rng=rng)
        )
        self._hashes = self.engine.fresh(BLOCKS)
        self.engine.finish(self.engine.client.store(self._blocks(BLOCKS)))

    def _blocks(self, count: int) -> list[Blocks]:
        return [Blocks(0, self._hashes[:count], list(range(count)))]

    def load(self, count: int) -> int:
        return self.engine.client.load(self._blocks(count), timeout=120.0)


class Greedy:
    """Keeps jobs outstanding from `work` to `rest`."""

    def __init__(self, tenant: Tenant) -> None:
        self._tenant = tenant
        self._working = False
        self._thread = threading.Thread()

    def work(self) -> dict[str, Any]:
        self._working = True
        self._thread = threading.Thread(target=self._jobs)
        self._thread.start()
        return {}

    def rest(self) -> dict[str, Any]:
        self._working = False
        self._thread.join()
        return {}

    def _jobs(self) -> None:
        jobs: list[int] = []
        while self._working:
            jobs += [self._tenant.load(HEAVY) for _ in range(OUTSTANDING - len(jobs))]
            self._tenant.engine.finish(jobs.pop(0))
        for job in jobs:
            self._tenant.engine.finish(job)


def be_greedy(socket: str) -> None:
    with ExitStack() as stack:
        greedy = Greedy(Tenant(stack, socket, TENANTS))
        serve({"work": greedy.work, "rest": greedy.rest})


def measure(python: str, directory: Path, device: str, rounds: int, count: int) -> dict[str, list[list[float]]]:
    """Milliseconds of each job, by whether the greedy tenant works, in each round."""
    directory.mkdir()
    with ExitStack() as stack:
        daemon = stack.enter_context(
            private_daemon(directory, device, 256 * MiB, ["--memory-check", "off"], python=(python, "-P"))
        )
        tenants = [Tenant(stack, daemon.socket, number) for number in range(TENANTS - 1)]
        greedy = stack.enter_context(closing(BenchChild("benchmarks.fairness", {"socket": daemon.socket}, directory)))
        found: dict[str, list[list[float]]] = {"alone": [], "beside": []}
        for _ in range(rounds):
            for when, taken in found.items():
                if when == "beside":
                    greedy.call("work")
                    time.sleep(0.2)  # until its jobs are queued
                taken.append([])
                for number in range(count):
                    tenant = tenants[number % len(tenants)]
                    began = time.perf_counter()
                    tenant.engine.finish(tenant.load(LIGHT))
                    taken[-1].append(1e3 * (time.perf_counter() - began))
                if when == "beside":
                    greedy.call("rest")
    return found


def main() -> None:
    if sys.argv[1:] and sys.argv[1].startswith("{"):
        be_greedy(**json.loads(sys.argv[1]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", help="Python of another version's environment")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=100, help="of each round, alone and beside")
    parser.add_argument("--device", default="host")
    options = parser.parse_args()
    print(f"{'':8}{'alone p50':>12}{'p99':>8}{'beside p50':>12}{'p99':>8}{'times p50':>12}{'p99':>8}")
    with tempfile.TemporaryDirectory(prefix="kvs-") as directory:
        for name, python in (("old", options.old), ("new", sys.executable)):
            if python is None:
                continue
            found = measure(python, Path(directory) / name, options.device, options.rounds, options.jobs)
            p50 = {when: median(map(median, each)) for when, each in found.items()}
            p99 = {when: median(quantiles(one, n=100)[98] for one in each) for when, each in found.items()}
            times = f"{p50['beside'] / p50['alone']:12.1f}{p99['beside'] / p99['alone']:8.1f}"
            print(f"{name:8}{p50['alone']:12.2f}{p99['alone']:8.2f}{p50['beside']:12.2f}{p99['beside']:8.2f}{times}")


if __name__ == "__main__":
    main()
