"""How long lookups take beside processes that keep every core busy, of daemons with and without a higher priority.

    python -m benchmarks.nice [--nice -5] [--busy 6] [--seconds 25]

Needs the right to lower a nice value (root). Two daemons on the host device are asked in turns over the local protocol;
busy processes run at 0, and the one that asks at -15, so that its own waits count little.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from tests.harness import DaemonProcess, Rank, done

BUSY = "while True: pass"


def set_nice(pid: int, nice: int) -> None:
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.setpriority(os.PRIO_PROCESS, int(task.name), nice)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nice", type=int, default=-5)
    parser.add_argument("--busy", type=int, default=3 * (os.cpu_count() or 1))
    parser.add_argument("--seconds", type=float, default=25.0)
    args = parser.parse_args()
    seconds: dict[int, list[float]] = {0: [], args.nice: []}
    with ExitStack() as stack:
        ranks = {}
        for nice in seconds:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvs")))
            daemon = stack.enter_context(DaemonProcess(directory, "--log-level", "warning"))
            daemon.wait_ready()
            ranks[nice] = rank = Rank(daemon)
            stack.callback(rank.close)
            done(rank.store("a"))
            set_nice(daemon.process.pid, nice)
        for _ in range(args.busy):
            stack.callback(subprocess.Popen([sys.executable, "-c", BUSY]).kill)
        os.setpriority(os.PRIO_PROCESS, 0, -15)
        until = time.monotonic() + args.seconds
        while time.monotonic() < until:
            for nice, rank in ranks.items():
                began = time.perf_counter()
                rank.hits("a")
                seconds[nice].append(time.perf_counter() - began)
            time.sleep(0.002)
    for nice, took in seconds.items():
        took.sort()
        half, most = took[len(took) // 2], took[len(took) * 99 // 100]
        print(f"nice {nice}: {len(took)} lookups, p50 {half * 1e3:.2f} ms, p99 {most * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
