"""A copy of unknown outcome: its load is over when the daemon's process has ended, which it does by itself. No daemon
comes after it here unless a test says so."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from kvsidecar.client import Blocks, Outcome
from kvsidecar.daemon.daemon import EXIT_UNSETTLED
from tests.e2e.test_daemon_death import job_ends, no_leaks, quick, works
from tests.e2e.test_faults import FIRST
from tests.harness import SECONDS, DaemonProcess, Rank, done, hashes
from tests.marks import both_protocols
from tests.service_manager import ServiceManager

pytestmark = both_protocols

CAUSES = {
    "a lost device": (f"copy.device_lost@{2 * FIRST + 1}=raise(Xid 79)", "device_lost", "Xid 79"),
    "a dead copy thread": (
        f"load.in_flight@{FIRST}=raise(a bug);copy.quiesce=raise(no word)",
        "copy_failed",
        "may still run (the load work",
    ),
    "a copy that hangs": (
        f"load.in_flight@{FIRST}=delay(3600)", "daemon_lost", "a load on host has been in flight for"
    ),
}  # fmt: skip
"""Of a load after one store: the failpoints, why the load failed in the end, and what the daemon says of itself."""


def ended(daemon: DaemonProcess) -> bool:
    """Whether the process has ended by now."""
    return os.waitid(os.P_PID, daemon.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def stuck_after(cause: str) -> tuple[str, ...]:
    return ("--stuck-after", "0.2") if "hangs" in cause else ()


@pytest.mark.parametrize("cause", CAUSES)
def test_a_load_is_over_when_the_daemon_has_ended_itself_and_nobody_comes_after_it(
    short_dir: Path, cause: str, local: bool
) -> None:
    failpoints, reason, what = CAUSES[cause]
    with (
        no_leaks(),
        ServiceManager(short_dir) as manager,
        DaemonProcess(
            short_dir,
            *stuck_after(cause),
            KVSIDECAR_FAILPOINTS=failpoints,
            NOTIFY_SOCKET=manager.address,
            local=local,
        ) as daemon,
    ):
        rank = Rank(daemon.wait_ready(), client=quick(daemon.socket, local))
        done(rank.store("a"))
        load = rank.client.load([Blocks(0, hashes("a"), [5])])
        (end,) = job_ends(rank.client, 1)
        assert ended(daemon), "reported although a copy may still run"
        assert (end.job, end.outcome, end.reason) == (load, Outcome.FAILED, reason)
        assert daemon.process.wait(SECONDS) == EXIT_UNSETTLED
        said = daemon.wait_log("a copy has an unknown outcome: the daemon exits")
        assert (said["level"], said["exit_code"]) == ("error", EXIT_UNSETTLED)
        assert what in manager.wait("STATUS", "not ready: ")["STATUS"]
        with DaemonProcess(short_dir, local=local) as successor:
            assert rank.client.wait_attached(SECONDS)
            assert rank.client.wait_ready(SECONDS).ready
            works(rank, "a")
            assert rank.client.poll() == [], "a job was reported twice"
            rank.close()
            assert successor.terminate() == 0


def test_a_dead_copy_thread_costs_one_load_where_the_device_says_that_all_is_over(short_dir: Path, local: bool) -> None:
    with DaemonProcess(short_dir, KVSIDECAR_FAILPOINTS=f"load.in_flight@{FIRST}=raise(a bug)", local=local) as daemon:
        rank = Rank(daemon.wait_ready())
        done(rank.store("a"))
        failed = rank.load("a", at=[5])
        assert (failed.outcome, failed.reason) == (Outcome.FAILED, "copy_failed")
        assert "a bug" in failed.error
        done(rank.load("a", at=[6]))
        assert rank.holds(6, "a")
        assert daemon.metric("kvsidecar_pool_leased_bytes") == 0
        assert daemon.metric('kvsidecar_unsettled_copies_total{direction="load"}') == 0
        assert (daemon.get("/health")[0], daemon.get("/ready")[0]) == (200, 200)
        rank.close()
        assert daemon.terminate() == 0


def test_a_copy_that_hangs_fails_health_and_lookups_go_on_until_the_daemon_ends_itself(
    short_dir: Path, local: bool
) -> None:
    failpoints, *_ = CAUSES["a copy that hangs"]
    with DaemonProcess(short_dir, "--stuck-after", "0.2", KVSIDECAR_FAILPOINTS=failpoints, local=local) as daemon:
        rank = Rank(daemon.wait_ready(), client=quick(daemon.socket, local))
        done(rank.store("a"))
        health: list[tuple[int, str]] = []
        hits: list[int] = []

        def look() -> None:
            while not ended(daemon):
                try:
                    code, body = daemon.get("/health")
                except OSError:  # it has just ended
                    return
                health.append((code, body["reason"]))
                hits.append(rank.hits("a"))

        looking = threading.Thread(target=look)
        looking.start()
        load = rank.client.load([Blocks(0, hashes("a"), [5])])
        assert rank.finish(load).outcome is Outcome.FAILED
        looking.join(SECONDS)
        failing = [reason for code, reason in health if code == 503]
        assert failing
        assert "a load on host has been in flight" in failing[0]
        assert hits[health.index((503, failing[0]))] == 1, "a copy that hangs holds up lookups"
        rank.close()
        assert daemon.process.wait(SECONDS) == EXIT_UNSETTLED


def test_a_client_that_leaves_before_the_daemon_has_ended_learns_of_it_later(short_dir: Path, local: bool) -> None:
    failpoints, *_ = CAUSES["a copy that hangs"]
    with no_leaks(), DaemonProcess(short_dir, KVSIDECAR_FAILPOINTS=failpoints, local=local) as daemon:
        rank = Rank(daemon.wait_ready(), client=quick(daemon.socket, local))
        done(rank.store("a"))
        rank.client.load([Blocks(0, hashes("a"), [5])])
        daemon.wait_log("failpoint")
        assert not rank.client.close(0.1)
        assert not rank.client.unmapped()
        daemon.process.send_signal(signal.SIGKILL)
        daemon.process.wait(SECONDS)
        assert rank.client.unmapped()
        assert rank.client.close()


def test_sigterm_does_not_wait_for_ever_for_a_copy_and_unpins_nothing_under_it(short_dir: Path, local: bool) -> None:
    failpoints, *_ = CAUSES["a copy that hangs"]
    with DaemonProcess(short_dir, "--drain-timeout", "0.3", KVSIDECAR_FAILPOINTS=failpoints, local=local) as daemon:
        rank = Rank(daemon.wait_ready(), client=quick(daemon.socket, local))
        done(rank.store("a"))
        load = rank.client.load([Blocks(0, hashes("a"), [5])])
        daemon.wait_log("failpoint")
        daemon.process.send_signal(signal.SIGTERM)
        assert rank.finish(load).outcome is Outcome.FAILED
        assert ended(daemon), "reported although a copy may still run"
        assert daemon.process.wait(SECONDS) == EXIT_UNSETTLED
        daemon.wait_log("copies are still running: the process exits without unpinning")
        rank.close()
