"""Plants each bug of `tests.planted.bugs` in a copy of the tree, and runs the tests that must find it.

    python -m tests.planted [--jobs N] [WORD]

The tests run first without any bug: one that fails anyway finds nothing. Then a line is printed for each bug. Exits
with 1 if a bug survives, if the code no longer has what an entry replaces, or if the tests cannot be run.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path
from queue import SimpleQueue

from hatch_build import KERNELS, compile_kernels
from tests.planted.bugs import BUGS, Bug

ROOT = Path(__file__).parents[2]
LEAST_SECONDS, LONGER = 60.0, 10.0
"""Tests that take so many times as long as without the bug, and this long at least, hang, which finds it as well."""
FAILED = 1
"""What pytest exits with when a test has failed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    verdict: str
    """``found``, ``hangs`` or what is wrong."""
    seconds: float
    detail: str = ""

    @property
    def is_found(self) -> bool:
        return self.verdict in ("found", "hangs")


class Copies:
    """Copies of the tree, each used by one run of tests at a time."""

    def __init__(self, root: Path, parent: Path, count: int) -> None:
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        files = subprocess.run(command, cwd=root, check=True, capture_output=True).stdout.split(b"\0")
        self._free: SimpleQueue[Path] = SimpleQueue()
        for number in range(count):
            for name in filter(None, map(os.fsdecode, files)):
                if (root / name).exists():  # it may have been removed since it was added
                    (target := parent / str(number) / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(root / name, target, follow_symlinks=False)
            if (root / f"{KERNELS}.abi3.so").exists():
                compile_kernels(parent / str(number), parent / str(number) / f"{KERNELS}.abi3.so")
            self._free.put(parent / str(number))

    @contextmanager
    def one(self) -> Iterator[Path]:
        copy = self._free.get()
        yield copy
        self._free.put(copy)


@contextmanager
def planted(bug: Bug, copy: Path) -> Iterator[None]:
    path = copy / bug.file
    before = path.read_text()
    # Python recognizes what it has compiled by second and length.
    compiled = Path(cache_from_source(str(path)))

    def put(text: str) -> None:
        compiled.unlink(missing_ok=True)
        path.write_text(text)
        if path.suffix == ".c":
            compile_kernels(copy, path.with_suffix(".abi3.so"))

    put(bug.plant(before))
    yield
    put(before)


def run_tests(copy: Path, tests: Sequence[str], limit: float | None = None) -> tuple[int | None, str, float]:
    """The exit status, None if they hang; their output; the seconds that they took."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "-p", "no:cacheprovider"]
    command += ["-p", "tests.planted.examples", "--hypothesis-profile=planted", "-m", "not alone and not torch", *tests]
    command += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of the plugin's package
    began = time.monotonic()
    with subprocess.Popen(
        command,
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    ) as process:
        status: int | None
        try:
            output, _ = process.communicate(timeout=limit)
            status = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, status = process.communicate()[0], None
    return status, output, time.monotonic() - began


def outcome_of(bug: Bug, copy: Path, limit: float) -> Outcome:
    if problem := bug.problem(copy):
        return Outcome("is no more", 0.0, problem)
    with planted(bug, copy):
        status, output, seconds = run_tests(copy, bug.tests, limit)
    if status is None:
        return Outcome("hangs", seconds)
    if status == 0:
        return Outcome("SURVIVES", seconds, " ".join(bug.tests))
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    if status == FAILED and failed:
        return Outcome("found", seconds, failed[1])
    if status < 0:
        return Outcome("found", seconds, signal.Signals(-status).name)
    return Outcome("does not run", seconds, output[-1000:])


def main(arguments: Sequence[str], bugs: Sequence[Bug] = BUGS, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=__doc__.partition("\n")[0])
    parser.add_argument("word", nargs="?", default="", help="only bugs whose file or name has it")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="at a time (one for each core)")
    options = parser.parse_args(arguments)
    bugs = [bug for bug in bugs if options.word in f"{bug.file}: {bug.name}"]
    with (
        tempfile.TemporaryDirectory(prefix="kvs-planted-") as parent,
        ThreadPoolExecutor(options.jobs) as threads,
    ):
        copies = Copies(root, Path(parent), options.jobs)

        def run_without(test: str) -> float | None:
            with copies.one() as copy:
                status, output, seconds = run_tests(copy, [test])
            if status:
                print(f"without any bug {test} exits with {status}:\n{output}", flush=True)
            return None if status else seconds

        tests = sorted({test for bug in bugs for test in bug.tests if (root / test).exists()})
        times = dict(zip(tests, threads.map(run_without, tests), strict=True))
        if None in times.values():
            return 1

        def run_with(bug: Bug) -> Outcome:
            usual = sum(times.get(test) or 0.0 for test in bug.tests)
            with copies.one() as copy:
                return outcome_of(bug, copy, max(LEAST_SECONDS, LONGER * usual))

        outcomes = []
        for bug, outcome in zip(bugs, threads.map(run_with, bugs), strict=True):
            print(f"{outcome.verdict:8} {outcome.seconds:5.1f} s  {bug.file}: {bug.name}: {outcome.detail}", flush=True)
            outcomes.append(outcome)
    left = sum(not each.is_found for each in outcomes)
    print(f"{len(outcomes) - left} of {len(outcomes)} planted bugs are found")
    return 1 if left or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
