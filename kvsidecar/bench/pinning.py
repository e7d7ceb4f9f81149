"""The rate of pinning, and an engine's step times meanwhile."""

from __future__ import annotations

import time

from kvsidecar.bench.errors import BenchError
from kvsidecar.bench.processes import PrivateDaemon
from kvsidecar.bench.report import Measurement, Row
from kvsidecar.bench.setting import Setting
from kvsidecar.bench.stats import percentiles
from kvsidecar.support.units import GiB, format_size

IDLE_SECONDS = 4.0
PIN_FIELDS = ("pin_seconds", "prefault_seconds", "register_seconds")
"""Fields that the daemon's ``ready`` line may have besides the total."""


def measure(setting: Setting, out: Measurement) -> None:
    setting.need_private("pinning")
    nbytes = setting.pin_bytes()
    probe = setting.probe()
    what = probe.call("steps")["what"]
    try:
        setting.say(f"an engine's steps alone ({what})")
        started = time.perf_counter()
        time.sleep(setting.seconds(IDLE_SECONDS))
        idle_until = time.perf_counter()
        setting.say(f"an engine's steps while {format_size(nbytes)} are pinned")
        with setting.private_daemon(nbytes) as daemon:
            pinned_at = time.perf_counter()
        stopped_at = time.perf_counter()
    finally:
        steps = [(begin, took) for begin, took in probe.call("steps_over")["steps"]]
    context = daemon.times.get("context made", daemon.started)
    for phase, begin, end in (
        ("idle", started, idle_until),
        ("daemon starts, its context", daemon.started, context),
        ("daemon pins", context, pinned_at),
        ("daemon unpins and ends", pinned_at, stopped_at),
    ):
        # A step belongs to every phase that it touches: one that is stalled ends after the stall.
        within = [took for at, took in steps if at + took > begin and at < end]
        if within:
            out.add(phase=phase, what=what, **_steps(within))
    out.add(phase="pool", **_pool(daemon, nbytes, pinned_at))


def _steps(took: list[float]) -> Row:
    p50, p99 = percentiles(took)
    return {
        "steps": len(took),
        "p50_ms": round(p50 * 1e3, 4),
        "p99_ms": round(p99 * 1e3, 4),
        "max_ms": round(max(took) * 1e3, 4),
    }


def _pool(daemon: PrivateDaemon, nbytes: int, ready_at: float) -> Row:
    ready = daemon.said.get("ready")
    if ready is None:
        raise BenchError("the daemon's log does not say that it is ready")
    pinned, faulted, registering = (float(ready[name]) for name in PIN_FIELDS)
    return {
        "pool_bytes": nbytes,
        "pages": ready.get("pages"),
        "pin_seconds": pinned,
        "start_to_ready_seconds": round(ready_at - daemon.started, 3),
        "ms_per_gib": round(pinned * 1e3 / (nbytes / GiB), 2),
        "prefault_seconds": faulted,
        "register_seconds": registering,
        # Pages of the next chunk are faulted in while one is registered: this is what comes after the last page.
        "beyond_prefault_ms_per_gib": round((pinned - faulted) * 1e3 / (nbytes / GiB), 2),
    }
