"""Engine and daemon in different PID namespaces, as the containers of a pod or of a node are.

Neither can then name the other by a number: SO_PEERCRED says 0 for a process that is not visible.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.pid_namespaces import UNSHARE, needs_peer_pidfd, needs_pid_namespaces, pid_inside, with_pid
from tests.harness import SECONDS, DaemonProcess, Rank, done
from tests.marks import promise

pytestmark = needs_pid_namespaces

ENGINE = """
import os, sys
from tests import harness
daemon = object.__new__(harness.DaemonProcess)
daemon.socket, what = sys.argv[1:]
rank = harness.Rank(daemon, instance="engine")
harness.done(rank.store("a"))
harness.done(rank.load("a", at=[5]))
assert rank.holds(5, "a")
child = os.fork() if what == "fork" else None
if child == 0:
    sys.stdin.read()  # holds every connection of its parent open
print(os.getpid(), child, flush=True)
if what == "load":
    print(rank.finish(rank.client.load([harness.Blocks(0, harness.hashes("a"), [6])])).reason, flush=True)
sys.stdin.read()
"""


@contextmanager
def engine(daemon: DaemonProcess, what: str = "", under: Sequence[str] = ()) -> Iterator[subprocess.Popen[str]]:
    command = [*under, sys.executable, "-c", ENGINE, daemon.socket, what]
    # With its fork support gRPC closes its connections in a forked child.
    environment = {**os.environ, "GRPC_ENABLE_FORK_SUPPORT": "0"}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def read(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().split()


def nothing_is_left(daemon: DaemonProcess) -> None:
    for gauge in ("attached_ranks", "leases", "pool_reserved_bytes", "pool_quarantined_bytes"):
        assert daemon.metric(f"kvsidecar_{gauge}") == 0, gauge
    assert "kvsidecar_imported_gpu_bytes{" not in daemon.get("/metrics")[1], "its memory is still mapped"
    rank = Rank(daemon)
    done(rank.load("a", at=[2]))
    assert rank.holds(2, "a"), "what the dead engine had stored is not what it was"
    rank.close()


@promise("exits are noticed even if neither side has a PID for the other")
@pytest.mark.parametrize("same_pid", [False, True], ids=["another PID value", "the daemon's PID value"])
def test_an_engine_in_a_pid_namespace_of_its_own_is_served_and_its_death_is_noticed(
    daemon: DaemonProcess, same_pid: bool
) -> None:
    with engine(daemon, under=with_pid(daemon.process.pid) if same_pid else UNSHARE) as process:
        inside = int(read(process)[0])
        assert (inside == daemon.process.pid) is same_pid
        assert pid_inside(daemon.wait_log("client connected")["pid"]) == inside
        process.kill()
        daemon.wait_log("rank detached")
    nothing_is_left(daemon)


@pytest.mark.parametrize("what", ["", pytest.param("fork", marks=needs_peer_pidfd)], ids=["alone", "forked"])
def test_the_death_of_an_engine_that_has_no_pid_for_the_daemon_is_noticed(short_dir: Path, what: str) -> None:
    """As in a pod: each container has a PID namespace of its own. A child holds the engine's connections open."""
    with DaemonProcess(short_dir, under=UNSHARE) as daemon:
        with engine(daemon.wait_ready(), what) as process:
            child = read(process)[1]
            assert daemon.wait_log("client connected")["pid"] == 0
            process.kill()
            daemon.wait_log("rank detached")
            if what == "fork":
                os.kill(int(child), 9)  # it has lived until now
        nothing_is_left(daemon)


@needs_peer_pidfd
def test_an_engine_that_cannot_name_the_daemon_learns_of_its_death(short_dir: Path) -> None:
    """A load is over only when the daemon's process is gone: its pidfd tells, where its number is 0."""
    with (
        DaemonProcess(short_dir, KVSIDECAR_FAILPOINTS="load.in_flight@3=delay(600)") as daemon,
        engine(daemon.wait_ready(), "load", under=UNSHARE) as process,
    ):
        read(process)
        daemon.wait_log("failpoint")
        daemon.process.kill()
        assert daemon.process.wait(SECONDS) == -9
        assert read(process) == ["daemon_lost"]
