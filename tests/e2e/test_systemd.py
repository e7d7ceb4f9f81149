"""The shipped unit under a real systemd."""

from __future__ import annotations

import grp
from pathlib import Path

import pytest

from kvsidecar.client import Blocks, Client
from tests.e2e.systemd_manager import Systemd, unusable
from tests.e2e.test_faults import FIRST
from tests.e2e.test_readiness import CHUNKS
from tests.harness import SECONDS, Rank, done, hashes

under_systemd = pytest.mark.skipif(unusable() is not None, reason=unusable() or "")
SMALL = ("--pool-size", "1MiB")


def attach(systemd: Systemd) -> Rank:
    """An engine from outside: it reaches the socket through the mount namespace of systemd."""
    client = Client(str(systemd.path("/run/kvsidecar/kvsidecar.sock")), timeout=SECONDS, step_budget=SECONDS)
    return Rank(None, client=client)  # type: ignore[arg-type]


@under_systemd
def test_pinned_chunks_carry_the_start_beyond_its_timeout_and_the_unit_is_as_documented(short_dir: Path) -> None:
    failpoints = "pool.pin_chunk=delay(0.5)"  # 8 chunks: 4 s
    with Systemd(short_dir, "TimeoutStartSec=2s", flags=CHUNKS, KVSIDECAR_FAILPOINTS=failpoints) as systemd:
        systemd.systemctl("start", "--no-block", "kvsidecar")
        systemd.wait("StatusText", "pinning: ")
        assert systemd.show("ActiveState") == "activating"
        systemd.systemctl("start", "kvsidecar")  # waits for the end of the start
        assert systemd.show("ActiveState") == "active"
        assert systemd.show("StatusText") == "ready: 1 MiB pinned"
        assert systemd.show("NRestarts") == "0"
        took = int(systemd.show("ActiveEnterTimestampMonotonic")) - int(systemd.show("InactiveExitTimestampMonotonic"))
        assert took > 2_000_000, "nothing had to be extended"

        socket = systemd.path("/run/kvsidecar/kvsidecar.sock")
        line = next(line for line in (short_dir / "etc" / "group").read_text().splitlines() if "kvsidecar:" in line)
        gid = int(line.split(":")[2])
        assert gid not in (group.gr_gid for group in grp.getgrall())
        for path, mode in ((socket.parent, 0o750), (socket, 0o660), (socket.with_name("kvsidecar.sock.attach"), 0o660)):
            assert (path.stat().st_gid, path.stat().st_mode & 0o777) == (gid, mode), path

        systemd.systemctl("reload", "kvsidecar")
        systemd.wait("StatusText", "settings reloaded")
        assert systemd.wait("ActiveState", "active") == "active"
        rank = attach(systemd)
        done(rank.store("a"))
        rank.close()


@under_systemd
def test_a_stop_drains_for_as_long_as_the_daemon_was_told(short_dir: Path) -> None:
    failpoints = f"store.in_flight@{FIRST}=delay(3)"
    settings = ("TimeoutStopSec=1s", "WatchdogSec=1s")
    with Systemd(short_dir, *settings, flags=SMALL, KVSIDECAR_FAILPOINTS=failpoints) as systemd:
        systemd.systemctl("start", "kvsidecar")
        rank = attach(systemd)
        rank.fill(0, "a")
        job = rank.client.store([Blocks(0, hashes("a"), [0])])
        while "failpoint" not in systemd.log.read_text():
            pass
        systemd.systemctl("stop", "--no-block", "kvsidecar")
        assert systemd.wait("StatusText", "stopping").startswith("stopping: running copies")
        assert systemd.wait("ActiveState", "inactive") == "inactive"
        done(rank.finish(job))
        assert (systemd.show("Result"), systemd.show("ExecMainStatus")) == ("success", "0")
        assert not systemd.path("/run/kvsidecar").exists()
        rank.close()


@under_systemd
def test_a_hung_event_loop_is_restarted_and_leaves_its_stack(short_dir: Path) -> None:
    failpoints = "store.after_reserve=delay(1000)"
    with Systemd(short_dir, "WatchdogSec=1s", flags=SMALL, KVSIDECAR_FAILPOINTS=failpoints) as systemd:
        systemd.systemctl("start", "kvsidecar")
        hung = systemd.show("MainPID")
        rank = attach(systemd)
        rank.client.store([Blocks(0, hashes("a"), [0])])
        systemd.wait("NRestarts", "1")
        systemd.wait("StatusText", "ready")
        assert systemd.show("MainPID") != hung
        assert systemd.show("NRestarts") == "1", "the new one is fed"
        assert "Fatal Python error: Aborted" in systemd.log.read_text()
        rank.close()


@under_systemd
def test_a_pin_that_fails_is_shown_and_started_again_when_the_start_times_out(short_dir: Path) -> None:
    failpoints = "pool.pin_chunk@0=raise(no more pages)"
    with Systemd(short_dir, "TimeoutStartSec=2s", flags=SMALL, KVSIDECAR_FAILPOINTS=failpoints) as systemd:
        systemd.systemctl("start", "--no-block", "kvsidecar")
        assert "no more pages" in systemd.wait("StatusText", "not ready: ")
        assert systemd.show("ActiveState") == "activating"
        systemd.wait("NRestarts", "1")
        assert '"signal": "SIGTERM"' in systemd.log.read_text(), "not by the timeout"


@under_systemd
def test_a_wrong_setting_is_not_started_again(short_dir: Path) -> None:
    with Systemd(short_dir, flags=SMALL, KVSIDECAR_POOL_SIZ="1GiB") as systemd:
        systemd.systemctl("start", "--no-block", "kvsidecar")
        assert systemd.wait("ActiveState", "failed") == "failed"
        assert (systemd.show("ExecMainStatus"), systemd.show("NRestarts")) == ("78", "0")
        assert "did you mean KVSIDECAR_POOL_SIZE" in systemd.log.read_text()
