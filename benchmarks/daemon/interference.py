"""How much the daemon's copies at full speed slow an engine's own work on the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from statistics import median

from kvsidecar.bench.errors import Skipped
from kvsidecar.bench.probe import why_no_torch
from kvsidecar.bench.processes import BenchChild
from kvsidecar.bench.report import Measurement
from kvsidecar.bench.setting import Setting
from kvsidecar.bench.token_copy import BLOCKS, IN_FLIGHT, LOAD, STORE, meanwhile, traffic_layout
from kvsidecar.types import Direction

REPEATS = {"decode": 600, "gemm": 600}
"""About a second each on an H200."""
TRAFFIC: tuple[tuple[Direction, ...], ...] = ((STORE,), (LOAD,), (STORE, LOAD))


def measure(setting: Setting, out: Measurement) -> None:
    if missing := "needs a GPU" if setting.cuda is None else why_no_torch():
        raise Skipped(missing)
    work = BenchChild("benchmarks.daemon.work", {}, setting.directory)
    with closing(work), setting.rank(traffic_layout(setting), BLOCKS, IN_FLIGHT, (STORE, LOAD)) as rank:
        for kind, repeats in REPEATS.items():
            for directions in TRAFFIC:
                setting.say(f"{kind} while {' and '.join(directions)}")
                _slowdown(setting, out, work, rank, kind, setting.samples(repeats), directions)


def _slowdown(
    setting: Setting,
    out: Measurement,
    work: BenchChild,
    rank: BenchChild,
    kind: str,
    repeats: int,
    directions: Sequence[Direction],
) -> None:
    """Alone, under traffic, alone again: what drifts by itself must not look like interference."""

    def once() -> float:
        return median(work.call("work", kind=kind, repeats=repeats)["seconds"])

    first = once()
    under, gbps = meanwhile(setting, rank, directions, once, idle=True)
    alone = (first + once()) / 2
    out.add(
        work=kind,
        traffic="+".join(direction.value for direction in directions),
        alone_ms=round(alone * 1e3, 4),
        under_ms=round(under * 1e3, 4),
        slowdown=round(under / alone - 1, 5),
        **gbps,
    )
