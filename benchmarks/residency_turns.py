"""What it costs a daemon to tell watchers what it holds: rates and lookups with and without them, in turns.

    python -m benchmarks.residency_turns [--rounds 40] [--jobs 400] [--blocks 32] [--lookups 300] [--watchers 2]

Two daemons of the host device, one rank each; one of them has watchers, in a process of their own, which follow all the
time what they are told, as engines with KV events do, and its stores carry notes on 16 tokens a block. In each round
the same is done with both, in changing order: jobs of so many blocks, each of which evicts as many, four in flight; and
lookups of 512 blocks. Printed are the medians over the rounds, in microseconds, and with / without of the same round:
its median, and the first and the last tenth. "cpu" is what a job takes of the daemon's main thread, which the rest of a
busy machine hardly changes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.turns import Script, ratio, turns
from kvsidecar.bench.engine import AttachedEngine, LeasedBlocks, attached
from kvsidecar.bench.layouts import Form, Layout
from kvsidecar.bench.processes import PrivateDaemon, private_daemon
from kvsidecar.support.units import parse_size

RUN = "turns"
HITS = 512
NOTE = bytes(105)

WATCHERS = """
import json, select, sys
from kvsidecar.bench.layouts import Layout
from kvsidecar.client import Client, Residency

clients = [Client(sys.argv[1]) for _ in range(int(sys.argv[2]))]
for each in clients:
    each.watch(Layout.from_json(json.loads(sys.argv[3])).namespace(sys.argv[4]))
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

Sides = Mapping[bool, tuple[PrivateDaemon, AttachedEngine]]
"""A daemon without, and one with what is measured; and a rank of each in this process."""


def options_of(description: str | None, **counts: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, count in {"rounds": 40, "blocks": 32, **counts}.items():
        parser.add_argument(f"--{name}", type=int, default=count)
    parser.add_argument(
        "--block", type=parse_size, default=parse_size("64KiB"), help="bytes of a block; default: 64KiB"
    )
    return parser


@contextmanager
def started(block_bytes: int, flags: Sequence[str] = ()) -> Iterator[Sides]:
    """Args: flags: of the daemon with what is measured."""
    layout = Layout(RUN, Form.CONTIGUOUS, 1, block_bytes, "blocks of any size", num_blocks=HITS)
    with tempfile.TemporaryDirectory(prefix="kvs-") as directory, ExitStack() as stack:
        sides = {}
        for on in (False, True):
            more = ["--memory-check", "off", *(flags if on else ())]
            daemon = stack.enter_context(private_daemon(Path(directory), "host", 4 * HITS * block_bytes, more))
            rng = np.random.default_rng(0)
            sides[on] = daemon, stack.enter_context(attached(daemon.socket, layout, None, run=RUN, rng=rng))
        yield sides


def compare(sides: Sides, arguments: argparse.Namespace, *, noted: bool = False, lease_seconds: float = 0.0) -> None:
    """Do the same with both in turns, and print what it takes.

    Args:
        noted: stores carry notes where there is what is measured.
        lease_seconds: of lookups.
    """
    took: dict[tuple[str, bool], list[float]] = defaultdict(list)
    for counts, order in turns(arguments.rounds, (False, True)):
        for on in order:
            daemon, engine = sides[on]
            assert daemon.pid is not None
            # What is looked up must survive what is stored: it is leased meanwhile.
            with engine.held(HITS, 1) as (held,):
                began = cpu_seconds(daemon.pid)
                seconds = {"job": stores(engine, arguments.jobs, arguments.blocks, noted=noted and on)}
                seconds["cpu"] = (cpu_seconds(daemon.pid) - began) / arguments.jobs
                seconds["lookup"] = lookups(engine, held, arguments.lookups, lease_seconds)
            for what, value in seconds.items() if counts else ():
                took[what, on].append(value)
    print("            without us   with us   with / without (tenths)")
    for what in ("job", "cpu", "lookup"):
        off, on_too = took[what, False], took[what, True]
        print(f"{what:10} {median(off) * 1e6:11.1f} {median(on_too) * 1e6:9.1f}   {ratio(off, on_too)}")


def stores(engine: AttachedEngine, count: int, num_blocks: int, *, noted: bool) -> float:
    """Seconds per job."""
    jobs = engine.jobs([engine.fresh(num_blocks) for _ in range(count)])
    if noted:
        jobs = [[replace(part, notes=NOTE * num_blocks) for part in blocks] for blocks in jobs]
    began = time.perf_counter()
    engine.run([partial(engine.client.store, blocks) for blocks in jobs], 4)
    return (time.perf_counter() - began) / count


def lookups(engine: AttachedEngine, held: LeasedBlocks, count: int, lease_seconds: float) -> float:
    """Median seconds of one, while nothing is stored."""
    taken, hashes = [], b"".join(held.hashes)
    for _ in range(count):
        began = time.perf_counter()
        found = engine.client.lookup(engine.namespace, {0: hashes}, lease_seconds=lease_seconds)
        taken.append(time.perf_counter() - began)
        assert found.groups[0].hits == HITS
        if found.lease is not None:
            engine.client.release(found.lease)
    return median(taken)


def cpu_seconds(pid: int) -> float:
    """Of the main thread."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def main() -> None:
    arguments = options_of(__doc__, jobs=400, lookups=300, watchers=2).parse_args()
    with started(arguments.block) as sides, ExitStack() as stack:
        daemon, engine = sides[True]
        layout = json.dumps(engine.layout.to_json())
        watchers = Script(stack, [sys.executable], WATCHERS, daemon.socket, arguments.watchers, layout, RUN)
        watchers.ask()
        compare(sides, arguments, noted=True)
        print(f"{watchers.ask()} blocks were told to {arguments.watchers} watchers")


if __name__ == "__main__":
    main()
