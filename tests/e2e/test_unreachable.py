"""What a person is told who cannot reach the daemon, as other users of the machine, through the command line."""

from __future__ import annotations

import grp
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvsidecar.client import Client, SocketDenied
from tests.harness import SECONDS, DaemonProcess, environment, root_of

UID = 61234
OWN_RUN = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o mode=0755 tmpfs /run && exec "$@"', "sh")
"""A /run of the daemon's own, so that its usual place is free."""
SYSTEM = "/run/kvsidecar/kvsidecar.sock"


def unusable() -> str | None:
    if os.geteuid() != 0:
        return "needs root"
    tried = subprocess.run([*OWN_RUN, "setpriv", "--reuid", "1", "true"], capture_output=True, text=True)
    return f"namespaces are not allowed: {tried.stderr.strip()}" if tried.returncode else None


pytestmark = pytest.mark.skipif(unusable() is not None, reason=unusable() or "")


def other_user(
    *arguments: str, gids: Sequence[int] = (), inside: DaemonProcess | None = None
) -> subprocess.CompletedProcess[str]:
    """A command as another user, in the mount namespace of a daemon, or where no daemon ever was."""
    command = ["nsenter", "-t", str(inside.process.pid), "--mount"] if inside else list(OWN_RUN)
    groups = f"--groups={','.join(map(str, gids))}" if gids else "--clear-groups"
    command += ["setpriv", f"--reuid={UID}", f"--regid={UID}", groups, sys.executable, "-m", "kvsidecar", *arguments]
    variables = environment(PYTHONPATH=str(Path(__file__).parents[2]), PYTHONDONTWRITEBYTECODE="1")
    variables.pop("XDG_RUNTIME_DIR", None)
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=variables)


@pytest.mark.parametrize("command", [["status"], ["drain"], ["top", "--once"], ["bench", "--only", "lookup"]])
def test_a_socket_of_another_group_names_path_mode_owner_and_remedy(short_dir: Path, command: list[str]) -> None:
    short_dir.chmod(0o755)
    with DaemonProcess(short_dir, "--socket-mode", "0660", "--socket-group", "games") as daemon:
        told = other_user(*command, "--socket", daemon.socket)
    assert told.returncode == (69 if command[0] == "bench" else 77), told.stderr
    assert told.stderr.count("\n") == 1
    assert f"{daemon.socket} has mode 0660 and belongs to root:games, but this process runs as uid {UID}" in told.stderr
    assert "run this in the group games (gpasswd -a USER games " in told.stderr
    assert "is the daemon running?" not in told.stderr


def test_a_directory_that_is_closed_is_named_and_not_the_socket_in_it(short_dir: Path) -> None:
    with DaemonProcess(short_dir) as daemon:
        told = other_user("status", "--socket", daemon.socket)
    assert told.returncode == 77
    assert f"{short_dir} has mode 0700 and belongs to root:root" in told.stderr
    assert "start the daemon with --socket-mode 0660 and a --socket-group that has this user" in told.stderr


def test_what_a_user_is_told_lets_them_in_although_an_earlier_daemon_has_closed_the_directory(short_dir: Path) -> None:
    short_dir.chmod(0o755)
    socket = f"{short_dir}/kvsidecar/kvsidecar.sock"
    with DaemonProcess(short_dir, "--socket", socket) as daemon:
        told = other_user("status", "--socket", socket)
        assert told.returncode == 77
        assert f"{short_dir}/kvsidecar has mode 0700" in told.stderr
        assert ".attach" not in told.stderr
        assert daemon.terminate() == 0
    flags = ("--socket", socket, "--socket-mode", "0660", "--socket-group", "games")
    with DaemonProcess(short_dir, *flags) as daemon:
        assert [each["event"] for each in daemon.log].count("opened the directory of the socket to its group") == 1
        assert other_user("status", "--socket", socket, gids=[grp.getgrnam("games").gr_gid]).returncode == 0
        assert other_user("status", "--socket", socket).returncode == 77


def test_an_engine_learns_it_as_a_daemon_that_may_be_there_later(short_dir: Path) -> None:
    short_dir.chmod(0o755)
    with DaemonProcess(short_dir) as daemon:
        pid = os.fork()
        if not pid:
            os.setuid(UID)
            try:
                Client(daemon.socket, timeout=SECONDS).status()
            except SocketDenied:
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("may_open", [False, True])
def test_a_user_without_a_daemon_is_told_of_the_machines_own(short_dir: Path, may_open: bool) -> None:
    gid = 4711
    flags = ("--socket", SYSTEM, "--socket-mode", "0660")
    with DaemonProcess(short_dir, *flags, under=OWN_RUN) as daemon:
        for suffix in ("", ".attach"):
            os.chown(f"{root_of(daemon.process.pid)}{SYSTEM}{suffix}", -1, gid)
        told = other_user("status", gids=[gid] if may_open else [], inside=daemon)
        assert told.returncode == 69
        assert f"no kvsidecar answers at /tmp/kvsidecar-{UID}/kvsidecar.sock (No such file" in told.stderr
        assert told.stderr.count("\n") == 1
        if may_open:
            assert f"there is one at {SYSTEM}: name it with --socket or KVSIDECAR_SOCKET" in told.stderr
            assert other_user("status", "--socket", SYSTEM, gids=[gid], inside=daemon).returncode == 0
        else:
            assert f"there is one at {SYSTEM}, but {SYSTEM} has mode 0660 and belongs to root:gid" in told.stderr
        os.chmod(root_of(daemon.process.pid) / "run" / "kvsidecar", 0o750)
        told = other_user("status", inside=daemon)
        assert f"there may be one at {SYSTEM}, but /run/kvsidecar has mode 0750" in told.stderr
    assert "is the daemon running?" in other_user("status", inside=None).stderr
