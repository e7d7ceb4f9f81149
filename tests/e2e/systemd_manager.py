"""A real systemd as PID 1 of namespaces of its own, for the tests of the units: what it may break is its own.

It needs root, systemd, and a cgroup v2 hierarchy to make a group in. Nothing outside its PID, mount, IPC, UTS and
cgroup namespaces is seen or signalled by it; its units come from a directory of the test, and nothing else is started.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from tests.harness import SECONDS, eventually, root_of

Answer = TypeVar("Answer")

SYSTEMD = Path("/usr/lib/systemd/systemd")
REPOSITORY = Path(__file__).parents[2]
UNITS = REPOSITORY / "deploy" / "systemd"
_NAMESPACES = ("--pid", "--fork", "--kill-child", "--mount", "--uts", "--ipc", "--cgroup")
DROP_IN = "kvsidecar.service.d/test.conf"
TARGETS = ("sysinit", "basic", "shutdown", "multi-user", "network")

# What a distribution's boot would have done, for the few things that the units need.
_START = r"""
set -eu
mount -t proc proc /proc
umount -R /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t tmpfs -o mode=0755 tmpfs /run
mkdir /run/units /run/generators
cp -r "$1"/units/. /run/units/
mount --bind "$1"/etc /etc
exec env -i container=tests PATH="$PATH" SYSTEMD_UNIT_PATH=/run/units SYSTEMD_GENERATOR_PATH=/run/generators \
    SYSTEMD_ENVIRONMENT_GENERATOR_PATH=/run/generators \
    "$2" --system --unit=basic.target --log-target=null --show-status=no
"""


def unusable() -> str | None:
    """Why there can be no systemd of our own here, or None."""
    if os.geteuid() != 0:
        return "needs root"
    if not SYSTEMD.exists():
        return "there is no systemd here"
    if not all(shutil.which(program) for program in ("unshare", "nsenter", "systemctl", "systemd-sysusers")):
        return "needs unshare, nsenter, systemctl and systemd-sysusers"
    if _cgroup_root() is None:
        return "there is no cgroup v2 hierarchy to write to"
    mount = ["unshare", *_NAMESPACES, "mount", "-t", "tmpfs", "tmpfs", "/run"]
    tried = subprocess.run(mount, capture_output=True, text=True)
    return f"namespaces are not allowed: {tried.stderr.strip()}" if tried.returncode else None


def _reloads() -> list[str]:
    """What the unit runs for a reload."""
    unit = (UNITS / "kvsidecar.service").read_text()
    return [line for line in unit.splitlines() if line.startswith("ExecReload=")]


def _cgroup_root() -> Path | None:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, *_ = line.split()
        if kind == "cgroup2" and os.access(where, os.W_OK):
            return Path(where)
    return None


class Systemd:
    """The project's own unit, with what a test must change in a drop-in, under a systemd that this starts.

    Args:
        directory: for files.
        settings: lines of ``[Service]`` of the drop-in.
        flags: of ``kvsidecar serve``.
        variables: of the daemon.
    """

    def __init__(self, directory: Path, *settings: str, flags: tuple[str, ...] = (), **variables: str) -> None:
        self._directory = directory
        self.log = directory / "daemon.log"
        self._write_units(settings, flags, variables)
        # The users and groups that an installation would have, by the project's own sysusers file. A copy of /etc as a
        # whole: of a file that is mounted alone, the mount ends when somebody replaces the file outside.
        subprocess.run(["cp", "-a", "/etc", str(directory)], capture_output=True)
        command = ["systemd-sysusers", f"--root={directory}", str(UNITS / "sysusers.conf")]
        subprocess.run(command, check=True, capture_output=True)

        root = _cgroup_root()
        assert root is not None
        self._cgroup = root / f"kvsidecar-tests-{os.getpid()}-{time.monotonic_ns()}"
        self._cgroup.mkdir()
        join = f"echo 0 > {self._cgroup}/cgroup.procs && exec "
        unshare = f'unshare {" ".join(_NAMESPACES)} bash -c "$0" bash "$1" "$2"'
        with (directory / "systemd.log").open("wb") as log:
            self._unshare = subprocess.Popen(
                ["bash", "-c", join + unshare, _START, str(directory), str(SYSTEMD)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        try:
            self._until(
                lambda: self._systemctl("is-system-running").stdout.strip() in ("running", "degraded"), "systemd"
            )
        except BaseException:
            print((directory / "systemd.log").read_text())
            self._end()
            raise

    def change(self, *settings: str) -> None:
        """Add lines to ``[Service]``, and have systemd read them. Timeouts still count from when the state began."""
        with self.path(f"/run/units/{DROP_IN}").open("a") as file:
            file.write("\n".join(settings) + "\n")
        self.systemctl("daemon-reload")

    def _write_units(self, settings: tuple[str, ...], flags: tuple[str, ...], variables: dict[str, str]) -> None:
        units = self._directory / "units"
        drop_in = units / DROP_IN
        drop_in.parent.mkdir(parents=True)
        for unit in UNITS.glob("*.service"):
            shutil.copy(unit, units)
        for target in TARGETS:
            (units / f"{target}.target").write_text("[Unit]\nDefaultDependencies=no\n")
        needed = {str(REPOSITORY), sys.prefix, sys.base_prefix}
        lines = [
            "ExecStart=",
            f"ExecStart={sys.executable} -m kvsidecar serve --device host --http-port 0 {' '.join(flags)}",
            "ExecReload=",
            *(line.replace("/opt/kvsidecar/bin/kvsidecar", f"{sys.executable} -m kvsidecar") for line in _reloads()),
            f"StandardError=append:{self.log}",
            f"Environment=PYTHONPATH={REPOSITORY} PYTHONDONTWRITEBYTECODE=1",
            f"BindReadOnlyPaths={' '.join(sorted(needed))}",
            # Homes are hidden all the same; a Python that lies in one can be mounted into this.
            "ProtectHome=tmpfs",
            "RestartSec=100ms",
            *(f'Environment="{name}={value}"' for name, value in variables.items()),
            *settings,
        ]
        # Who looks late has seen more starts than the limit of a unit allows that waits for a moment in between only.
        drop_in.write_text("[Unit]\nStartLimitIntervalSec=0\n[Service]\n" + "\n".join(lines) + "\n")

    def _inside(self) -> int:
        """PID of systemd, as seen from here."""
        children = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children").read_text().split()
        return int(children[0]) if children else 0

    def _systemctl(self, *command: str) -> subprocess.CompletedProcess[str]:
        pid = self._inside()
        if not pid:
            return subprocess.CompletedProcess(command, 1, "", "systemd has not started")
        nsenter = ["nsenter", "-t", str(pid), "--all", "systemctl", "--no-pager", *command]
        return subprocess.run(nsenter, capture_output=True, text=True, timeout=4 * SECONDS)

    def systemctl(self, *command: str) -> None:
        """Such as ``start kvsidecar``: returns when that is done."""
        done = self._systemctl(*command)
        assert done.returncode == 0, done.stderr

    def refuses(self, *command: str) -> bool:
        """Whether this fails."""
        return self._systemctl(*command).returncode != 0

    def show(self, name: str) -> str:
        """A property of the unit."""
        return self._systemctl("show", "kvsidecar", "--property", name, "--value").stdout.strip()

    def wait(self, name: str, text: str) -> str:
        """The property as it was when it had ``text`` in it, which it may have had only for a while."""
        return self._until(lambda: now if text in (now := self.show(name)) else "", f"{name} with {text!r}")

    def wait_restarts(self, count: int) -> None:
        """Until the unit was restarted so many times, or more often."""
        self._until(lambda: int(self.show("NRestarts")) >= count, f"{count} restarts")

    def _until(self, answer: Callable[[], Answer], what: str) -> Answer:
        return eventually(answer, lambda: f"{what}: {self._systemctl('status', 'kvsidecar').stdout}", pause=0.02)

    def path(self, path: str) -> Path:
        """A path as systemd sees it."""
        return root_of(self._inside()).joinpath(*Path(path).parts[1:])

    @contextlib.contextmanager
    def container(self, directory: str) -> Iterator[Path]:
        """A mount namespace that a directory is bound into, as into a container; gives the mount as seen from here."""
        inside = ["nsenter", "-t", str(self._inside()), "--mount", "unshare", "--mount", "sh", "-c"]
        bound = f"mkdir -p /mnt && mount --bind {directory} /mnt && echo bound && exec sleep infinity"
        with subprocess.Popen([*inside, bound], stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "bound\n"
                yield root_of(process.pid) / "mnt"
            finally:
                process.kill()

    def __enter__(self) -> Systemd:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            print(self._systemctl("status", "kvsidecar").stdout)
            for log in (self._directory / "systemd.log", self.log):
                print(log.name, log.read_text() if log.exists() else "", sep=":\n")
        self._end()

    def _end(self) -> None:
        if pid := self._inside():
            os.kill(pid, signal.SIGKILL)  # and with it all of its PID namespace
        self._unshare.kill()
        self._unshare.wait()
        deadline = time.monotonic() + SECONDS
        while self._cgroup.exists() and time.monotonic() < deadline:
            for group in sorted(self._cgroup.rglob("*/"), reverse=True):
                with contextlib.suppress(OSError):
                    group.rmdir()
            with contextlib.suppress(OSError):
                self._cgroup.rmdir()
