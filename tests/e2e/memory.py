"""The memory of a daemon."""

from __future__ import annotations

import os

from tests.harness import DaemonProcess


def rss_mib(daemon: DaemonProcess) -> float:
    with open(f"/proc/{daemon.process.pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
