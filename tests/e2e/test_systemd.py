"""The shipped unit under a real systemd."""

from __future__ import annotations

import grp
import math
import socket
import time
from contextlib import closing
from pathlib import Path

import pytest

from kvsidecar.client import Blocks, Client
from tests.e2e.restarts import CHUNKS
from tests.e2e.systemd_manager import Systemd, unusable
from tests.harness import FIRST, SECONDS, DaemonProcess, Gate, Rank, done, eventually, hashes, wait_until_ready

under_systemd = pytest.mark.skipif(unusable() is not None, reason=unusable() or "")
SMALL = ("--pool-size", "1MiB")


def attach(systemd: Systemd, directory: Path | None = None) -> Rank:
    """An engine from outside: it reaches the socket through the mount namespace of systemd, or of a container."""
    path = (directory or systemd.path("/run/kvsidecar")) / "kvsidecar.sock"
    client = Client(str(path), timeout=SECONDS, step_budget=SECONDS)
    return Rank(None, client=client)


def joined_another(rank: Rank, epoch: int) -> int:
    """Wait until this rank is attached to another daemon than that of ``epoch``; returns its epoch."""
    eventually(lambda: rank.client.epoch not in (0, epoch))
    wait_until_ready(rank.client)
    return rank.client.epoch


def patience(directory: Path) -> int:
    """Seconds for a timeout of systemd that only what the test does may use up: three times what a whole start of the
    daemon, with its imports, was just seen to take."""
    began = time.monotonic()
    apart = directory / "apart"
    apart.mkdir()
    with DaemonProcess(apart, *SMALL, until="starting") as daemon:
        daemon.wait_ready()
    return 2 + math.ceil(3 * (time.monotonic() - began))


@under_systemd
def test_pinned_chunks_carry_the_start_beyond_its_timeout_and_the_unit_is_as_documented(short_dir: Path) -> None:
    timeout = patience(short_dir)
    # A machine that has become slower since may need longer than that to the first chunk: systemd then starts it again.
    for attempt in range(5):
        directory = short_dir / str(attempt)
        directory.mkdir()
        with closing(Gate(directory)) as gate:
            settings = (f"TimeoutStartSec={timeout}s", f"BindReadOnlyPaths={gate.path}")
            with Systemd(directory, *settings, flags=CHUNKS, KVSIDECAR_FAILPOINTS=f"pool.pin_chunk={gate}") as systemd:
                gate.let_pass()
                systemd.systemctl("start", "--no-block", "kvsidecar")
                eventually(lambda: holds_at_the_second_chunk(systemd) or restarted(systemd), pause=0.02)
                if not restarted(systemd):
                    goes_on_beyond(timeout, systemd, gate)
                    is_as_documented(systemd, directory)
                    return
        timeout *= 2
    pytest.fail(f"the first chunk is not pinned within {timeout / 2} s")


def holds_at_the_second_chunk(systemd: Systemd) -> bool:
    return "pinning: 128 KiB" in systemd.show("StatusText")


def restarted(systemd: Systemd) -> bool:
    return systemd.show("NRestarts") != "0"


def goes_on_beyond(timeout: int, systemd: Systemd, gate: Gate) -> None:
    """The start holds at a chunk for longer than its timeout, and then ends."""
    assert systemd.show("ActiveState") == "activating"
    began = int(systemd.show("InactiveExitTimestampMonotonic"))
    while time.monotonic_ns() // 1000 < began + 1.2e6 * timeout:
        assert systemd.show("ActiveState") == "activating"
        time.sleep(0.02)
    gate.let_pass(7)
    systemd.systemctl("start", "kvsidecar")  # waits for the end of the start
    assert systemd.show("ActiveState") == "active"
    assert systemd.show("StatusText") == "ready: 1 MiB pinned"
    assert not restarted(systemd)
    took = int(systemd.show("ActiveEnterTimestampMonotonic")) - began
    assert took > 1e6 * timeout, "nothing had to be extended"


def is_as_documented(systemd: Systemd, directory: Path) -> None:
    """Its files belong to its group, it is reloaded, and it serves."""
    grpc = systemd.path("/run/kvsidecar/kvsidecar.sock")
    line = next(line for line in (directory / "etc" / "group").read_text().splitlines() if "kvsidecar:" in line)
    gid = int(line.split(":")[2])
    assert gid not in (group.gr_gid for group in grp.getgrall())
    for path, mode in ((grpc.parent, 0o750), (grpc, 0o660), (grpc.with_name("kvsidecar.sock.attach"), 0o660)):
        assert (path.stat().st_gid, path.stat().st_mode & 0o777) == (gid, mode), path

    systemd.systemctl("reload", "kvsidecar")
    systemd.wait("StatusText", "settings reloaded")
    assert systemd.wait("ActiveState", "active") == "active"
    rank = attach(systemd)
    done(rank.store("a"))
    rank.close()


@under_systemd
def test_a_container_that_has_mounted_the_directory_finds_every_later_daemon(short_dir: Path) -> None:
    with Systemd(short_dir, flags=SMALL) as systemd:
        systemd.systemctl("start", "kvsidecar")
        with systemd.container("/run/kvsidecar") as mounted:
            rank = attach(systemd, mounted)
            epoch = rank.client.epoch
            systemd.systemctl("restart", "kvsidecar")
            epoch = joined_another(rank, epoch)
            done(rank.store("after a restart"))

            systemd.systemctl("kill", "--kill-whom=main", "--signal=SIGKILL", "kvsidecar")
            epoch = joined_another(rank, epoch)
            done(rank.store("after a crash"))

            systemd.systemctl("stop", "kvsidecar")
            assert [path.name for path in mounted.iterdir()] == ["kvsidecar.sock.lock"], "no stale socket"
            systemd.systemctl("start", "kvsidecar")
            joined_another(rank, epoch)
            done(rank.store("after a stop"))
            rank.close()
            late = attach(systemd, mounted)
            done(late.load("after a stop", at=[3]))
            late.close()


@under_systemd
def test_a_port_in_use_is_tried_until_it_is_free(short_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with Systemd(short_dir, flags=(*SMALL, "--http-port", str(port))) as systemd:
            systemd.systemctl("start", "--no-block", "kvsidecar")
            systemd.wait_restarts(2)
            assert f"127.0.0.1:{port}" in systemd.log.read_text()
            other.close()
            systemd.wait("ActiveState", "active")


@under_systemd
def test_a_stop_drains_for_as_long_as_the_daemon_was_told(short_dir: Path, gate: Gate) -> None:
    failpoints = f"store.in_flight@{FIRST}={gate}"
    timeout = patience(short_dir)
    settings = (f"TimeoutStopSec={timeout}s", f"WatchdogSec={timeout}s", f"BindReadOnlyPaths={gate.path}")
    patience_with_copies = 3.0 * timeout + SECONDS
    flags = (*SMALL, "--drain-timeout", str(patience_with_copies), "--stuck-after", str(patience_with_copies))
    with Systemd(short_dir, *settings, flags=flags, KVSIDECAR_FAILPOINTS=failpoints) as systemd:
        systemd.systemctl("start", "kvsidecar")
        rank = attach(systemd)
        rank.fill(0, "a")
        job = rank.client.store([Blocks(0, hashes("a"), [0])], timeout=patience_with_copies)
        eventually(lambda: "failpoint" in systemd.log.read_text())
        systemd.systemctl("stop", "--no-block", "kvsidecar")
        assert systemd.wait("StatusText", "stopping").startswith("stopping: running copies")
        stopping = time.monotonic()
        while time.monotonic() < stopping + 1.2 * timeout:
            assert systemd.show("ActiveState") == "deactivating", "the copies' time is not covered"
            time.sleep(0.02)
        gate.let_pass()
        assert systemd.wait("ActiveState", "inactive") == "inactive"
        done(rank.finish(job))
        assert (systemd.show("Result"), systemd.show("ExecMainStatus")) == ("success", "0")
        assert [path.name for path in systemd.path("/run/kvsidecar").iterdir()] == ["kvsidecar.sock.lock"]
        rank.close()


@under_systemd
def test_a_hung_event_loop_is_restarted_and_leaves_its_stack(short_dir: Path) -> None:
    failpoints = "store.after_reserve=delay(1000)"
    with Systemd(
        short_dir, f"WatchdogSec={patience(short_dir)}s", flags=SMALL, KVSIDECAR_FAILPOINTS=failpoints
    ) as systemd:
        systemd.systemctl("start", "kvsidecar")
        hung = systemd.show("MainPID")
        rank = attach(systemd)
        rank.client.store([Blocks(0, hashes("a"), [0])])
        systemd.wait_restarts(1)
        systemd.wait("StatusText", "ready")
        assert systemd.show("MainPID") != hung
        assert systemd.show("NRestarts") == "1", "the new one is fed"
        assert "Fatal Python error: Aborted" in systemd.log.read_text()
        rank.close()


@under_systemd
def test_a_reload_of_an_invalid_file_fails_and_changes_nothing(short_dir: Path) -> None:
    file = short_dir / "kvsidecar.toml"
    file.write_text("stuck_after = 4\n")
    file.chmod(0o644)
    variables = {"KVSIDECAR_POOL_SIZE": "1MiB", "KVSIDECAR_CONFIG": str(file)}  # which the check has, too
    with Systemd(short_dir, f"BindReadOnlyPaths={file}", **variables) as systemd:
        systemd.systemctl("start", "kvsidecar")
        serves = systemd.show("MainPID")
        for wrong in ("stuck_after = 'soon'", "stuck_aftr = 4", "stuck_after = ", share("2MiB")):
            file.write_text(wrong)
            assert systemd.refuses("reload", "kvsidecar"), wrong
            assert (systemd.show("ActiveState"), systemd.show("MainPID")) == ("active", serves)
            assert systemd.show("StatusText") == "ready: 1 MiB pinned"
        assert "stuck_aftr in " in systemd.log.read_text(), "the reason is not in the journal"
        assert "settings not reloaded" not in systemd.log.read_text(), "the daemon was told of a file that is invalid"
        file.write_text("stuck_after = 5\n" + share("1MiB"))
        systemd.systemctl("reload", "kvsidecar")
        systemd.wait("StatusText", "settings reloaded")
        assert systemd.show("MainPID") == serves


def share(guaranteed: str) -> str:
    return f'[[share]]\nname = "a"\nnamespaces = ["a"]\nguaranteed = "{guaranteed}"\n'


@under_systemd
def test_a_pin_that_fails_is_shown_and_started_again_at_once(short_dir: Path) -> None:
    failpoints = "pool.pin_chunk@0=raise(no more pages)"
    with Systemd(short_dir, flags=SMALL, KVSIDECAR_FAILPOINTS=failpoints) as systemd:
        systemd.systemctl("start", "--no-block", "kvsidecar")
        systemd.wait_restarts(1)
        assert "no more pages" in systemd.wait("StatusText", "failed: ")
        assert systemd.show("ExecMainStatus") in ("0", "1"), "0: the next one runs"
        assert '"signal": "SIGTERM"' not in systemd.log.read_text(), "the start has timed out"


@under_systemd
def test_a_daemon_that_stays_shows_why_it_is_not_ready_also_when_the_start_has_timed_out(short_dir: Path) -> None:
    failpoints = "pool.pin_chunk@0=raise(no more pages)"
    settings = ("TimeoutStartSec=infinity", "Restart=no")
    flags = (*SMALL, "--on-pin-failure", "stay")
    with Systemd(short_dir, *settings, flags=flags, KVSIDECAR_FAILPOINTS=failpoints) as systemd:
        systemd.systemctl("start", "--no-block", "kvsidecar")
        assert "no more pages" in systemd.wait("StatusText", "not ready: ")
        assert systemd.show("ActiveState") == "activating"
        systemd.change("TimeoutStartSec=1ms")
        assert systemd.wait("ActiveState", "failed") == "failed"
        assert systemd.show("Result") == "timeout"
        assert "no more pages" in systemd.show("StatusText")


@under_systemd
@pytest.mark.parametrize(
    ("flags", "variables", "code", "reason"),
    [
        (SMALL, {"KVSIDECAR_POOL_SIZ": "1GiB"}, "78", "did you mean KVSIDECAR_POOL_SIZE"),
        (("--pool-size", "900GiB"), {}, "78", "the pool needs 900 GiB"),
        ((*SMALL, "--pool-dir", "/proc"), {}, "78", "--pool-dir='/proc' is not in memory"),
        ((*SMALL, "--pool-sise", "1MiB"), {}, "2", "--pool-sise"),
    ],
)
def test_what_no_other_start_would_change_is_shown_and_not_started_again(
    short_dir: Path, flags: tuple[str, ...], variables: dict[str, str], code: str, reason: str
) -> None:
    with Systemd(short_dir, flags=flags, **variables) as systemd:
        systemd.systemctl("start", "--no-block", "kvsidecar")
        assert systemd.wait("ActiveState", "failed") == "failed"
        assert (systemd.show("ExecMainStatus"), systemd.show("NRestarts")) == (code, "0")
        assert systemd.show("Result") == "exit-code"
        assert reason in systemd.show("StatusText")
        assert reason in systemd.log.read_text()


@under_systemd
def test_the_cache_outlives_a_crash_and_a_restart_of_the_unit_and_not_a_stop(short_dir: Path) -> None:
    flags = (*SMALL, "--log-level", "info")
    with Systemd(short_dir, flags=flags) as systemd:
        systemd.systemctl("start", "kvsidecar")
        rank = attach(systemd)
        done(rank.store("a", "b"))
        epoch = rank.client.epoch

        systemd.systemctl("restart", "kvsidecar")
        epoch = joined_another(rank, epoch)
        assert rank.hits("a", "b") == 2

        systemd.systemctl("kill", "--kill-whom=main", "--signal=SIGKILL", "kvsidecar")
        epoch = joined_another(rank, epoch)
        assert rank.hits("a", "b") == 2
        done(rank.load("a", "b", at=[4, 5]))
        assert rank.holds(4, "a")
        assert rank.holds(5, "b")
        assert systemd.show("NFileDescriptorStore") == "2"

        systemd.systemctl("stop", "kvsidecar")
        assert systemd.show("NFileDescriptorStore") == "0", "prompts are left behind by a unit that was stopped"
        systemd.systemctl("start", "kvsidecar")
        joined_another(rank, epoch)
        assert rank.hits("a", "b") == 0
        rank.close()
        starts = [line for line in systemd.log.read_text().splitlines() if '_blocks"' in line and " start" in line]
        assert ["warm" in line for line in starts] == [False, True, True, False]
