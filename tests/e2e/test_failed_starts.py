"""Starts that fail: the reason is the service manager's last status, at once, and the last line of standard error."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvsidecar.support.child_process import environment
from tests.e2e.restarts import CHUNKS
from tests.harness import SECONDS, DaemonProcess, Rank, done
from tests.marks import promise
from tests.service_manager import ServiceManager


def refused(directory: Path, *flags: str, **variables: str) -> tuple[int, str, list[str]]:
    """Exit code, last line of standard error, and every status that the service manager was given."""
    with ServiceManager(directory) as manager:
        variables["NOTIFY_SOCKET"] = manager.address
        with DaemonProcess(directory, *flags, until="stderr", **variables) as daemon:
            code = daemon.process.wait(SECONDS)
            said = [line["text"] for line in daemon.read_log() if line["event"] == "stderr"][-1]
        manager.drain()
        assert manager.fields("READY", "STOPPING") == [], "it was neither ready nor told to stop"
        return code, said.strip(), [text for _, text in manager.fields("STATUS")]


@pytest.mark.parametrize(
    ("flags", "code", "reason"),
    [
        (("--pool-dir", "/proc"), 78, "--pool-dir='/proc' is not in memory"),
        (("--pool-size", "lots"), 78, "--pool-size='lots'"),
        (("--pool-sise", "1MiB"), 2, "--pool-sise"),
        (("--devices", "host,none"), 78, "device none is not visible"),
        (
            ("--socket-group", "no-such-group", "--socket-mode", "0660"),
            78,
            "--socket-group='no-such-group' does not exist",
        ),
        (("--admin-group", "no such group"), 78, "--admin-group='no such group' does not exist on this machine"),
        (("--pool-size", "900GiB"), 78, "the pool needs 900 GiB"),
    ],
)
def test_a_start_that_fails_says_why_in_the_managers_status(
    short_dir: Path, flags: Sequence[str], code: int, reason: str
) -> None:
    ended, said, statuses = refused(short_dir, *flags)
    assert ended == code
    assert reason in said
    assert statuses[-1].startswith("failed: ")
    assert reason in statuses[-1]
    assert not any("stopping" in each for each in statuses)


@pytest.mark.parametrize("point", ["start.load", "pool.pin_chunk@3", "pool.reserve"])
def test_what_nobody_has_thought_of_is_said_too_and_may_be_tried_again(short_dir: Path, point: str) -> None:
    code, said, statuses = refused(short_dir, *CHUNKS, KVSIDECAR_FAILPOINTS=f"{point}=raise(no more pages)")
    assert code == 1
    assert "no more pages" in said
    assert statuses[-1].startswith("failed: ")
    assert "no more pages" in statuses[-1]
    assert not any("stopping" in each for each in statuses)


@promise("exit code 75")
def test_a_port_in_use_is_said(short_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code, said, statuses = refused(short_dir, "--http-port", str(port))
    assert code == 75
    assert statuses[-1] == f"failed: {said.removeprefix('kvsidecar: ')}"
    assert f"127.0.0.1:{port} (Address already in use)" in said


@pytest.mark.parametrize("limit", [2, 6, 10, 20])
def test_too_few_processes_are_said(short_dir: Path, limit: int) -> None:
    """Libraries in C end a process that they can start no thread in, by a signal and without a word."""
    command = [sys.executable, "-m", "kvsidecar", "serve", "--device", "host", "--socket", str(short_dir / "kvs.sock")]
    command += ["--http-port", "0", "--pool-size", "1MiB"]
    under = ["prlimit", f"--nproc={limit}"]
    if os.getuid() == 0:  # which may have any number
        under += ["setpriv", "--reuid=41005", "--inh-caps=+dac_override", "--ambient-caps=+dac_override"]
    ran = subprocess.run([*under, *command], env=environment(), capture_output=True, text=True, timeout=SECONDS)
    assert ran.returncode == 75
    assert "this user may start no more threads or processes" in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


def test_a_limit_of_file_sizes_is_named(short_dir: Path) -> None:
    with DaemonProcess(short_dir, until="stderr", under=["prlimit", f"--fsize={1 << 20}"]) as daemon:
        assert daemon.process.wait(SECONDS) == 78
        assert "RLIMIT_FSIZE" in daemon.read_log()[-1]["text"]


def test_a_file_in_the_sockets_place_is_said(short_dir: Path) -> None:
    (short_dir / "kvs.sock").write_text("precious")
    code, said, statuses = refused(short_dir)
    assert code == 73
    assert "is not a socket" in said
    assert statuses[-1] == f"failed: {said.removeprefix('kvsidecar: ')}"
    assert (short_dir / "kvs.sock").read_text() == "precious"


def test_a_daemon_that_stays_though_its_pool_cannot_be_pinned_keeps_the_reason_while_it_is_stopped(
    short_dir: Path,
) -> None:
    """What a manager does when the start has timed out."""
    failpoints = "pool.pin_chunk=raise(no more pages)"
    with ServiceManager(short_dir) as manager:
        variables = {"NOTIFY_SOCKET": manager.address, "KVSIDECAR_FAILPOINTS": failpoints}
        with DaemonProcess(short_dir, "--on-pin-failure", "stay", **variables) as daemon:
            assert "no more pages" in manager.wait("STATUS", "not ready: ")["STATUS"]
            daemon.process.send_signal(signal.SIGHUP)
            daemon.wait_log("settings reloaded")
            assert daemon.terminate() == 0
        manager.drain()
        assert "no more pages" in manager.fields("STATUS")[-1][1]
        assert manager.fields("READY", "STOPPING") == [("STOPPING", "1")]


# -- nothing is left ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "failpoints", "code"),
    [
        (("--http-port", "taken"), "", 75),
        (("--devices", "host,none"), "", 78),
        (("--admin-group", "no-such-group"), "", 78),
        (("--table-dir", "/proc"), "", 78),
        (("--pool-size", "900GiB"), "", 78),
        ((), "start.load=raise(no)", 1),
        ((), "pool.reserve=raise(no)", 1),
        ((), "pool.pin_chunk=raise(no)", 1),
    ],
)
def test_a_start_that_fails_leaves_no_directory_and_no_file(
    short_dir: Path, pool_dir: Path, flags: tuple[str, ...], failpoints: str, code: int
) -> None:
    made = short_dir / "made"
    with socket.create_server(("127.0.0.1", 0)) as other, ServiceManager(short_dir) as manager:
        flags = tuple(str(other.getsockname()[1]) if each == "taken" else each for each in flags)
        variables = {"NOTIFY_SOCKET": manager.address, "KVSIDECAR_FAILPOINTS": failpoints}
        flags = ("--pool-dir", str(pool_dir), *flags)
        with DaemonProcess(made / "deep", *flags, until="stderr", **variables) as daemon:
            assert daemon.process.wait(SECONDS) == code
    assert not made.exists()
    assert not pool_dir.exists()


def test_a_refused_directory_of_the_pool_is_not_made(short_dir: Path) -> None:
    on_disk = short_dir / "pool"
    with DaemonProcess(short_dir / "made", "--pool-dir", str(on_disk), until="stderr") as daemon:
        assert daemon.process.wait(SECONDS) == 78
        reason = f"--pool-dir='{on_disk}' is not in memory: use a directory on tmpfs"
        if reason not in daemon.log[-1]["text"]:
            pytest.skip("temporary files are in memory here")
    assert list(short_dir.iterdir()) == []


def test_the_memory_that_a_failed_start_has_given_to_the_manager_is_given_back(short_dir: Path) -> None:
    with ServiceManager(short_dir) as manager:
        variables = {"NOTIFY_SOCKET": manager.address, "KVSIDECAR_FAILPOINTS": "pool.pin_chunk=raise(no)"}
        with DaemonProcess(short_dir, until="stderr", **variables) as daemon:
            assert daemon.process.wait(SECONDS) == 1
        manager.drain()
        assert any("FDSTORE" in each for each in manager.heard)
        assert manager.stored == {}


def test_a_failed_start_leaves_what_was_there_before(short_dir: Path, pool_dir: Path) -> None:
    flags = ("--pool-dir", str(pool_dir))
    with DaemonProcess(short_dir, *flags) as daemon:
        rank = Rank(daemon.wait_ready())
        done(rank.store("a"))
        rank.close()
        assert daemon.terminate() == 0
    fails = (*flags, "--on-pin-failure", "exit")
    for failpoints in ("pool.pin_chunk=raise(no)", "start.load=raise(no)"):
        with DaemonProcess(short_dir, *fails, until="stderr", KVSIDECAR_FAILPOINTS=failpoints) as daemon:
            assert daemon.process.wait(SECONDS) == 1
    assert [each.name for each in short_dir.iterdir()] == ["kvs.sock.lock"]
    with DaemonProcess(short_dir, *flags) as daemon:
        rank = Rank(daemon.wait_ready())
        assert rank.hits("a") == 1
        rank.close()
