"""``kvsidecar serve --check`` says what a start says, and touches nothing."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cli.command import run
from tests.harness import DaemonProcess
from tests.marks import processes
from tests.service_manager import ServiceManager

pytestmark = processes

RULE = '[[policy]]\nuids = [0]\nnamespaces = ["*"]\ncertificates = ["a"]\n'
TLS = ("--tls-certificate", "/nowhere/a.pem", "--tls-key", "/nowhere/b.pem", "--tls-client-ca", "/nowhere/c.pem")
SHARE = '[[share]]\nname = "a"\nnamespaces = ["a"]\nguaranteed = "2MiB"\n'


def everything_in(directory: Path) -> list[str]:
    return sorted(str(each) for each in directory.rglob("*"))


def check(directory: Path, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """With sockets in a directory that is not there."""
    socket = str(directory / "missing" / "kvs.sock")
    own = ["--check", "--device", "host", "--socket", socket]
    for flag, value in (("--pool-size", "1MiB"), ("--http-port", "0")):
        own += () if flag in flags else (flag, value)
    return run("serve", *own, *flags, **variables)


@pytest.mark.parametrize(
    ("flags", "file", "variables"),
    [
        (("--pool-size", "lots"), "", {}),
        (("--pool-sise", "1MiB"), "", {}),
        ((), "stuck_aftr = 4\n", {}),
        ((), "stuck_after = \n", {}),
        ((), '[[policy]]\nuids = ["me"]\n', {}),
        ((), SHARE, {}),
        ((), "", {"KVSIDECAR_POOL_SIZ": "1GiB"}),
        ((), "", {"KVSIDECAR_FAILPOINTS": "no.such=kill"}),
        (("--socket-group", "no-such-group", "--socket-mode", "0660"), "", {}),
        (("--admin-group", "no-such-group"), "", {}),
        (("--http-host", "no such host"), "", {}),
        (("--pool-dir", "/proc"), "", {}),
        (("--pool-dir", "/proc/pool"), "", {}),
        (("--pool-dir", "/dev/shm/none/pool"), "", {}),
        (("--tcp-listen", "127.0.0.1:0", *TLS), RULE, {}),
    ],
)
def test_what_is_wrong_is_said_in_the_words_of_a_start(
    short_dir: Path, flags: Sequence[str], file: str, variables: dict[str, str]
) -> None:
    (short_dir / "kvsidecar.toml").write_text(file)
    (apart := short_dir / "apart").mkdir()
    flags = ("--config", str(short_dir / "kvsidecar.toml"), *flags)
    before = everything_in(short_dir)
    checked = check(short_dir, *flags, **variables)
    assert everything_in(short_dir) == before
    with DaemonProcess(apart, *flags, until="stderr", **variables) as daemon:
        code = daemon.process.wait(60)
        said = "".join(line["text"] for line in daemon.read_log() if line["event"] == "stderr")
    assert (checked.returncode, checked.stdout) == (code, "")
    assert checked.stderr == said
    assert code in (2, 78)


def test_settings_that_a_start_takes_are_one_line_and_nothing_is_touched(short_dir: Path, pool_dir: Path) -> None:
    file = short_dir / "kvsidecar.toml"
    file.write_text("stuck_after = 5\n")
    before = everything_in(short_dir)
    with ServiceManager(short_dir) as manager:
        notified = {"NOTIFY_SOCKET": manager.address}
        right = check(short_dir, "--config", str(file), "--pool-dir", str(pool_dir), **notified)
        wrong = check(short_dir, "--pool-size", "lots", **notified)
        mistyped = check(short_dir, "--pool-sise", "1MiB", **notified)
        manager.drain()
        assert manager.heard == [], "the status of the daemon that runs is overwritten"
    (short_dir / "notify").unlink()
    assert (right.returncode, right.stderr) == (0, "")
    assert right.stdout == f"ok: a pool of 1 MiB, served at {short_dir}/missing/kvs.sock\n"
    assert (wrong.returncode, mistyped.returncode) == (78, 2)
    assert everything_in(short_dir) == before
    assert not pool_dir.exists()


def test_it_can_be_asked_beside_the_daemon_that_it_is_for(short_dir: Path, pool_dir: Path) -> None:
    """As the unit does before a reload."""
    with DaemonProcess(short_dir, "--pool-dir", str(pool_dir)) as daemon:
        daemon.wait_ready()
        port = daemon.http.rpartition(":")[2]
        flags = ("--pool-size", "1MiB", "--socket", daemon.socket, "--http-port", port, "--pool-dir", str(pool_dir))
        found = run("serve", "--check", "--device", "host", *flags)
        assert (found.returncode, found.stderr) == (0, "")
        daemon.process.send_signal(signal.SIGHUP)
        daemon.wait_log("settings reloaded")
        assert os.path.exists(daemon.socket)
        assert daemon.terminate() == 0


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("/proc/none/kvs.sock", "cannot use /proc/none for the socket (/proc is on a file system that holds no files)"),
        ("{}/file/kvs.sock", "cannot use {0}/file for the socket ({0}/file is not a directory)"),
        ("{}/directory", "{}/directory exists and is not a socket"),
        ("{}/kvs.sock", "{}/kvs.sock.attach exists and is not a socket"),
    ],
)
def test_a_socket_that_a_start_cannot_make_is_refused_with_the_same_code(short_dir: Path, place: str, why: str) -> None:
    for name in ("directory", "kvs.sock.attach"):
        (short_dir / name).mkdir()
    (short_dir / "file").touch()
    before = everything_in(short_dir)
    flags = ("--device", "host", "--pool-size", "1MiB", "--http-port", "0", "--socket", place.format(short_dir))
    checked, started = run("serve", "--check", *flags), run("serve", *flags)
    assert (checked.returncode, started.returncode) == (73, 73)
    assert why.format(short_dir) in checked.stderr
    assert "set --socket to another path" in checked.stderr
    assert everything_in(short_dir) == before


def test_what_holds_no_files_is_named_by_the_option_as_it_was_given(short_dir: Path) -> None:
    why = "/proc/none cannot be made: /proc is on a file system that holds no files"
    told = check(short_dir, "--disk-dir", "/proc/none", "--disk-size", "1MiB")
    assert (told.returncode, f"; without --disk-dir: {why}" in told.stdout) == (0, True), told
    told = check(short_dir, KVSIDECAR_SHARED_DIR="/proc/none", KVSIDECAR_SHARED_SIZE="1MiB")
    assert (told.returncode, f"; without KVSIDECAR_SHARED_DIR: {why}" in told.stdout) == (0, True), told
    told = check(short_dir, "--disk-dir", "/proc", "--disk-size", "1MiB")
    assert "without --disk-dir: /proc " in told.stdout


def test_a_tier_that_a_start_goes_on_without_is_named_and_nothing_is_made(short_dir: Path) -> None:
    wanted = ("--disk-dir", str(short_dir / "none" / "disk"), "--disk-size", "1MiB")
    told = check(short_dir, *wanted)
    assert told.returncode == 0
    assert f"without --disk-dir: {short_dir}/none/disk cannot be made: {short_dir}/none does not exist" in told.stdout
    assert everything_in(short_dir) == []
    (short_dir / "none").mkdir()
    assert "without" not in check(short_dir, *wanted).stdout
    (short_dir / "none" / "disk").mkdir(mode=0o700)
    assert "without" not in check(short_dir, *wanted).stdout
    (short_dir / "none" / "disk").chmod(0o777)
    assert f"without --disk-dir: {short_dir}/none/disk has mode 0777: others could" in check(short_dir, *wanted).stdout
