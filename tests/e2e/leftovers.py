"""What a daemon holds, and what it has left of an engine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.harness import DaemonProcess, Rank, done, eventually
from tests.open_files import open_files

ENGINE = """
import sys
from tests import harness
daemon = object.__new__(harness.DaemonProcess)
daemon.socket = sys.argv[1]
print("begun", flush=True)
rank = harness.Rank(daemon, instance="victim")
print("attached", flush=True)
what = sys.argv[2]
if what == "store":
    rank.fill(0, "victim")
    rank.client.store([harness.Blocks(0, harness.hashes("victim"), [0])])
elif what == "load":
    rank.client.load([harness.Blocks(0, harness.hashes("shared"), [0])])
elif what == "lease":
    print(rank.client.lookup(harness.NAMESPACE, {0: harness.hashes("shared")}, lease_seconds=0.2).lease, flush=True)
sys.stdin.read()
"""


@contextmanager
def engine(daemon: DaemonProcess, what: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", ENGINE, daemon.socket, what], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def nothing_is_left_of(daemon: DaemonProcess) -> None:
    """No session, lease, reservation or mapping of the dead engine; a healthy one works byte for byte."""
    assert daemon.mapped_buffers() == 0
    for gauge in ("attached_ranks", "leases", "pool_reserved_bytes", "pool_leased_bytes", "pool_quarantined_bytes"):
        assert daemon.metric(f"kvsidecar_{gauge}") == 0, gauge
    rank = Rank(daemon)
    done(rank.store("healthy"))
    done(rank.load("healthy", at=[5]))
    assert rank.holds(5, "healthy")
    rank.close()


def rss_mib(daemon: DaemonProcess) -> float:
    with open(f"/proc/{daemon.process.pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def port_of(daemon: DaemonProcess) -> int:
    return int(daemon.http.rpartition(":")[2])


def holders(daemon: DaemonProcess) -> set[int]:
    """Processes of the daemon that have an engine's memfd open or mapped: either keeps its memory allocated."""
    found = set()
    for pid in (daemon.process.pid, *daemon.copiers()):
        maps = Path(f"/proc/{pid}/maps").read_text()
        if any("memfd:kvsidecar-kv" in each for each in (*open_files(pid).values(), maps)):
            found.add(pid)
    return found


def only_copiers_hold(daemon: DaemonProcess) -> None:
    """For a copy that may still use it. The daemon has heard of the end of the engine, whose descriptor it had."""
    eventually(lambda: holders(daemon) == set(daemon.copiers()), lambda: f"{holders(daemon)} hold it")


def open_fds(daemon: DaemonProcess) -> int:
    return len(os.listdir(f"/proc/{daemon.process.pid}/fd"))
