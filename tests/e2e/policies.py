"""Daemons with a policy, and clients of other users."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.harness import DaemonProcess

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root to be other users")


@contextmanager
def daemon_for_others(directory: Path, *flags: str) -> Iterator[DaemonProcess]:
    """Everybody may connect: what the mode of the socket forbids is not what is tested here."""
    directory.chmod(0o711)
    with DaemonProcess(directory, "--socket-mode", "0660", "--log-level", "debug", *flags) as daemon:
        daemon.wait_ready()
        for path in (daemon.socket, daemon.socket + ".attach"):
            os.chmod(path, 0o666)
        yield daemon
