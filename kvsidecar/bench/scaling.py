"""What one more GPU adds: an engine rank on each, stores and loads at once, all through one daemon."""

from __future__ import annotations

from contextlib import ExitStack

from kvsidecar.bench.errors import Skipped
from kvsidecar.bench.job_rate import rates
from kvsidecar.bench.layouts import Layout
from kvsidecar.bench.processes import Child, Daemon
from kvsidecar.bench.report import Measurement
from kvsidecar.bench.setting import Setting
from kvsidecar.support import cuda_driver
from kvsidecar.types import Direction

LAYOUT_NAMES = ("stacked-64k", "tp8-4k")
BLOCKS = (256, 32)
"""Blocks of a job."""
IN_FLIGHT = 2
"""Jobs outstanding in each direction."""
SECONDS = 2.0
HOST_DEVICES = 2
"""Without a GPU, memory of the host stands in for so many."""


def measure(setting: Setting, out: Measurement) -> None:
    layouts = [layout for layout in setting.layouts() if layout.name in LAYOUT_NAMES]
    if setting.cuda is not None:
        count = cuda_driver.device_count()
        if count < 2:
            raise Skipped("there is one GPU")
        devices = [cuda_driver.device_uuid(ordinal) for ordinal in range(count)]
        _all(setting, out, layouts, setting.daemon(), devices)
        return
    setting.need_private("the scaling over devices of the host")
    devices = ["host", *(f"host-{number}" for number in range(1, HOST_DEVICES))]
    with setting.private_daemon(setting.pool_bytes, ["--devices", ",".join(devices)]) as daemon:
        _all(setting, out, layouts, daemon, devices)


def _all(setting: Setting, out: Measurement, layouts: list[Layout], daemon: Daemon, devices: list[str]) -> None:
    for layout in layouts:
        for blocks in BLOCKS:
            with ExitStack() as stack:
                ranks: list[Child] = []
                for number, device in enumerate(devices):
                    setting.say(f"attaching a rank on {device}")
                    rank = setting.rank(
                        layout, blocks, IN_FLIGHT, tuple(Direction), daemon=daemon, number=number, on=device
                    )
                    ranks.append(stack.enter_context(rank))
                for count in range(1, len(ranks) + 1):
                    setting.say(f"{layout.name}, {blocks} blocks a job, {count} of {len(ranks)} devices")
                    store, load = rates(ranks[:count], tuple(Direction), "bytes", setting.seconds(SECONDS))
                    out.add(
                        layout=layout.name,
                        blocks=blocks,
                        devices=count,
                        gbps=round((store + load) / 1e9, 3),
                        store_gbps=round(store / 1e9, 3),
                        load_gbps=round(load / 1e9, 3),
                    )
