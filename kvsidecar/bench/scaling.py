"""What one more GPU adds: an engine rank on each, stores and loads at once, all through one daemon.

For comparison it measures plain copies, with a process for each GPU and no daemon: the limit of the links and of host
memory.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from statistics import median

from kvsidecar.bench import machine
from kvsidecar.bench.engine import AttachedEngine, attached
from kvsidecar.bench.errors import Skipped
from kvsidecar.bench.job_rate import rates
from kvsidecar.bench.latency import time_lookups
from kvsidecar.bench.layouts import TINY, Layout
from kvsidecar.bench.limit import CUDA_BYTES
from kvsidecar.bench.processes import BenchChild, Daemon
from kvsidecar.bench.report import Measurement
from kvsidecar.bench.setting import Setting
from kvsidecar.support import cuda_driver
from kvsidecar.support.units import MiB
from kvsidecar.types import Direction

LAYOUT_NAMES = ("stacked-64k", "tp8-4k")
"""The layouts that are measured unless the user names others."""
BULK = "bulk copies"
BLOCKS = (256, 32)
"""How many blocks a job has."""
IN_FLIGHT = 2
"""Jobs outstanding in each direction."""
SECONDS = 2.0
HASHES = 512
"""How many hashes each of the concurrent lookups has."""
PAUSE_SECONDS = 0.005
"""Pause between two lookups: they sample the latency and must not keep the daemon busy."""
HOST_DEVICES = 2
"""How many devices host memory stands in for without a GPU."""
HOST_BYTES = 16 * MiB


def measure(setting: Setting, out: Measurement) -> None:
    layouts = [each for each in setting.layouts() if setting.options.layouts or each.name in LAYOUT_NAMES]
    if setting.cuda is not None:
        count = cuda_driver.device_count()
        if count < 2:
            raise Skipped("there is one GPU")
        _limit(setting, out, count)
        devices = [cuda_driver.device_uuid(ordinal) for ordinal in range(count)]
        _all(setting, out, layouts, setting.daemon(), devices)
        return
    setting.need_private("the scaling over devices of the host")
    _limit(setting, out, HOST_DEVICES)
    devices = ["host", *(f"host-{number}" for number in range(1, HOST_DEVICES))]
    with setting.private_daemon(setting.pool_bytes, ["--devices", ",".join(devices)]) as daemon:
        _all(setting, out, layouts, daemon, devices)


def _limit(setting: Setting, out: Measurement, devices: int) -> None:
    """Measure large copies both ways at once, by a process for each GPU."""
    nbytes = CUDA_BYTES if setting.cuda is not None else HOST_BYTES
    with ExitStack() as stack:
        probes = [stack.enter_context(setting.probe_on(ordinal)) for ordinal in range(devices)]
        for count in range(1, devices + 1):
            setting.say(f"plain copies, {count} of {devices} devices")
            for probe in probes[:count]:
                probe.ask("bulk", seconds=setting.seconds(SECONDS), nbytes=nbytes)
            each = [probe.answer()["bytes_per_second"] for probe in probes[:count]]
            out.add(layout=BULK, blocks=0, devices=count, gbps=round(sum(each) / 1e9, 3))


def _all(setting: Setting, out: Measurement, layouts: list[Layout], daemon: Daemon, devices: list[str]) -> None:
    with attached(daemon.socket, TINY, setting.cuda, run=setting.run, rng=setting.rng) as engine:
        engine.client.set_idle(True)  # its device's stores must not be paced
        asker = Asker(engine, daemon)
        asker.ask_for(setting.seconds(SECONDS))
        idle_us = asker.p50_us
        for layout in layouts:
            for blocks in BLOCKS:
                with ExitStack() as stack:
                    ranks: list[BenchChild] = []
                    for number, device in enumerate(devices):
                        setting.say(f"attaching a rank on {device}")
                        rank = setting.rank(
                            layout, blocks, IN_FLIGHT, tuple(Direction), daemon=daemon, number=number, on=device
                        )
                        ranks.append(stack.enter_context(rank))
                    for count in range(1, len(ranks) + 1):
                        setting.say(f"{layout.name}, {blocks} blocks a job, {count} of {len(ranks)} devices")
                        store, load = rates(
                            ranks[:count], tuple(Direction), "bytes", setting.seconds(SECONDS), asker.ask_for
                        )
                        out.add(
                            layout=layout.name,
                            blocks=blocks,
                            devices=count,
                            gbps=round((store + load) / 1e9, 3),
                            store_gbps=round(store / 1e9, 3),
                            load_gbps=round(load / 1e9, 3),
                            lookup_us=asker.p50_us,
                            lookup_idle_us=idle_us,
                            **asker.cores,
                        )


class Asker:
    """Looks blocks up as a scheduler does, and watches the CPU time of the daemon's processes meanwhile."""

    def __init__(self, engine: AttachedEngine, daemon: Daemon) -> None:
        self._engine, self._pid = engine, daemon.pid
        self.p50_us = 0.0
        self.cores: dict[str, float] = {}
        """Cores that the daemon's process and all copiers together kept busy; empty if unknown."""

    def ask_for(self, seconds: float) -> None:
        # Blocks of its own each time: those of an earlier one may be evicted, and their lease be over.
        with self._engine.held(HASHES, 1) as held:
            started = time.perf_counter()
            before = self._used()
            each_us: list[float] = []
            while not each_us or time.perf_counter() - started < seconds:
                each_us.append(time_lookups(self._engine, lambda: held[0].hashes, HASHES, 1)["p50_us"])
                time.sleep(PAUSE_SECONDS)
            took = time.perf_counter() - started
            used = self._used()
        self.p50_us = median(each_us)
        names = ("daemon_cores", "copier_cores")
        self.cores = {
            name: round((late - early) / took, 3) for name, early, late in zip(names, before, used, strict=False)
        }

    def _used(self) -> tuple[float, ...]:
        """CPU seconds that the daemon, and its copiers, have used so far."""
        if self._pid is None:
            return ()
        return machine.cpu_seconds(self._pid), sum(map(machine.cpu_seconds, machine.children_of(self._pid)))
