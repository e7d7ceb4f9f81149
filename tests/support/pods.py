"""The memory limits of a pod, as files."""

from __future__ import annotations

from pathlib import Path

from kvsidecar.support.units import KiB, TiB

V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def machine(root: Path, *, total: int = TiB, available: int = TiB, files: dict[str, str] | None = None) -> Path:
    info = f"MemTotal:       {total // KiB} kB\nMemAvailable:   {available // KiB} kB\nHugePages_Total:       0\n"
    return tree(root, {"proc/meminfo": info, **(files or {})})


def in_pod(root: Path, limit: int, used: int = 0, more: dict[str, str] | None = None) -> Path:
    """A machine of 1 TiB and a cgroup v2 of a Kubernetes container, seen without a cgroup namespace."""
    own = "sys/fs/cgroup/kubepods/pod7/c1"
    files = {
        "proc/self/cgroup": "0::/kubepods/pod7/c1\n",
        "proc/self/mountinfo": V2_MOUNT,
        f"{own}/memory.max": f"{limit}\n",
        f"{own}/memory.current": f"{used}\n",
        **{f"sys/fs/cgroup/kubepods/{name}": text for name, text in (more or {}).items()},
    }
    return machine(root, files=files)
