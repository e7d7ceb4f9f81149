"""What it costs a daemon to tell watchers what it holds: rates and lookups with and without them, in turns.

    python -m benchmarks.residency_turns [--rounds 40] [--jobs 400] [--lookups 300] [--watchers 2] [--block 64KiB]

One daemon of the host device, one rank, watchers in a process of their own, which follow what they are told as engines
with KV events do. With them, stores carry notes on 16 tokens a block. In each round the same is done without and with
them, in changing order: jobs of 32 blocks, each of which evicts as many, four in flight; and lookups of 512
blocks. Printed are the medians over the rounds, in microseconds, and with / without of the same round: its median, and
the first and the last tenth. "cpu" is what a job takes of the daemon's main thread, which the rest of a busy machine
hardly changes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles

from kvsidecar.client import Blocks, Client, GroupLayout, HostBuffer, Namespace, Outcome, Region
from kvsidecar.support.units import parse_size

SECONDS = 60.0
NAMESPACE = Namespace("m", "bf16", "LBNHC", 16, 1, 1, "sha256")
BLOCKS, HITS = 32, 512
NOTE = bytes(105)

WATCHERS = """
import json, sys, time
from benchmarks.residency_turns import NAMESPACE
from kvsidecar.client import Client, Residency

clients = []
for line in sys.stdin:
    told = 0
    if json.loads(line):
        clients = [Client(sys.argv[1]) for _ in range(int(sys.argv[2]))]
        for each in clients:
            each.watch(NAMESPACE)
        for each in clients:
            while not any(change.kind is Residency.COMPLETE for change in each.take_residency()):
                time.sleep(0.001)
    else:
        for each in clients:
            told += sum(len(change.hashes) // 32 for change in each.take_residency(1 << 30))
            each.close()
    print(json.dumps(told), flush=True)
"""


class Rank:
    """Stores and looks up."""

    def __init__(self, address: str, block_bytes: int) -> None:
        self.buffer = HostBuffer(HITS * block_bytes)
        self.client = Client(address, timeout=SECONDS, step_budget=SECONDS)
        layout = GroupLayout(0, HITS, 0, 1, (Region(0, 0, 0, block_bytes, block_bytes, 1),))
        self.client.attach(
            instance="bench", namespace=NAMESPACE, buffers=self.buffer.kv_buffers(), groups=[layout]
        )  # fmt: skip
        self.client.wait_ready(SECONDS)
        self.known = secrets.token_bytes(32 * HITS)
        self.finish([self.client.store([Blocks(0, self.known, list(range(HITS)))])])

    def finish(self, jobs: list[int]) -> None:
        done = self.client.wait(jobs, SECONDS)
        assert all(done[job].outcome is Outcome.DONE for job in jobs), done

    def stores(self, count: int, *, noted: bool) -> float:
        """Seconds per job."""
        notes, ids = NOTE * BLOCKS if noted else b"", list(range(BLOCKS))
        names = [secrets.token_bytes(32 * BLOCKS) for _ in range(count)]
        jobs: list[int] = []
        began = time.perf_counter()
        for each in names:
            if len(jobs) == 4:
                self.finish([jobs.pop(0)])
            jobs.append(self.client.store([Blocks(0, each, ids, notes)]))
        self.finish(jobs)
        return (time.perf_counter() - began) / count

    def lookups(self, count: int, lease_seconds: float = 0.0) -> float:
        """Median seconds of one, while nothing is stored."""
        taken = []
        for _ in range(count):
            began = time.perf_counter()
            found = self.client.lookup(NAMESPACE, {0: self.known}, lease_seconds=lease_seconds)
            taken.append(time.perf_counter() - began)
            assert found.groups[0].hits == HITS
            if found.lease is not None:
                self.client.release(found.lease)
        return median(taken)


def cpu_seconds(pid: int) -> float:
    """Of the main thread."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def report(took: Mapping[tuple[str, bool], Sequence[float]]) -> None:
    """Print the seconds of each round, by what was done and whether with it."""
    print("            without us   with us   with / without   first and last tenth")
    for what in ("job", "cpu", "lookup"):
        off, on = took[what, False], took[what, True]
        shares = [after / before for before, after in zip(off, on, strict=True)]
        tenths = quantiles(shares, n=10)
        print(
            f"{what:10} {median(off) * 1e6:11.1f} {median(on) * 1e6:9.1f} {median(shares):16.3f}"
            f"   {tenths[0]:.3f} {tenths[-1]:.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=400)
    parser.add_argument("--lookups", type=int, default=300)
    parser.add_argument("--watchers", type=int, default=2)
    parser.add_argument("--block", type=parse_size, default=parse_size("64KiB"), help="bytes of a block")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvs-") as directory:
        address = str(Path(directory, "s"))
        serve = ["serve", "--device", "host", "--socket", address, "--http-port", "0"]
        serve += ["--pool-size", str(4 * HITS * arguments.block), "--memory-check", "off"]
        daemon = subprocess.Popen([sys.executable, "-m", "kvsidecar", *serve], stderr=subprocess.DEVNULL)
        watchers = subprocess.Popen(
            [sys.executable, "-c", WATCHERS, address, str(arguments.watchers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert watchers.stdin is not None
        assert watchers.stdout is not None

        def watch(on: bool) -> int:
            print(json.dumps(on), file=watchers.stdin, flush=True)
            return int(json.loads(watchers.stdout.readline()))

        try:
            while not Path(address + ".attach").exists():
                time.sleep(0.01)
            rank = Rank(address, arguments.block)
            took: dict[tuple[str, bool], list[float]] = {
                each: [] for each in itertools.product(["job", "cpu", "lookup"], [False, True])
            }
            told = 0
            for number in range(arguments.rounds + 1):
                for on in (False, True) if number % 2 else (True, False):
                    if on:
                        watch(True)
                    # The known blocks must survive what is stored: the daemon leases them meanwhile.
                    lease = rank.client.lookup(NAMESPACE, {0: rank.known}, lease_seconds=SECONDS).lease
                    began = cpu_seconds(daemon.pid)
                    job = rank.stores(arguments.jobs, noted=on)
                    cpu = (cpu_seconds(daemon.pid) - began) / arguments.jobs
                    lookup = rank.lookups(arguments.lookups)
                    rank.client.release(lease)
                    if on:
                        told += watch(False)
                    if number:  # the first round warms up
                        took["job", on].append(job)
                        took["cpu", on].append(cpu)
                        took["lookup", on].append(lookup)
        finally:
            for process in (watchers, daemon):
                process.kill()
                process.wait()
    print(f"{told} blocks were told to {arguments.watchers} watchers")
    report(took)


if __name__ == "__main__":
    main()
