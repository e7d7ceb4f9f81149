"""The hot path of the working tree against an older version: what each operation takes of daemon and client, in turns.

    python -m benchmarks.turns [--against COMMIT] [--rounds 60] [--grpc] [--json FILE]

Without ``--against`` the older version is the last release tag. Three daemons of the host device run, each with an
engine rank in a process of its own: the older version, the working tree, and the older version again. In each round
each does the same, in changing order. The last one shows how far apart two of the same are (null). Every few rounds all
are started afresh, because processes of one version differ, too.

Printed are the medians over the rounds per operation, and new / old of the same round: its median and the interval of
95 % around it. A row is measured until its intervals for daemon and client are within 2.5 % of their middle, or for
``--rounds``; Ctrl-C prints what was measured so far. "daemon" is the thread of its event loop, "client" all threads of
its process, both in instructions where the machine counts them, else in time of the processor. Where only root may
count system calls, "reads and writes" are those that the kernel counts for everybody. "worse" and "better": the median
is more than 5 % off, and its interval apart from the null's. The exit code is 1 if anything but "wall" is worse; then
CHANGELOG.md says so, with the reason.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from io import BytesIO
from itertools import permutations
from math import comb
from pathlib import Path
from statistics import median

from benchmarks.turns import Script, counters, python_of
from hatch_build import KERNELS, compile_kernels
from kvsidecar.bench.processes import private_daemon
from kvsidecar.support.units import MiB

HERE = Path(__file__).resolve().parents[2]
ASKER = Path(__file__).with_name("asker.py")
POOL_BYTES = 32 * MiB
ROUNDS_AFRESH = 6
"""After so many rounds all processes are started again."""
TURNS = 10
"""Of each side in a round of a row."""
FEWEST_ROUNDS = 6
"""Fewer have no interval of 95 %."""
KNOWN = 0.025
CHANGED = 0.05

OLD, NEW, NULL = "old", "new", "null"
SIDES = (OLD, NEW, NULL)
ORDERS = list(permutations(SIDES))
WALL = "wall"
Work = tuple[str, int, int]
"""Kind of operation, blocks, and operations a turn."""
ROWS: Mapping[str, Work] = {
    "lookup, 1 hit": ("hits", 1, 30),
    "lookup, 64 hits": ("hits", 64, 30),
    "lookup, 512 hits": ("hits", 512, 20),
    "lookup, 64 misses": ("misses", 64, 30),
    "lookup, lease, release, 64 hits": ("lease", 64, 15),
    "lookup, 512 hits, 6 of 7 groups windows": ("windows", 512, 10),
    "store, 1 block": ("store", 1, 15),
    "load, 1 block": ("load", 1, 15),
    "store, 32 blocks": ("store", 32, 8),
    "load, 32 blocks": ("load", 32, 8),
    "store, 256 blocks": ("store", 256, 4),
    "load, 256 blocks": ("load", 256, 4),
}

Samples = dict[str, list[float]]
"""By side, one value for each round."""
Results = dict[str, dict[str, Samples]]
"""By row and by what was measured."""


# -- pure ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ratio:
    """A median with the interval around it."""

    middle: float
    low: float
    high: float

    @property
    def known(self) -> bool:
        return self.high - self.low <= 2 * KNOWN * self.middle

    def __str__(self) -> str:
        return f"{self.middle:.3f} ({self.low:.2f} to {self.high:.2f})"


def ratio_of(before: Sequence[float], after: Sequence[float]) -> Ratio:
    """After / before of the same round. Ranks of the interval are those between which the median of what was sampled
    is in 95 % of all cases, however it is distributed."""
    # One more system call where there was none is no infinity.
    ordered = sorted((second + 1e-9) / (first + 1e-9) for first, second in zip(before, after, strict=True))
    rounds, skipped, outside = len(ordered), 0, 0
    while (outside := outside + comb(rounds, skipped)) <= 0.025 * 2**rounds:
        skipped += 1
    if not skipped:
        return Ratio(median(ordered), 0.0, float("inf"))
    return Ratio(median(ordered), ordered[skipped - 1], ordered[-skipped])


def verdict(change: Ratio, null: Ratio) -> str:
    if change.middle > 1 + CHANGED and change.low > null.high:
        return "worse"
    if change.middle < 1 - CHANGED and change.high < null.low:
        return "better"
    return ""


def judged(samples: Samples) -> tuple[Ratio, Ratio, str]:
    """New / old, null / old, and the verdict."""
    change, null = (ratio_of(samples[OLD], samples[side]) for side in (NEW, NULL))
    return change, null, verdict(change, null)


def is_known(measured: Mapping[str, Samples]) -> bool:
    return bool(measured) and all(
        ratio.known
        for what in measured
        if what.startswith(("daemon", "client"))
        for ratio in judged(measured[what])[:2]
    )


def worse(results: Results) -> list[str]:
    return [
        f"{row}: {what}"
        for row, measured in results.items()
        for what, samples in measured.items()
        if not what.startswith(WALL) and judged(samples)[2] == "worse"
    ]


def table(results: Results, missing: Collection[str]) -> Iterator[str]:
    yield f"{'':40}{'per operation':24}{'old':>9}{'new':>9}  {'new / old':22}  {'null / old':22}"
    for row in ROWS:
        if row in missing:
            yield f"{row:40}not measured: the older version's lookups know no tails"
        for what, samples in results.get(row, {}).items():
            change, null, said = judged(samples)
            middles = "".join(f"{median(samples[side]):9.1f}" for side in (OLD, NEW))
            yield f"{row:40}{what:24}{middles}  {change!s:22}  {null!s:22}  {said}".rstrip()
            row = ""


# -- running -------------------------------------------------------------------------------------------------------


class Side:
    """A daemon of one version and a rank of the same."""

    def __init__(self, stack: ExitStack, directory: Path, tree: Path, *, local: bool) -> None:
        python = python_of(tree)
        self._daemon = stack.enter_context(
            private_daemon(directory, "host", POOL_BYTES, ("--memory-check", "off"), python=python)
        )
        given = json.dumps((self._daemon.socket, local, POOL_BYTES))
        self._asker = Script(stack, python, ASKER.read_text(), given)
        self.knows_tails = bool(self._asker.answer())
        assert self._daemon.pid is not None
        loop, client = [self._daemon.pid], counters.threads_of(self._asker.process.pid)
        self._counters: dict[str, counters.Counter] = {}
        for name, threads in (("daemon", loop), ("client", client)):
            if (counted := counters.instructions(stack, threads)) is not None:
                self._counters[f"{name}, 1000 instructions"] = counted
            else:
                self._counters[f"{name}, us"] = counters.microseconds(threads)
        if (calls := counters.system_calls(stack, *loop)) is not None:
            self._counters["system calls"] = calls
        else:
            self._counters["reads and writes"] = counters.reads_and_writes(*loop)

    def prepare(self, work: Work) -> None:
        self._asker.ask("prepare", *work)

    def go(self, operations: int) -> dict[str, float]:
        """By what was measured, how much for each operation."""
        before = {name: count() for name, count in self._counters.items()}
        seconds = self._asker.ask("go", operations)
        found = {name: (count() - before[name]) / operations for name, count in self._counters.items()}
        return {**found, f"{WALL}, us": 1e6 * median(seconds)}


def measure(sides: Mapping[str, Side], order: Sequence[str], work: Work) -> dict[str, dict[str, float]]:
    """By what was measured and by side: one round of one row. The sides take turns within it, too: what else runs on
    the machine for some moments meets few of their turns, and their median leaves it out."""
    kind, blocks, each = work
    for name in order:
        sides[name].prepare((kind, blocks, TURNS * each))
    taken = {name: [] for name in order}
    for turn in range(TURNS):
        for name in order if turn % 2 else order[::-1]:
            taken[name].append(sides[name].go(each))
    return {what: {name: median(each[what] for each in taken[name]) for name in order} for what in taken[OLD][0]}


class Watch:
    """Measures until all rows are known.

    Args:
        trees: the code of each side.
    """

    def __init__(self, trees: Mapping[str, Path], *, local: bool) -> None:
        self._trees, self._local = trees, local
        self.results: Results = {}
        self.missing: set[str] = set()
        """Rows that a side cannot do."""
        self._rounds = 0

    def run(self, most: int) -> None:
        while self._rounds < most and self._unknown():
            with tempfile.TemporaryDirectory(prefix="kvs-") as directory, ExitStack() as stack:
                order = ORDERS[self._rounds // ROUNDS_AFRESH % len(ORDERS)]
                sides = {name: Side(stack, Path(directory), self._trees[name], local=self._local) for name in order}
                if not all(side.knows_tails for side in sides.values()):
                    self.missing = {row for row, (kind, *_) in ROWS.items() if kind == "windows"}
                for _ in range(min(ROUNDS_AFRESH, most - self._rounds)):
                    self._round(sides)

    def _unknown(self) -> list[str]:
        return [row for row in ROWS if row not in self.missing and not is_known(self.results.get(row, {}))]

    def _round(self, sides: Mapping[str, Side]) -> None:
        order, unknown = ORDERS[self._rounds % len(ORDERS)], self._unknown()
        for row in unknown:
            measured = self.results.setdefault(row, defaultdict(lambda: defaultdict(list)))
            for what, values in measure(sides, order, ROWS[row]).items():
                for name, value in values.items():
                    measured[what][name].append(value)
        self._rounds += 1
        print(f"round {self._rounds}: {len(unknown)} rows", file=sys.stderr, flush=True)


def git(*arguments: str) -> bytes:
    done = subprocess.run(["git", *arguments], cwd=HERE, capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"git {arguments[0]}: {done.stderr.decode().strip()}")
    return done.stdout


def commit_of(named: str | None) -> str:
    """What to compare with, in full."""
    if named is None:
        if not (tags := git("tag", "--merged", "HEAD", "--sort=-creatordate").decode().split()):
            raise SystemExit("there is no release tag in this checkout: name a commit with --against")
        named = tags[0]
    return git("rev-parse", "--verify", f"{named}^{{commit}}").decode().strip()


def copies(directory: Path, commit: str) -> dict[str, Path]:
    """The code of each side, with compiled kernels if it has any. What is changed in the working tree during a run does
    not matter then."""
    old, new = directory / OLD, directory / NEW
    with tarfile.open(fileobj=BytesIO(git("archive", commit, "kvsidecar"))) as archive:
        archive.extractall(old, filter="data")
    shutil.copytree(HERE / "kvsidecar", new / "kvsidecar", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for tree in (old, new):
        if (tree / f"{KERNELS}.c").exists():
            compile_kernels(tree, tree / f"{KERNELS}.abi3.so")
    return {OLD: old, NEW: new, NULL: old}


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="COMMIT", help="or a tag; default: the last release tag")
    parser.add_argument("--rounds", type=int, default=60, help="at most; %(default)s")
    parser.add_argument("--grpc", action="store_true", help="instead of the local protocol")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write each round's values there")
    options = parser.parse_args(given)
    if options.rounds < FEWEST_ROUNDS:
        parser.error(f"fewer than {FEWEST_ROUNDS} rounds tell nothing apart")
    commit = commit_of(options.against)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="kvs-turns-") as directory:
        watch = Watch(copies(Path(directory), commit), local=not options.grpc)
        with suppress(KeyboardInterrupt):
            watch.run(options.rounds)
    results = watch.results
    if options.json:
        options.json.write_text(json.dumps({"against": commit, "rows": results}))
    print(f"working tree against {commit[:12]}, {'gRPC' if options.grpc else 'local protocol'}")
    print("\n".join(table(results, watch.missing)))
    found = worse(results)
    print(f"worse: {'; '.join(found)}" if found else "nothing is worse")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
