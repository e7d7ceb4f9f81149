"""Runs tests again and again on less than a core each, while random processes of theirs stand still.

``python -m tests.stress --times 20 -- -m quick tests`` runs ``pytest -m quick tests`` twenty times: with 1.1 cores by a
quota of a control group, while one random process at a time (a worker, a daemon, a copier, an engine) stands still for
1.5 to 4 seconds, more than half of the time. A test that passes 20 of 20 times waits for events and not for time. At
the end, each test that has failed is named, with how often, and the exit code is 1.

As root, processes are frozen by a control group, which a test that stops or continues them itself cannot notice. An
ordinary user's are stopped by a signal, and have a quota only where systemd gives one (``systemd-run --user``).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

CGROUPS: Final = Path("/sys/fs/cgroup")
QUOTA_CORES: Final = 1.1
PAUSE_SECONDS: Final = (1.5, 4.0)
GAP_SECONDS: Final = (0.2, 2.5)
"""Between two pauses: a process of the tests stands still for two thirds of the time."""
PERIOD_MICROSECONDS: Final = 100_000


def descendants(pid: int) -> list[int]:
    """The processes that this one has started, and theirs."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found, ahead = [], [pid]
    while ahead:
        found += (more := children.get(ahead.pop(), []))
        ahead += more
    return found


class Group:
    """A control group of the tests, if this user may make one: a quota for all, and a place for who stands still."""

    def __init__(self, cores: float) -> None:
        name = f"kvsidecar-stress-{os.getpid()}"
        self.unified = (CGROUPS / "cgroup.controllers").exists()
        self.running, self.frozen = (
            (CGROUPS / name / "running", CGROUPS / name / "frozen")
            if self.unified
            else (CGROUPS / "cpu" / name, CGROUPS / "freezer" / name)
        )
        self.frozen.mkdir(parents=True)
        self.running.mkdir(parents=True)
        if self.unified:
            (self.running.parent / "cgroup.subtree_control").write_text("+cpu")
            (self.running.parent / "cpu.max").write_text(f"{int(cores * PERIOD_MICROSECONDS)} {PERIOD_MICROSECONDS}")
        else:
            (self.running / "cpu.cfs_period_us").write_text(str(PERIOD_MICROSECONDS))
            (self.running / "cpu.cfs_quota_us").write_text(str(int(cores * PERIOD_MICROSECONDS)))
        self._freeze(False)

    def _freeze(self, frozen: bool) -> None:
        if self.unified:
            (self.frozen / "cgroup.freeze").write_text("01"[frozen])
        else:
            (self.frozen / "freezer.state").write_text("FROZEN" if frozen else "THAWED")

    def pause(self, pid: int, seconds: float) -> None:
        with contextlib.suppress(ProcessLookupError, OSError):
            (self.frozen / "cgroup.procs").write_text(str(pid))
        self._freeze(True)
        time.sleep(seconds)
        self._freeze(False)
        back = self.running if self.unified else CGROUPS / "freezer"
        for each in (self.frozen / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError, OSError):
                (back / "cgroup.procs").write_text(each)

    def close(self) -> None:
        for each in (self.running, self.frozen, *([self.running.parent] if self.unified else [])):
            with contextlib.suppress(OSError):  # something of the tests has stayed
                each.rmdir()


def pause_by_signal(pid: int, seconds: float) -> None:
    """Stop a process that is not stopped already. A test that continues it meanwhile only shortens the pause."""
    with contextlib.suppress(OSError):
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            return
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def pausing(pid: int, group: Group | None, seed: int) -> Iterator[None]:
    """Random descendants of this process stand still meanwhile, one at a time."""
    end, dice = threading.Event(), random.Random(seed)

    def pause() -> None:
        while not end.wait(dice.uniform(*GAP_SECONDS)):
            if found := descendants(pid):
                (group.pause if group else pause_by_signal)(dice.choice(found), dice.uniform(*PAUSE_SECONDS))

    thread = threading.Thread(target=pause)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def run_once(arguments: Sequence[str], report: Path, group: Group | None, cores: float, seed: int) -> int:
    command = [sys.executable, "-m", "pytest", f"--junitxml={report}", *arguments]
    if group is not None:
        command = ["sh", "-c", f'echo $$ > "{group.running}/cgroup.procs" && exec "$@"', "sh", *command]
    elif shutil.which("systemd-run") and os.environ.get("DBUS_SESSION_BUS_ADDRESS"):
        command = ["systemd-run", "--user", "--scope", "--quiet", f"--property=CPUQuota={cores:.0%}", *command]
    with subprocess.Popen(command) as process, pausing(process.pid, group, seed):
        return process.wait()


def failures_of(report: Path) -> list[str]:
    """The tests that have failed, or could not be set up or torn down, of a report of pytest."""
    return sorted(
        {
            f"{case.get('classname')}::{case.get('name')}"
            for case in ET.parse(report).iter("testcase")
            if case.find("failure") is not None or case.find("error") is not None
        }
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stress", description=__doc__.partition("\n")[0])
    parser.add_argument("--times", type=int, default=20, help="runs (%(default)s)")
    parser.add_argument("--cores", type=float, default=QUOTA_CORES, help="quota of all processes (%(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="who stands still when; printed at the start")
    parser.add_argument("arguments", nargs="+", help="arguments of pytest, behind --")
    options = parser.parse_args(argv)
    seed = random.SystemRandom().randrange(1 << 16) if options.seed is None else options.seed
    try:
        group: Group | None = Group(options.cores)
    except OSError as error:
        group = None
        print(f"no control group ({error}): processes are stopped by signals")
    failed, red = Counter[str](), 0
    try:
        with tempfile.TemporaryDirectory() as directory:
            for number in range(options.times):
                report = Path(directory, f"{number}.xml")
                print(f"run {number + 1} of {options.times}, seed {seed + number}", flush=True)
                started = time.monotonic()
                code = run_once(options.arguments, report, group, options.cores, seed + number)
                names = failures_of(report) if report.exists() else ["the run itself"]
                failed.update(names)
                red += bool(code)
                print(f"run {number + 1}: exit code {code}, {time.monotonic() - started:.0f} s, {names}", flush=True)
    finally:
        if group is not None:
            group.close()
    for name, count in failed.most_common():
        print(f"failed {count} of {options.times}: {name}")
    print(f"{options.times - red} of {options.times} runs passed")
    return int(red > 0)


if __name__ == "__main__":
    raise SystemExit(main())
