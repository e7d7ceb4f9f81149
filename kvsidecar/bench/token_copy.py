"""An engine's own small device-to-host copy, the sampled tokens, while the daemon stores and loads."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from kvsidecar.bench.bandwidth import PACED, UNPACED
from kvsidecar.bench.layouts import STACKED, Layout
from kvsidecar.bench.processes import BenchChild
from kvsidecar.bench.report import Measurement, Row
from kvsidecar.bench.setting import Setting
from kvsidecar.bench.stats import latency
from kvsidecar.types import Direction

BLOCKS, IN_FLIGHT = 64, 4
SAMPLES = 2000
SETTLE_SECONDS = 0.3
"""Time from the first job to the first sample."""
MOVE_SECONDS, POLL_SECONDS = 10.0, 0.01
"""How long, and how often, to wait for the first job of each direction to end. On a busy machine the samples may be
taken before that, and a rate of 0 would suggest that nothing moves."""
STORE, LOAD = Direction.STORE, Direction.LOAD
Result = TypeVar("Result")


def traffic_layout(setting: Setting) -> Layout:
    """The layout of the traffic: layer-stacked, as in engines, with as many blocks as are in flight."""
    return replace(STACKED.scaled(setting.divisor), num_blocks=2 * BLOCKS * IN_FLIGHT)


def measure(setting: Setting, out: Measurement) -> None:
    """Measure idle, under unpaced and paced stores, under loads, and under both."""
    probe = setting.probe()
    out.add(traffic="none", mode="", **token(setting, probe), store_gbps=0.0, load_gbps=0.0)
    with setting.rank(traffic_layout(setting), BLOCKS, IN_FLIGHT, (STORE, LOAD)) as rank:
        for directions, mode in (
            ((STORE,), UNPACED),
            ((STORE,), PACED),
            ((LOAD,), UNPACED),
            ((STORE, LOAD), UNPACED),
            ((STORE, LOAD), PACED),
        ):
            traffic = "+".join(direction.value for direction in directions)
            setting.say(f"{traffic}, {mode}")
            row = under_traffic(setting, probe, rank, directions, idle=mode == UNPACED)
            out.add(traffic=traffic, mode=mode, **row)


def under_traffic(
    setting: Setting, probe: BenchChild, rank: BenchChild, directions: Sequence[Direction], *, idle: bool
) -> Row:
    """Time token copies while a rank keeps the daemon busy; stores are paced unless its engine is idle."""
    copies, gbps = meanwhile(setting, rank, directions, lambda: token(setting, probe), idle=idle)
    return {**copies, **gbps}


def meanwhile(
    setting: Setting, rank: BenchChild, directions: Sequence[Direction], work: Callable[[], Result], *, idle: bool
) -> tuple[Result, Row]:
    """Do work while a rank keeps the daemon busy. Returns its result, and the rank's GB/s by direction."""
    rank.call("start", directions=[direction.value for direction in directions], idle=idle)
    try:
        time.sleep(setting.seconds(SETTLE_SECONDS))
        before = rank.call("count")
        result = work()
        after = rank.call("count")
        deadline = time.monotonic() + MOVE_SECONDS
        while not _all_moved(before, after, directions) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            after = rank.call("count")
    finally:
        rank.call("stop")
    return result, _rates(before, after)


def _all_moved(before: Row, after: Row, directions: Sequence[Direction]) -> bool:
    return all(after[each.value]["bytes"] > before[each.value]["bytes"] for each in directions)


def _rates(before: Row, after: Row) -> Row:
    """GB/s of a rank between two of its counts, by direction."""
    seconds = after["time"] - before["time"]
    gbps = {
        name: (after[name]["bytes"] - before[name]["bytes"]) / seconds / 1e9 if name in after else 0.0
        for name in map(str, Direction)
    }
    return {f"{name}_gbps": round(value, 6) for name, value in gbps.items()}


def token(setting: Setting, probe: BenchChild) -> Row:
    """Time token copies."""
    return latency(probe.call("token", samples=setting.samples(SAMPLES))["seconds"])
