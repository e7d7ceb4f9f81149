"""The knob --store-chunk: an engine's small device-to-host copies, and the bandwidth of stores, at several values."""

from __future__ import annotations

from kvsidecar.bench.report import Measurement
from kvsidecar.bench.setting import Setting
from kvsidecar.bench.token_copy import BLOCKS, IN_FLIGHT, STORE, token, traffic_layout, under_traffic
from kvsidecar.support.units import GiB

CHUNKS = ("off", "16 MiB", "8 MiB", "6 MiB", "4 MiB", "3 MiB", "2 MiB", "1 MiB")
POOL = 4 * GiB


def measure(setting: Setting, out: Measurement) -> None:
    """A daemon for each value, stores of an engine that is not idle, token copies meanwhile."""
    setting.need_private("the pacing curve")
    probe = setting.probe()
    out.add(chunk="", **token(setting, probe), store_gbps=0.0, load_gbps=0.0)
    for chunk in CHUNKS:
        setting.say(f"--store-chunk {chunk}")
        with (
            setting.private_daemon(min(POOL, setting.pool_bytes), ["--store-chunk", chunk]) as daemon,
            setting.rank(traffic_layout(setting), BLOCKS, IN_FLIGHT, (STORE,), daemon=daemon) as rank,
        ):
            out.add(chunk=chunk, **under_traffic(setting, probe, rank, (STORE,), idle=False))
