"""The metrics of the daemon's process that Prometheus clients have in common, under their usual names.

prometheus_client has a collector of them, which lists all descriptors to count them: 12 ms of the event loop for 4,000.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterable
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvsidecar.support.kernel_calls import descriptor_limit
from kvsidecar.support.process_ids import stat_fields

_CPU_TEXT = "Total user and system CPU time spent in seconds."
_TICKS = os.sysconf("SC_CLK_TCK")


class ProcessMetrics(Collector):
    def __init__(self) -> None:
        ticks = float(stat_fields("self")[19])
        # By the clock of this process's time namespace, as its start is.
        self._started_at = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / _TICKS

    def describe(self) -> Iterable[Metric]:
        """Nothing: otherwise the registry would call `collect` to learn the names."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Called by the registry at a scrape."""
        fields = stat_fields("self")
        gauges = (
            ("virtual_memory_bytes", "Virtual memory size in bytes.", float(fields[20])),
            ("resident_memory_bytes", "Resident memory size in bytes.", float(fields[21]) * resource.getpagesize()),
            ("start_time_seconds", "Start time of the process since unix epoch in seconds.", self._started_at),
            ("open_fds", "Number of open file descriptors.", float(open_descriptors())),
            ("max_fds", "Maximum number of open file descriptors.", float(descriptor_limit())),
        )
        for name, text, value in gauges:
            yield GaugeMetricFamily(f"process_{name}", text, value=value)
        spent = (float(fields[11]) + float(fields[12])) / _TICKS
        yield CounterMetricFamily("process_cpu_seconds_total", _CPU_TEXT, spent)


def open_descriptors(proc: Path = Path("/proc/self")) -> int:
    """How many descriptors the process has, without a look at each where the kernel counts them (Linux 6.2)."""
    directory = proc / "fd"
    return directory.stat().st_size or len(list(directory.iterdir()))
