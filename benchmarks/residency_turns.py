"""What it costs a daemon to tell watchers what it holds: rates and lookups with and without them, in turns.

    python -m benchmarks.residency_turns [--rounds 40] [--jobs 400] [--lookups 300] [--watchers 2] [--block 64KiB]

Two daemons of the host device, one rank each; one of them has watchers, in a process of their own, which follow all the
time what they are told, as engines with KV events do, and its stores carry notes on 16 tokens a block. In each round
the same is done with both, in changing order: jobs of 32 blocks, each of which evicts as many, four in flight; and
lookups of 512 blocks. Printed are the medians over the rounds, in microseconds, and with / without of the same round:
its median, and the first and the last tenth. "cpu" is what a job takes of the daemon's main thread, which the rest of a
busy machine hardly changes.
"""

from __future__ import annotations

import argparse
import itertools
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
import select, sys
from benchmarks.residency_turns import NAMESPACE
from kvsidecar.client import Client, Residency

clients = [Client(sys.argv[1]) for _ in range(int(sys.argv[2]))]
for each in clients:
    each.watch(NAMESPACE)
complete, told = 0, 0
while True:
    asked = complete >= len(clients) and select.select([sys.stdin], [], [], 0.02)[0]
    for each in clients:
        for change in each.take_residency(1 << 30):
            complete += change.kind is Residency.COMPLETE
            told += len(change.hashes) // 32
    if asked:
        sys.stdin.readline()
        print(told, flush=True)
"""
"""Follow what they are told; a line is the question of how many blocks that were."""


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
    started: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory(prefix="kvs-") as directory:

        def start(*command: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            started.append(process)
            return process

        def daemon(name: str) -> tuple[str, int]:
            address = str(Path(directory, name))
            serve = ["-m", "kvsidecar", "serve", "--device", "host", "--socket", address, "--http-port", "0"]
            serve += ["--pool-size", str(4 * HITS * arguments.block), "--memory-check", "off"]
            process = start(*serve)
            while not Path(address + ".attach").exists():
                assert process.poll() is None, "the daemon has ended"
                time.sleep(0.01)
            return address, process.pid

        try:
            daemons = {on: daemon(str(on)) for on in (False, True)}
            watchers = start("-c", WATCHERS, daemons[True][0], str(arguments.watchers))

            def blocks_told() -> int:
                assert watchers.stdin is not None
                assert watchers.stdout is not None
                print(file=watchers.stdin, flush=True)
                return int(watchers.stdout.readline())

            blocks_told()
            ranks = {on: Rank(address, arguments.block) for on, (address, _) in daemons.items()}
            took: dict[tuple[str, bool], list[float]] = {
                each: [] for each in itertools.product(["job", "cpu", "lookup"], [False, True])
            }
            for number in range(arguments.rounds + 1):
                for on in (False, True) if number % 2 else (True, False):
                    rank, (_, pid) = ranks[on], daemons[on]
                    # The known blocks must survive what is stored: the daemon leases them meanwhile.
                    lease = rank.client.lookup(NAMESPACE, {0: rank.known}, lease_seconds=SECONDS).lease
                    began = cpu_seconds(pid)
                    job = rank.stores(arguments.jobs, noted=on)
                    cpu = (cpu_seconds(pid) - began) / arguments.jobs
                    lookup = rank.lookups(arguments.lookups)
                    rank.client.release(lease)
                    if number:  # the first round warms up
                        took["job", on].append(job)
                        took["cpu", on].append(cpu)
                        took["lookup", on].append(lookup)
            told = blocks_told()
        finally:
            for process in started:
                process.kill()
                process.wait()
    print(f"{told} blocks were told to {arguments.watchers} watchers")
    report(took)


if __name__ == "__main__":
    main()
