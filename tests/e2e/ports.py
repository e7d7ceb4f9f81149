"""The port of a daemon."""

from __future__ import annotations

from tests.harness import DaemonProcess


def port_of(daemon: DaemonProcess) -> int:
    return int(daemon.http.rpartition(":")[2])
