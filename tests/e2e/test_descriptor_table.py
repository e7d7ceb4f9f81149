"""The table of descriptors."""

from __future__ import annotations

import resource
from pathlib import Path

from kvsidecar.daemon.serve import DESCRIPTORS
from tests.harness import DaemonProcess


def test_it_has_room_from_the_start(short_dir: Path) -> None:
    """Else it grows with the clients, and the event loop waits for the kernel each time."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with DaemonProcess(short_dir) as daemon:
        status = Path(f"/proc/{daemon.process.pid}/status").read_text()
        size = int(status.partition("FDSize:")[2].split()[0])
        assert size >= (DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS))
        assert daemon.terminate() == 0
