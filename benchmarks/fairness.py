"""What one greedy tenant costs the others: 8 tenants load from one daemon, and one of them keeps many jobs queued.

    python -m benchmarks.fairness [--old ../old/.venv/bin/python] [--rounds 10] [--jobs 100] [--device host]

Seven tenants load 8 blocks of 256 KiB at a time, one tenant after the other; the eighth, a process of its own, keeps 64
jobs of 64 blocks outstanding, or rests. Both are measured in turns, in the same daemon. Printed are the milliseconds of
a job of the seven, and how many times as long it takes beside the greedy tenant. ``--old``: also with the daemon of
another version.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles

from kvsidecar.client import Blocks, Client, GroupLayout, HostBuffer, Namespace, Region

ROW, BLOCKS, TENANTS, SECONDS = 256 << 10, 64, 8, 120.0
LIGHT, HEAVY, OUTSTANDING = 8, 64, 64


class Tenant:
    def __init__(self, address: str, number: int) -> None:
        namespace = Namespace(f"tenant {number}", "bf16", "LBNHC", 16, 1, 1, "sha256")
        self.names = [hashlib.sha256(f"{number} {each}".encode()).digest() for each in range(BLOCKS)]
        self.buffer = HostBuffer(BLOCKS * ROW)
        self.client = Client(address, timeout=SECONDS, step_budget=SECONDS)
        region = Region(0, 0, 0, ROW, ROW, 1)
        self.client.attach(
            instance=f"tenant {number}", namespace=namespace, buffers=self.buffer.kv_buffers(),
            groups=[GroupLayout(0, BLOCKS, 0, 1, (region,))],
        )  # fmt: skip
        self.client.wait_ready(SECONDS)
        self.finish(self.client.store([Blocks(0, self.names, list(range(BLOCKS)))]))

    def load(self, count: int) -> int:
        return self.client.load([Blocks(0, self.names[:count], list(range(count)))], timeout=SECONDS)

    def finish(self, job: int) -> None:
        assert self.client.wait([job], SECONDS)[job].outcome == "done"


def be_greedy(address: str) -> None:
    """Told by lines on stdin: work, or rest."""
    tenant = Tenant(address, TENANTS)
    working = threading.Event()

    def work() -> None:
        jobs: list[int] = []
        while working.wait():
            while working.is_set():
                jobs += [tenant.load(HEAVY) for _ in range(OUTSTANDING - len(jobs))]
                tenant.finish(jobs.pop(0))
            while jobs:
                tenant.finish(jobs.pop(0))
            print("rests", flush=True)

    threading.Thread(target=work, daemon=True).start()
    print("ready", flush=True)
    for line in sys.stdin:
        (working.set if line.strip() == "work" else working.clear)()


def measure(python: str, directory: Path, device: str, rounds: int, count: int) -> dict[str, list[list[float]]]:
    """Milliseconds of each job, by whether the greedy tenant works, in each round."""
    directory.mkdir()
    address = str(directory / "kvs.sock")
    flags = ("--device", device, "--http-port", "0", "--pool-size", "256MiB", "--memory-check", "off")
    with ExitStack() as stack:

        def start(*command: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        start(python, "-P", "-m", "kvsidecar", "serve", "--socket", address, "--log-level", "error", *flags)
        while not Path(address + ".attach").exists():
            time.sleep(0.05)
        tenants = [Tenant(address, number) for number in range(TENANTS - 1)]
        greedy = start(sys.executable, "-m", "benchmarks.fairness", "--greedy", address)
        assert greedy.stdin is not None
        assert greedy.stdout is not None
        greedy.stdout.readline()
        found: dict[str, list[list[float]]] = {"alone": [], "beside": []}
        for _ in range(rounds):
            for when, taken in found.items():
                if when == "beside":
                    print("work", file=greedy.stdin, flush=True)
                    time.sleep(0.2)  # until its jobs are queued
                taken.append([])
                for number in range(count):
                    tenant = tenants[number % len(tenants)]
                    began = time.perf_counter()
                    tenant.finish(tenant.load(LIGHT))
                    taken[-1].append(1e3 * (time.perf_counter() - began))
                if when == "beside":
                    print("rest", file=greedy.stdin, flush=True)
                    greedy.stdout.readline()
        for tenant in tenants:
            tenant.client.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", help="Python of another version's environment")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=100, help="of each round, alone and beside")
    parser.add_argument("--device", default="host")
    parser.add_argument("--greedy", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.greedy:
        be_greedy(options.greedy)
        return
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
