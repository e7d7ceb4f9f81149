"""A daemon that is started without standard input, output or error, and its table of descriptors."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from kvsidecar.daemon.serve import DESCRIPTORS
from tests.harness import DaemonProcess, Rank, done, eventually

WITHOUT = """
import os, sys

for fd in map(int, sys.argv[1].split(",")):
    os.close(fd)
os.execvp(sys.argv[2], sys.argv[2:])
"""


@pytest.mark.parametrize("closed", ["0", "1", "0,1"])
def test_it_serves_and_ends_as_any_other(short_dir: Path, closed: str) -> None:
    with DaemonProcess(short_dir, under=[sys.executable, "-c", WITHOUT, closed]) as daemon:
        daemon.wait_ready()
        rank = Rank(daemon)
        done(rank.store("a"))
        for fd in map(int, closed.split(",")):
            assert os.readlink(f"/proc/{daemon.process.pid}/fd/{fd}") == os.devnull
        rank.close()
        assert daemon.terminate() == 0
        assert not [line for line in daemon.read_log() if line["event"] == "stderr"]


def test_without_standard_error_nothing_of_its_own_gets_the_number(short_dir: Path) -> None:
    with DaemonProcess(short_dir, under=[sys.executable, "-c", WITHOUT, "0,1,2"], stderr=subprocess.DEVNULL) as daemon:
        eventually((short_dir / "kvs.sock.attach").exists)
        with daemon.client() as client:
            assert client.status().epoch > 0
        assert [os.readlink(f"/proc/{daemon.process.pid}/fd/{fd}") for fd in (0, 1, 2)] == [os.devnull] * 3
        assert daemon.terminate() == 0


def test_its_table_of_descriptors_has_room_from_the_start(short_dir: Path) -> None:
    """Else it grows with the clients, and the event loop waits for the kernel each time."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with DaemonProcess(short_dir) as daemon:
        status = Path(f"/proc/{daemon.process.pid}/status").read_text()
        size = int(status.partition("FDSize:")[2].split()[0])
        assert size >= (DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS))
        assert daemon.terminate() == 0
