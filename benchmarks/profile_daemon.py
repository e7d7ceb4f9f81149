"""Where the daemon's time goes while 8 ranks keep jobs outstanding: by thread, by area of the code, by function.

A private daemon on the host device, ranks in processes of their own, and py-spy looking at the daemon:

    pip install py-spy                                 # or --py-spy PATH
    python benchmarks/profile_daemon.py [--blocks 1] [--carrier local|grpc] [--direction both] [--seconds 10]
                                        [--flamegraph loop.svg]

Four windows, one after another: without a profiler (job rate, CPU time and waits of every thread, from /proc), the
holder of the interpreter lock, what threads do in C and in the kernel, and the flamegraph if one is asked for. py-spy
stops the daemon for every sample: the rates beside each window say how much that cost. It needs ptrace of the daemon,
which is a child of this process; a container needs SYS_PTRACE for that.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvsidecar.bench import machine
from kvsidecar.bench.errors import BenchError
from kvsidecar.bench.job_rate import per_second
from kvsidecar.bench.layouts import TINY
from kvsidecar.bench.options import BenchOptions
from kvsidecar.bench.processes import BenchChild
from kvsidecar.bench.setting import Setting
from kvsidecar.support.units import MiB
from kvsidecar.types import Direction

POOL = 512 * MiB
HELD_BLOCKS = 8
"""Outstanding one-block jobs of a rank; of larger jobs `HELD_JOBS`."""
HELD_JOBS = 2
GIL_RATE = 200
NATIVE_RATE = 25
"""Samples a second. Unwinding C stacks stops the daemon for several milliseconds each time."""

AREAS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("hand-over to the copiers", ("copier/link.py", "copier/copiers.py", "copier/ring.py", "copier/messages.py")),
    (
        "carrier",
        (
            "server/local_protocol.py",
            "server/service.py",
            "server/attach_protocol.py",
            "server/attachment.py",
            "server/decoding.py",
            "server/grpc_front.py",
            "server/http2_gate.py",
            "grpc/",
        ),
    ),
    ("messages", ("server/convert.py", "kvsidecar/protocol/wire.py", "kvsidecar/core/hashes.py", "google/protobuf")),
    (
        "handler",
        ("server/attach_stream.py", "server/handler.py", "kvsidecar/core/sessions.py", "kvsidecar/support/tasks.py"),
    ),
    ("cache", ("kvsidecar/cache/",)),
    ("plan", ("kvsidecar/copier/copy_plan.py", "kvsidecar/copier/recipes.py", "kvsidecar/core/layout_checks.py")),
    ("metrics", ("prometheus_client/", "kvsidecar/core/metrics.py")),
    ("log", ("kvsidecar/support/log.py", "structlog/")),
    ("jobs", ("kvsidecar/core/jobs.py", "kvsidecar/core/job.py", "kvsidecar/core/readiness.py")),
    ("event loop", ("asyncio/", "uvloop", "kvsidecar/daemon/serve.py")),
)
"""Of the innermost frame that one of these names: what numpy does for the cache is the cache's."""

NATIVE: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("waits for the interpreter lock", ("pthread_cond_timedwait", "take_gil")),
    ("garbage collector", ("gc_collect_main",)),
    ("writes to a client", ("UVStream__try_write", "sendmsg")),
    ("reads from a client", ("uv__read ", "recvmsg")),
    ("wakes a thread", ("sem_post (libc", "pthread_cond_signal", "uv_async_send")),
    ("memcpy of the host device", ("HostCopyStream.issue",)),
    ("asleep", ("epoll_wait", "Condition.wait (", "_worker (concurrent", "Thread.run (")),
    ("gRPC", ("cygrpc",)),
    ("protobuf", ("_message.abi3",)),
    ("numpy", ("_multiarray_umath",)),
)
"""The first that has a mark in the innermost frames; the rest is the interpreter's."""
INNERMOST = 6

Stacks = Mapping[tuple[str, ...], int]
"""Samples by stack: the thread's name, then frames from the outside in."""


class ProfilerError(Exception):
    """py-spy cannot do it; the text says what helps."""


def find_py_spy(path: str | None) -> str:
    found = shutil.which(path or "py-spy")
    if found is None:
        raise ProfilerError(f"{path or 'py-spy'} is not there: pip install py-spy, or name it with --py-spy")
    return found


def record(py_spy: str, pid: int, seconds: float, output: Path, *options: str) -> None:
    command = [py_spy, "record", "--pid", str(pid), "--duration", str(max(1, round(seconds))), "--threads"]
    command += ["--output", str(output), *options]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode or not output.exists():
        text = (done.stderr or done.stdout).strip().splitlines()
        hint = ""
        if "ermission" in done.stderr or "ptrace" in done.stderr:
            hint = "; it must be allowed to ptrace: run as root, or in a container with --cap-add SYS_PTRACE"
        raise ProfilerError(f"py-spy failed: {text[-1] if text else done.returncode}{hint}")


def read_stacks(file: Path) -> Stacks:
    stacks: Counter[tuple[str, ...]] = Counter()
    for line in file.read_text().splitlines():
        stack, _, count = line.rpartition(" ")
        thread, *frames = stack.split(";")
        stacks[(thread.partition(": ")[2] or thread, *frames)] += int(count)
    return stacks


def area_of(frames: Sequence[str]) -> str:
    for frame in reversed(frames):
        for name, marks in AREAS:
            if any(mark in frame for mark in marks):
                return name
    return "other"


def doing(frames: Sequence[str]) -> str:
    innermost = ";".join(frames[-INNERMOST:])
    return next((name for name, marks in NATIVE if any(mark in innermost for mark in marks)), "interpreter")


# -- what the kernel counts ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Used:
    """Of one thread, so far."""

    name: str
    user: float
    system: float
    waits: int
    """Times that it gave up its core of its own accord."""


def threads_of(pid: int) -> dict[int, Used]:
    tick = os.sysconf("SC_CLK_TCK")
    used = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        head, _, tail = (task / "stat").read_text().rpartition(")")
        fields = tail.split()
        status = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
        name = "MainThread" if int(task.name) == pid else head.partition("(")[2]
        waits = int(status.get("voluntary_ctxt_switches", 0))
        used[int(task.name)] = Used(name, int(fields[11]) / tick, int(fields[12]) / tick, waits)
    return used


def ranks_seconds(daemon: int) -> float:
    """CPU time of this process's other children so far."""
    return sum(machine.cpu_seconds(pid) for pid in machine.children_of(os.getpid()) if pid != daemon)


# -- ranks at work ------------------------------------------------------------------------------------------------


class Ranks:
    def __init__(self, children: Sequence[BenchChild], directions: Sequence[str]) -> None:
        self._children = children
        self._directions = directions
        self.rates: dict[str, float] = {}
        self.jobs = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Jobs within the block, into `rates` (a second, by direction) and `jobs`."""
        before = [child.call("count") for child in self._children]
        yield
        after = [child.call("count") for child in self._children]
        self.rates = per_second(before, after, self._directions, "jobs")
        pairs = list(zip(before, after, strict=True))
        self.jobs = sum(late[name]["jobs"] - early[name]["jobs"] for early, late in pairs for name in self._directions)

    def __str__(self) -> str:
        return ", ".join(f"{rate:.0f} {name}s" for name, rate in self.rates.items()) + " a second"


@contextmanager
def at_work(options: argparse.Namespace, directory: Path) -> Iterator[tuple[int, Ranks]]:
    """The daemon's process id, and its ranks."""
    flags = () if options.carrier == "local" else ("--local-protocol", "off")
    setting = Setting(BenchOptions(device="host", pool_bytes=POOL, serve_flags=flags), directory, lambda _: None)
    with ExitStack() as stack:
        stack.callback(setting.close)
        pid = setting.daemon().pid
        assert pid is not None
        held = HELD_BLOCKS if options.blocks == 1 else HELD_JOBS
        children = [
            stack.enter_context(setting.rank(TINY, options.blocks, held, tuple(Direction), number=number))
            for number in range(options.ranks)
        ]
        names = [each.value for each in Direction] if options.direction == "both" else [options.direction]
        for child in children:
            child.call("start", directions=names, idle=True)
        time.sleep(1)  # jobs of 512 blocks have filled the pool by then, and evict
        yield pid, Ranks(children, names)
        for child in children:
            child.call("stop")


# -- tables -------------------------------------------------------------------------------------------------------


def table(title: str, first: str, *others: str) -> Table:
    made = Table(title=title, title_justify="left", min_width=len(title))
    made.add_column(first)
    for name in others:
        made.add_column(name, justify="right")
    return made


def cpu_table(
    ranks: Ranks, before: Mapping[int, Used], after: Mapping[int, Used], of_ranks: float, seconds: float
) -> Table:
    made = table(
        f"By the kernel's clock ({ranks})",
        "thread of the daemon",
        "% of a core",
        "in the kernel",
        "us a job",
        "waits a job",
    )
    rows = []
    for task, late in after.items():
        early = before.get(task, Used("", 0.0, 0.0, 0))
        user, system = late.user - early.user, late.system - early.system
        rows.append((user + system, late.name, system, late.waits - early.waits))
    for total, name, system, waits in sorted(rows, reverse=True):
        if total > 0.002 * seconds:
            made.add_row(
                name,
                f"{100 * total / seconds:.0f}",
                f"{100 * system / seconds:.0f}",
                f"{1e6 * total / ranks.jobs:.1f}",
                f"{waits / ranks.jobs:.2f}",
            )
    made.add_row(
        "(all ranks together)", f"{100 * of_ranks / seconds:.0f}", "", f"{1e6 * of_ranks / ranks.jobs:.1f}", ""
    )
    return made


def share_table(title: str, first: str, shares: Counter[str], total: int, most: int = 20) -> Table:
    made = table(title, first, "%")
    for name, count in shares.most_common(most):
        made.add_row(name, f"{100 * count / total:.1f}")
    return made


def native_table(ranks: Ranks, stacks: Stacks) -> Table:
    by_thread: dict[str, Counter[str]] = {}
    for stack, count in stacks.items():
        by_thread.setdefault(stack[0], Counter())[doing(stack[1:])] += count
    busy = {name: of for name, of in by_thread.items() if of["asleep"] < 0.99 * of.total()}
    made = table(f"Threads by what they do ({ranks})", "% of the time", *busy)
    for what in (*(name for name, _ in NATIVE), "interpreter"):
        if any(of[what] for of in busy.values()):
            made.add_row(what, *(f"{100 * of[what] / of.total():.1f}" for of in busy.values()))
    return made


def profile(options: argparse.Namespace, directory: Path, console: Console) -> None:
    py_spy = find_py_spy(options.py_spy)
    with at_work(options, directory) as (pid, ranks):
        with ranks.counted():
            before, of_ranks, began = threads_of(pid), ranks_seconds(pid), time.monotonic()
            time.sleep(options.seconds)
            after, of_ranks, seconds = threads_of(pid), ranks_seconds(pid) - of_ranks, time.monotonic() - began
        console.print(cpu_table(ranks, before, after, of_ranks, seconds))

        gil, native = directory / "gil.raw", directory / "native.raw"
        with ranks.counted():
            record(py_spy, pid, options.seconds, gil, "--format", "raw", "--gil", "--rate", str(GIL_RATE))
        stacks = read_stacks(gil)
        samples = round(options.seconds) * GIL_RATE
        holders: Counter[str] = Counter()
        areas: Counter[str] = Counter()
        own: Counter[str] = Counter()
        for stack, count in stacks.items():
            holders[stack[0]] += count
            if stack[0] == "MainThread":
                areas[area_of(stack[1:])] += count
                own[stack[-1].rpartition(":")[0] + ")"] += count
        console.print(share_table(f"Who holds the interpreter lock ({ranks})", "thread", holders, samples))
        loop = max(1, holders["MainThread"])
        console.print(share_table("The event loop's thread while it holds it, by area", "area", areas, loop))
        console.print(share_table("... by function, own time", "function", own, loop, 25))

        with ranks.counted():
            record(
                *(py_spy, pid, options.seconds, native, "--format", "raw"),
                *("--native", "--idle", "--rate", str(NATIVE_RATE)),
            )
        console.print(native_table(ranks, read_stacks(native)))
        if options.flamegraph is not None:
            record(py_spy, pid, options.seconds, options.flamegraph, "--function", "--gil", "--rate", str(GIL_RATE))
            # Its heading is the whole command, with this machine's paths.
            picture = options.flamegraph.read_text()
            picture = picture.replace(py_spy, "py-spy").replace(str(options.flamegraph), options.flamegraph.name)
            options.flamegraph.write_text(picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1, help="of each job; at most 512")
    parser.add_argument("--carrier", choices=("local", "grpc"), default="local")
    parser.add_argument("--direction", choices=("both", *(each.value for each in Direction)), default="both")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each window")
    parser.add_argument("--flamegraph", type=Path, help="write an SVG of the lock's holders here")
    parser.add_argument("--py-spy", metavar="PATH")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvs-") as directory:
        try:
            profile(options, Path(directory), Console(width=120))
        except (ProfilerError, BenchError) as error:
            sys.exit(str(error))


if __name__ == "__main__":
    main()
