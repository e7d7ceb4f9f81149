"""The facts about the machine that a result depends on."""

from __future__ import annotations

import os
import platform
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvsidecar.bench.driver import Cuda
from kvsidecar.support.process_ids import stat_fields

_SYS_PCI = Path("/sys/bus/pci/devices")


def facts(cuda: Cuda | None) -> dict[str, Any]:
    """Facts by name; None for what cannot be read."""
    return {
        "cpu": _first("/proc/cpuinfo", r"model name\s*:\s*(.+)"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": _memory("MemTotal"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **({} if cuda is None else _gpu(cuda)),
    }


def available_bytes() -> int:
    """Host memory that is available without swapping."""
    return _memory("MemAvailable") or 0


def _gpu(cuda: Cuda) -> dict[str, Any]:
    return {
        "gpu": cuda.name,
        "gpu_memory_bytes": cuda.memory_info()[1],
        "cuda": cuda.version,
        "driver": _first("/proc/driver/nvidia/version", r"Kernel Module.*?\s(\d+\.[\d.]+)\s"),
        "pcie": _link(_SYS_PCI / cuda.pci_bus_id),
    }


def _link(device: Path) -> str | None:
    """The link, such as ``32.0 GT/s PCIe x16``. The current speed of an idle link may be lower than under load."""
    with suppress(OSError):
        speed = (device / "max_link_speed").read_text().strip()
        width = (device / "current_link_width").read_text().strip()
        if speed[:1].isdigit():  # a virtual machine may say "Unknown"
            return f"{speed} x{width}"
    return None


def _memory(name: str) -> int | None:
    found = _first("/proc/meminfo", rf"{name}:\s+(\d+) kB")
    return None if found is None else int(found) * 1024


def _first(file: str, pattern: str) -> str | None:
    with suppress(OSError):
        found = re.search(pattern, Path(file).read_text())
        return None if found is None else found[1].strip()
    return None


def cpu_seconds(pid: int) -> float:
    """CPU time that all threads of a process have used so far."""
    fields = stat_fields(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children_of(pid: int) -> list[int]:
    """The running processes that a process's threads have started: for each thread in the order of their start.

    Raises:
        FileNotFoundError, ProcessLookupError: there is no such process.
    """
    tasks = Path(f"/proc/{pid}/task")
    while True:
        try:
            return [int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            # A thread has ended, and its children are those of another one, which may have been read before.
            if not tasks.exists():
                raise
