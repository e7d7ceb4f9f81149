"""What shares cost a daemon: rates and lookups with and without them, in turns.

    python -m benchmarks.share_turns [--rounds 40] [--jobs 100] [--lookups 100] [--block 64KiB]

Two daemons of the host device, one with two shares, each with one rank in this process, which do the same in turns, in
changing order: jobs of 32 blocks, each of which evicts as many, four in flight; and lookups of 512 blocks with a lease.
Printed are the medians over the rounds, in microseconds, and with / without of the same round: its median, and the
first and the last tenth. "cpu" is what a job takes of the daemon's main thread.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from benchmarks.residency_turns import HITS, NAMESPACE, SECONDS, Rank, cpu_seconds, report
from kvsidecar.support.units import parse_size

SHARES = """
[[share]]
name = "chat"
namespaces = ["m"]
guaranteed = "25%"

[[share]]
name = "batch"
namespaces = ["another"]
guaranteed = "25%"
max = "50%"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--lookups", type=int, default=100)
    parser.add_argument("--block", type=parse_size, default=parse_size("64KiB"), help="bytes of a block")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvs-") as directory, ExitStack() as stack:
        daemons: dict[bool, int] = {}
        ranks: dict[bool, Rank] = {}
        for shared in (False, True):
            address, config = f"{directory}/{shared}", Path(directory, f"{shared}.toml")
            config.write_text(SHARES if shared else "")
            serve = ["serve", "--device", "host", "--socket", address, "--http-port", "0", "--config", str(config)]
            serve += ["--pool-size", str(4 * HITS * arguments.block), "--memory-check", "off"]
            daemon = subprocess.Popen([sys.executable, "-m", "kvsidecar", *serve], stderr=subprocess.DEVNULL)
            stack.callback(daemon.wait)
            stack.callback(daemon.kill)
            while not Path(address + ".attach").exists():
                assert daemon.poll() is None, "the daemon has ended"
                time.sleep(0.01)
            daemons[shared], ranks[shared] = daemon.pid, Rank(address, arguments.block)
        took: dict[tuple[str, bool], list[float]] = {}
        for number in range(arguments.rounds + 1):
            for shared in (False, True) if number % 2 else (True, False):
                rank, pid = ranks[shared], daemons[shared]
                lease = rank.client.lookup(NAMESPACE, {0: rank.known}, lease_seconds=SECONDS).lease
                began = cpu_seconds(pid)
                job = rank.stores(arguments.jobs, noted=False)
                cpu = (cpu_seconds(pid) - began) / arguments.jobs
                lookup = rank.lookups(arguments.lookups, lease_seconds=1.0)
                rank.client.release(lease)
                if number:  # the first round warms up
                    for what, seconds in (("job", job), ("cpu", cpu), ("lookup", lookup)):
                        took.setdefault((what, shared), []).append(seconds)
    report(took)


if __name__ == "__main__":
    main()
