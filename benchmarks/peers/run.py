"""Measure PegaFlow, LMCache, vLLM's own copy path and the bare driver on the same shapes, one after the other.

    python -m benchmarks.peers.run [--only pegaflow,lmcache,vllm,driver] [--quick] [--repeat 8] [--json FILE]

It installs nothing. What is missing, does not start, or fails is named in the table with the reason, and the others go
on. README.md says what to install and what each number includes.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from benchmarks.peers import servers
from benchmarks.peers.processes import Child, PeerFailedError
from benchmarks.peers.report import Problem, Report, Row, Transfer, from_line
from benchmarks.peers.shapes import DEPTH, SHAPES, pool_gib, shape_named
from benchmarks.peers.worker import QUICK_REPEAT, Settings, arguments_of

SLOW_FALLBACK: Final = "torch baseline"
"""What LMCache logs, as a warning, when its compiled extension does not load: its copies are then slow torch code."""


@dataclass(frozen=True)
class System:
    """Something that is measured.

    Args:
        modules: that must be importable.
        install: what to tell someone who lacks one.
        worker: module that measures, and its first arguments.
        distributions: whose versions belong to the result.
    """

    name: str
    modules: Sequence[str]
    install: str
    worker: Sequence[str]
    distributions: Sequence[str] = ()

    def missing(self) -> str:
        """Why it cannot be measured here; empty if nothing is missing."""
        absent = [name for name in self.modules if importlib.util.find_spec(name) is None]
        return f"no module {', '.join(absent)}: {self.install}" if absent else ""


SYSTEMS: Final = (
    System(
        "driver",
        ["numpy"],
        "pip install -r benchmarks/peers/requirements-driver.txt",
        ["benchmarks.peers.in_process", "driver"],
    ),
    System(
        "vllm",
        ["numpy"],
        "pip install -r benchmarks/peers/requirements-driver.txt",
        ["benchmarks.peers.in_process", "vllm"],
    ),
    System(
        "pegaflow",
        ["torch", "pegaflow"],
        "pip install -r benchmarks/peers/requirements-pegaflow.txt",
        ["benchmarks.peers.pegaflow_client"],
        ["torch", "pegaflow-llm-cu13"],
    ),
    System(
        "lmcache",
        ["torch", "lmcache", "zmq"],
        "pip install torch==2.11.0; pip install --no-deps -r benchmarks/peers/requirements-lmcache.txt",
        ["benchmarks.peers.lmcache_client"],
        ["torch", "lmcache"],
    ),
)


@contextmanager
def served(system: System, settings: Settings, logs: Path) -> Iterator[tuple[Settings, Child | None]]:
    """The peer's server, ready, and the settings that name its ports. Systems without a server get none."""
    log = logs / f"{system.name}-server.log"
    if system.name == "pegaflow":
        serving = servers.pegaflow(pool_gib(settings.repeat + 1) << 30, log)
    elif system.name == "lmcache":
        serving = servers.lmcache(pool_gib(max(settings.repeat, 2 * DEPTH) + 1) << 30, log)
    else:
        yield settings, None
        return
    with serving as server:
        yield replace(settings, rpc=server.socket, http=f"127.0.0.1:{server.http}"), server.process


def measure(system: System, settings: Settings, logs: Path, seconds: float) -> list[Row]:
    """All rows of one system. It never raises for what the system does: that becomes a row."""
    if why := system.missing():
        return [Problem(system.name, f"not installed: {why}")]
    settings.rows.unlink(missing_ok=True)
    failure: list[Row] = []
    invalid = ""
    try:
        with served(system, settings, logs) as (known, server):
            command = [sys.executable, "-m", *system.worker, *arguments_of(known)]
            try:
                with Child("the measurement", command, logs / f"{system.name}.log") as worker:
                    worker.wait(seconds)
            except PeerFailedError as error:
                gone = "" if server is None or server.running else f"; its server is gone: {server.last_words()}"
                failure.append(Problem(system.name, f"{error}{gone}"))
            if server is not None and SLOW_FALLBACK in server.text():
                invalid = "LMCache ran without its compiled extension (torch baseline)"
    except PeerFailedError as error:
        failure.append(Problem(system.name, str(error)))
    return [*_judged(read_rows(settings.rows), invalid), *failure]


def read_rows(path: Path) -> list[Row]:
    """The rows that a worker wrote; a last line that was cut short is left out."""
    rows: list[Row] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            rows.append(from_line(line))
        except ValueError:
            break
    return rows


def _judged(rows: list[Row], invalid: str) -> list[Row]:
    if not invalid:
        return rows
    return [replace(row, valid=False, note=invalid) if isinstance(row, Transfer) else row for row in rows]


def machine(systems: Sequence[System]) -> dict[str, str]:
    """What a reader of the figures must know about the machine, as far as it says."""
    facts = {"date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")}
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
        facts["gpu"], _, facts["driver"] = said.partition(", ")
    except (OSError, subprocess.SubprocessError):
        facts["gpu"] = "none that nvidia-smi shows"
    facts["cores"] = str(os.cpu_count())
    facts["memory"] = f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB"
    facts["kernel"], facts["python"] = platform.release(), platform.python_version()
    for name in dict.fromkeys(name for system in systems for name in system.distributions):
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            facts[name] = "not installed"
    return facts


def chosen(text: str) -> list[System]:
    """The systems of ``--only``. Raises argparse.ArgumentTypeError: one is unknown."""
    known = {system.name: system for system in SYSTEMS}
    for name in text.split(","):
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
    return [system for system in SYSTEMS if system.name in text.split(",")]


def layouts(text: str) -> str:
    try:
        return ",".join(shape_named(name).name for name in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def parser() -> argparse.ArgumentParser:
    summary, _, rest = (__doc__ or "").partition("\n")
    options = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.run",
        description=summary,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("--only", type=chosen, default=list(SYSTEMS), help="systems, with commas between (all)")
    options.add_argument("--layouts", type=layouts, default=layouts(",".join(shape.name for shape in SHAPES)))
    options.add_argument("--repeat", type=positive, default=None, help=f"jobs per row (8; {QUICK_REPEAT} with --quick)")
    options.add_argument("--quick", action="store_true", help="fewer sizes, one job at a time")
    options.add_argument("--json", type=Path, help="file for all rows; rewritten after each system")
    logs = Path(tempfile.gettempdir(), "kvsidecar-peers")
    options.add_argument("--logs", type=Path, default=logs, help="folder for logs and raw rows (%(default)s)")
    options.add_argument("--timeout", type=float, default=400.0, help="seconds for one system (%(default)g)")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    # Like Ctrl-C: it unwinds every context, which ends the children, and the table of what there is gets printed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    options.logs.mkdir(parents=True, exist_ok=True)
    repeat = options.repeat or (QUICK_REPEAT if options.quick else 8)
    shapes = tuple(shape_named(name) for name in options.layouts.split(","))
    report = Report(machine=machine(options.only))
    stopped = False
    try:
        for system in options.only:
            print(f"{system.name} ...", file=sys.stderr, flush=True)
            rows = (options.logs / f"{system.name}.jsonl").resolve()
            settings = Settings(rows=rows, repeat=repeat, quick=options.quick, shapes=shapes)
            report.add(measure(system, settings, options.logs, options.timeout))
            if options.json:
                options.json.write_text(report.as_json() + "\n", encoding="utf-8")
    except KeyboardInterrupt:
        stopped = True
        print("stopped; what follows is not all", file=sys.stderr)
    print(report.as_text())
    print(f"logs and raw rows: {options.logs}", file=sys.stderr)
    return 0 if report.transfers and not stopped else 1


if __name__ == "__main__":
    sys.exit(main())
