"""A process that is stopped before it has asked to die with the daemon outlives a killed one: it must hold no lock."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from tests.harness import DaemonProcess

MODULES = {"copier": "kvsidecar.copier.process", "tier": "kvsidecar.tiers.process"}


@pytest.mark.parametrize("kind", MODULES)
def test_what_is_stopped_in_its_first_instants_holds_no_lock(short_dir: Path, pool_dir: Path, kind: str) -> None:
    flags = ["--disk-dir", str(short_dir / "disk"), "--disk-size", "1MiB", "--pool-dir", str(pool_dir)]
    with DaemonProcess(short_dir, *flags, until="starting" if kind == "copier" else "listening") as daemon:
        while not (stopped := daemon.children(MODULES[kind])):  # no pause: it asks for the signal soon
            assert daemon.process.poll() is None
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        daemon.process.kill()
        daemon.process.wait()
        try:
            with DaemonProcess(short_dir, *flags, "--lock-wait", "2") as after:
                after.wait_ready()
        finally:
            for pid in stopped:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        daemon.read_log()  # until all that had its standard error has ended: those see that the daemon is dead
