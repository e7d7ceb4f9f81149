"""`kvsidecar bench` as a process, and a report that looks like one of an H200."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvsidecar.bench.layouts import BLOCK_COUNTS, IN_FLIGHT, LAYOUTS
from kvsidecar.bench.report import BenchReport, Measurement
from tests.harness import SECONDS, environment, eventually


def start(*arguments: str, temporary: Path | None = None, **options: Any) -> subprocess.Popen[str]:
    """Start it.

    Args:
        temporary: where it keeps its sockets and logs; what it starts has this path in its command line.
    """
    variables = {"COLUMNS": "150", **({} if temporary is None else {"TMPDIR": str(temporary)})}
    command = [sys.executable, "-m", "kvsidecar", "bench", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.Popen(command, env=environment(**variables), **pipes)


def finish(process: subprocess.Popen[str], seconds: float = 4 * SECONDS) -> subprocess.CompletedProcess[str]:
    out, err = process.communicate(timeout=seconds)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run(*arguments: str, temporary: Path | None = None) -> subprocess.CompletedProcess[str]:
    return finish(start(*arguments, temporary=temporary))


def processes_of(directory: Path) -> list[str]:
    """Command lines of living processes that name a path in this directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if f"{directory}/" in line:
                found.append(line)
    return found


def wait_gone(directory: Path) -> None:
    eventually(lambda: not processes_of(directory), lambda: processes_of(directory), pause=0.02)


def wait_line(process: subprocess.Popen[str], text: str) -> None:
    """Read its standard error up to a line with this text."""
    assert process.stderr is not None
    for line in process.stderr:
        if text in line:
            return
    raise AssertionError(f"it ended without saying {text!r}")


def report(share: float = 0.97, *, pacing: bool = False) -> BenchReport:
    """A report in which every store and load reaches this share of the limit, with one job in flight and with more.

    Args:
        pacing: with what only `benchmarks.daemon` measures.
    """
    measurements = {name: Measurement(name, "ok") for name in ("limit", "bandwidth", "lookup", "token")}
    for direction, gbps in (("store", 55.0), ("load", 55.0), ("both", 98.0)):
        measurements["limit"].add(direction=direction, gbps=gbps, best_gbps=gbps, nbytes=1 << 30)
    for layout in LAYOUTS:
        shape = {"layout": layout.name, "rows": layout.rows, "row_bytes": layout.row_bytes}
        shape["ids"] = "consecutive" if layout.consecutive else "random"
        for direction in ("store", "load"):
            for blocks in BLOCK_COUNTS:
                for in_flight in IN_FLIGHT:
                    measurements["bandwidth"].add(
                        **shape, direction=direction, mode="unpaced", blocks=blocks, in_flight=in_flight,
                        gbps=share * 55.0, ms_p50=0.2, ms_p99=0.4, copy_ms_p50=0.1, jobs=9,
                    )  # fmt: skip
    for hashes in (1, 8, 64, 512):
        measurements["lookup"].add(hashes=hashes, hits=hashes, lease=True, mode="prefix", **latency(80 + hashes / 4))
    measurements["lookup"].add(hashes=4096, hits=0, lease=False, mode="prefix", **latency(800))
    for traffic, mode, p50, gbps in (
        ("none", "", 40, 0), ("store", "unpaced", 900, 54), ("store", "paced", 58, 45),
    ):  # fmt: skip
        measurements["token"].add(traffic=traffic, mode=mode, **latency(p50), store_gbps=gbps, load_gbps=0)
    if pacing:
        measurements["pacing"] = Measurement("pacing", "ok")
    for chunk, p50, gbps in (("", 40, 0), ("off", 900, 54), ("2 MiB", 58, 45)) if pacing else ():
        measurements["pacing"].add(chunk=chunk, **latency(p50), store_gbps=gbps, load_gbps=0)
    machine = {"gpu": "NVIDIA H200", "pcie": "32.0 GT/s PCIe x16"}
    return BenchReport("0.1.0", "2026-11-21T12:00:00+00:00", "cuda", machine, {}, measurements)


def whole_report() -> BenchReport:
    """One with rows for every table, and figures as long as they get."""
    whole = report()
    measurements = whole.measurements
    for row in measurements["bandwidth"].rows:
        row["ms_p50"], row["ms_p99"] = 123.456, 9999.4
    for name in ("verify", "submit", "jobs", "scaling", "pin"):
        measurements[name] = Measurement(name, "ok")
    for layout in LAYOUTS:
        measurements["verify"].add(
            layout=layout.name, what=layout.what, blocks=512, nbytes=1 << 30, wrong_blocks=0
        )  # fmt: skip
    measurements["submit"].add(call="store", blocks=512, **latency(80_000))
    measurements["jobs"].add(
        direction="store", ranks=8, attached=8, device="host", copiers=8, cores=192, jobs_per_second=12_345.0
    )  # fmt: skip
    for name, blocks in (("bulk copies", 0), ("stacked-64k", 256)):
        for devices in (1, 16):
            measured = {"store_gbps": 1000.4, "load_gbps": 1000.4, "lookup_us": 12_345.6, "lookup_idle_us": 800.1}
            measured |= {"daemon_cores": 12.34, "copier_cores": 112.34}
            measurements["scaling"].add(
                layout=name, blocks=blocks, devices=devices, gbps=2000.8, **(measured if blocks else {})
            )  # fmt: skip
    measurements["pin"].add(
        phase="daemon starts, its context", what="a CUDA graph of 64 GEMMs at batch 32", steps=123_456,
        p50_ms=1.234, p99_ms=12.345, max_ms=1234.567,
    )  # fmt: skip
    measurements["pin"].add(
        phase="pool", pool_bytes=1536 << 30, pages="1GiB", pin_seconds=1234.56, start_to_ready_seconds=1234.56,
        ms_per_gib=1234.5, prefault_seconds=1234.56, register_seconds=1234.56, beyond_prefault_ms_per_gib=1234.5,
    )  # fmt: skip
    return whole


def latency(p50: float) -> dict[str, float]:
    return {"n": 100, "p50_us": p50, "p99_us": 2 * p50, "min_us": p50 / 2, "max_us": 3 * p50}
