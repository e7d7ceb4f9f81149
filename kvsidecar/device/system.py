"""Facts about GPUs that the system knows without the driver."""

from __future__ import annotations

import os


def pci_numa_node(bus_id: str) -> int | None:
    """NUMA node of a PCI device such as ``0000:17:00.0``; None where the kernel does not know (as in most virtual
    machines), or has no such device."""
    try:
        with open(f"/sys/bus/pci/devices/{bus_id.lower()}/numa_node", encoding="ascii") as file:
            node = int(file.read())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def nvidia_module_version() -> str:
    """The version of the kernel module, e.g. ``580.159.04``: the number by which administrators know the driver."""
    try:
        with open("/sys/module/nvidia/version", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return "of unknown version"


def mps_runs() -> bool:
    """Whether there is an MPS control daemon (NVIDIA MPS documentation, "Environment Variables").

    With MPS the compute mode EXCLUSIVE_PROCESS is right: its server is the one process, and all clients share it.
    """
    return os.path.exists(os.path.join(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control"))
