from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import harness
from tests.harness import DaemonProcess


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory whose path leaves room for a Unix socket: pytest's own may exceed its 107 bytes."""
    directory = tempfile.mkdtemp(prefix="kvs-")
    yield Path(directory)
    shutil.rmtree(directory)


@pytest.fixture
def daemon(short_dir: Path) -> Iterator[DaemonProcess]:
    """A ready daemon with a pool of 1 MiB on the host device."""
    with DaemonProcess(short_dir) as process:
        yield process.wait_ready()


@pytest.fixture(params=["lane", "grpc"])
def carrier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test twice: its clients use the fast lane, and gRPC."""
    monkeypatch.setattr(harness, "fast_lane", request.param == "lane")
    return str(request.param)
