from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import DaemonProcess


@pytest.fixture
def daemon(short_dir: Path) -> Iterator[DaemonProcess]:
    """A ready daemon with a pool of 1 MiB on the host device."""
    with DaemonProcess(short_dir) as process:
        yield process.wait_ready()
