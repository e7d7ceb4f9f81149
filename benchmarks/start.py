"""What a start of ``kvsidecar serve`` costs: processor time until /health answers, and until the daemon is ready.

    python -m benchmarks.start [--old TREE] [--repeat 10]

With ``--old``, a checkout of other code, both start in turns, in this interpreter and with its packages. Both find
their modules compiled, as an installed package's are. Medians, with the smallest and largest.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import astuple, dataclass
from pathlib import Path

from benchmarks.turns import free_port

HERE = Path(__file__).resolve().parent.parent
POLL_SECONDS = 0.002
LIMIT_SECONDS = 120.0
FLAGS = ("--device", "host", "--pool-size", "64MiB", "--log-format", "json")


@dataclass(frozen=True, slots=True)
class Start:
    """Of one start, in milliseconds and MiB."""

    health_cpu: float
    health_wall: float
    ready_cpu: float
    ready_wall: float
    resident: float


NAMES = ("CPU to /health", "wall to /health", "CPU to ready", "wall to ready", "resident when ready")


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads of a process, those that have ended too: clock_getcpuclockid(3)."""
    return time.clock_gettime(~pid << 3 | 2)


def healthy(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_SECONDS) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            return connection.recv(64).startswith(b"HTTP/1.1 200")
    except OSError:
        return False


def start(tree: Path, compiled: Path) -> Start:
    """Start the daemon of a checkout, wait until it is ready, end it."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("KVSIDECAR_")}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    variables |= {"PYTHONPATH": str(tree), "PYTHONPYCACHEPREFIX": str(compiled)}
    with tempfile.TemporaryDirectory(prefix="kvs-") as directory:
        port = free_port()
        command = [sys.executable, "-m", "kvsidecar", "serve", *FLAGS, "--socket", f"{directory}/s"]
        began = time.perf_counter()
        with subprocess.Popen(
            [*command, "--http-port", str(port)],
            cwd=directory,
            env=variables,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stderr is not None
            try:
                while not healthy(port):
                    if process.poll() is not None or time.perf_counter() - began > LIMIT_SECONDS:
                        raise SystemExit(f"{tree}: the daemon answers no probe")
                    time.sleep(POLL_SECONDS)
                health = cpu_seconds(process.pid), time.perf_counter() - began
                events = (json.loads(line)["event"] for line in process.stderr if line.startswith("{"))
                if "ready" not in events:
                    raise SystemExit(f"{tree}: the daemon ended before it was ready")
                ready = cpu_seconds(process.pid), time.perf_counter() - began
                pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
                resident = pages * os.sysconf("SC_PAGESIZE") / (1 << 20)
            finally:
                process.kill()
    (health_cpu, health_wall), (ready_cpu, ready_wall) = ([1000 * each for each in taken] for taken in (health, ready))
    return Start(health_cpu, health_wall, ready_cpu, ready_wall, resident)


def shown(values: list[float]) -> str:
    return f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, help="a checkout to compare with, such as one of git worktree add")
    parser.add_argument("--repeat", type=int, default=10, metavar="COUNT")
    options = parser.parse_args()
    trees = {"new": HERE} if options.old is None else {"old": options.old.resolve(), "new": HERE}
    starts: dict[str, list[Start]] = {name: [] for name in trees}
    with tempfile.TemporaryDirectory(prefix="kvs-compiled-") as compiled:
        for tree in trees.values():
            start(tree, Path(compiled))
        for _ in range(options.repeat):
            for name, tree in trees.items():
                starts[name].append(start(tree, Path(compiled)))
    columns = {name: list(zip(*map(astuple, runs), strict=True)) for name, runs in starts.items()}
    print("| ms, MiB | " + " | ".join(trees) + (" | new / old |" if "old" in trees else " |"))
    print("|---|" + "--:|" * (len(trees) + ("old" in trees)))
    for index, name in enumerate(NAMES):
        cells = [shown(list(columns[tree][index])) for tree in trees]
        if "old" in trees:
            ratio = statistics.median(columns["new"][index]) / statistics.median(columns["old"][index])
            cells.append(f"{ratio:.2f}")
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
