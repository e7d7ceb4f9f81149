"""Who has an engine's memory."""

from __future__ import annotations

from pathlib import Path

from tests.harness import DaemonProcess


def holders(daemon: DaemonProcess) -> set[int]:
    """Processes of the daemon that have an engine's memfd open or mapped: either keeps its memory allocated."""
    found = set()
    for pid in (daemon.process.pid, *daemon.copiers()):
        process = Path("/proc", str(pid))
        names = [str(each.readlink()) for each in (process / "fd").iterdir() if each.is_symlink()]
        if any("memfd:kvsidecar-kv" in each for each in (*names, (process / "maps").read_text())):
            found.add(pid)
    return found
