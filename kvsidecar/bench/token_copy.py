"""An engine's own small device-to-host copy, the sampled tokens, while the daemon stores and loads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack

from kvsidecar.bench.bandwidth import PACED, UNPACED
from kvsidecar.bench.errors import Skipped
from kvsidecar.bench.layouts import STACKED, Layout
from kvsidecar.bench.processes import Child, Daemon
from kvsidecar.bench.report import Measurement, Row
from kvsidecar.bench.setting import Setting
from kvsidecar.bench.stats import latency
from kvsidecar.support.units import GiB
from kvsidecar.types import Direction

BLOCKS, IN_FLIGHT = 64, 4
SAMPLES = 2000
SETTLE_SECONDS = 0.3
"""From the first job to the first sample."""
STORE, LOAD = Direction.STORE, Direction.LOAD

CHUNKS = ("off", "16 MiB", "8 MiB", "6 MiB", "4 MiB", "3 MiB", "2 MiB", "1 MiB")
CHUNK_FLAG = "--store-chunk"
CURVE_POOL = 4 * GiB


def traffic_layout(setting: Setting) -> Layout:
    """Layer-stacked, as engines have it, with the blocks that are in flight."""
    return Layout.from_json({**STACKED.scaled(setting.divisor).to_json(), "num_blocks": 2 * BLOCKS * IN_FLIGHT})


def measure(setting: Setting, out: Measurement) -> None:
    """Idle, under stores unpaced and paced, under loads, under both."""
    probe = setting.probe()
    out.add(traffic="none", mode="", **_token(setting, probe), store_gbps=0.0, load_gbps=0.0)
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
            if row is None:
                out.note("this client cannot say whether the engine is idle: stores are not paced")
            else:
                out.add(traffic=traffic, mode=mode, **row)


def under_traffic(
    setting: Setting, probe: Child, rank: Child, directions: Sequence[Direction], *, idle: bool
) -> Row | None:
    """Time token copies while a rank keeps the daemon busy. None if the daemon cannot be told to pace."""
    told = rank.call("start", directions=[direction.value for direction in directions], idle=idle)["told_idle"]
    try:
        if not told and not idle:
            return None
        time.sleep(setting.seconds(SETTLE_SECONDS))
        before = rank.call("count")
        token = _token(setting, probe)
        after = rank.call("count")
    finally:
        rank.call("stop")
    return {**token, **rates(before, after)}


def rates(before: Row, after: Row) -> Row:
    """GB/s of a rank between two of its counts, by direction."""
    seconds = after["time"] - before["time"]
    gbps = {
        name: (after[name]["bytes"] - before[name]["bytes"]) / seconds / 1e9 if name in after else 0.0
        for name in map(str, Direction)
    }
    return {f"{name}_gbps": round(value, 6) for name, value in gbps.items()}


def _token(setting: Setting, probe: Child) -> Row:
    return latency(probe.call("token", samples=setting.samples(SAMPLES))["seconds"])


def pacing_curve(setting: Setting, out: Measurement) -> None:
    """The knob: a daemon for each value, stores of an engine that is not idle, token copies meanwhile."""
    from kvsidecar.daemon.config import Settings, flag_of

    setting.need_private("the pacing curve")
    if CHUNK_FLAG not in map(flag_of, Settings.model_fields):
        raise Skipped(f"this version has no {CHUNK_FLAG}")
    probe = setting.probe()
    out.add(chunk="", **_token(setting, probe), store_gbps=0.0, load_gbps=0.0)
    with ExitStack() as stack:
        for chunk in CHUNKS:
            setting.say(f"{CHUNK_FLAG} {chunk}")
            stack.close()
            daemon: Daemon = stack.enter_context(
                setting.private_daemon(min(CURVE_POOL, setting.pool_bytes), [CHUNK_FLAG, chunk])
            )
            with setting.rank(traffic_layout(setting), BLOCKS, IN_FLIGHT, (STORE,), daemon=daemon) as rank:
                row = under_traffic(setting, probe, rank, (STORE,), idle=False)
                if row is None:
                    raise Skipped("this client cannot say whether the engine is idle")
                out.add(chunk=chunk, **row)
