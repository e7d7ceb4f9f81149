"""Who has an engine's memory."""

from __future__ import annotations

from pathlib import Path

from tests.harness import DaemonProcess
from tests.open_files import open_files


def holders(daemon: DaemonProcess) -> set[int]:
    """Processes of the daemon that have an engine's memfd open or mapped: either keeps its memory allocated."""
    found = set()
    for pid in (daemon.process.pid, *daemon.copiers()):
        maps = Path(f"/proc/{pid}/maps").read_text()
        if any("memfd:kvsidecar-kv" in each for each in (*open_files(pid).values(), maps)):
            found.add(pid)
    return found
