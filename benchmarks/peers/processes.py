"""Servers and workers as child processes: started, watched, and always ended, with their words in log files."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

from kvsidecar.support import child_process

ROOT: Final = Path(__file__).resolve().parents[2]
"""The checkout: workers are started as modules of it."""
GRACE: Final = 15.0
"""Seconds between SIGTERM and SIGKILL."""
_ESCAPES: Final = re.compile(r"\x1b\[[0-9;]*m")
_BACKTRACE: Final = re.compile(r"note: |stack backtrace:|\d+: |at /")
"""What Rust prints behind the reason of a panic."""


class PeerFailedError(RuntimeError):
    """A peer did not start, did not end in time, or ended badly."""


class Child:
    """One child process in a process group of its own; leaving the context ends the whole group.

    A group, because PegaFlow's launcher does not pass signals on to its server. Not a session: a child shall not
    survive whoever ends this process together with its session.

    Args:
        name: in errors.
        log: file for its standard output and error, overwritten.
        extra: environment variables besides this process's own.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path, extra: Mapping[str, str] | None = None) -> None:
        self.name, self.log = name, log
        self._command = list(command)
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYTHONUNBUFFERED": "1",
            **(extra or {}),
        }
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Child:
        with self.log.open("wb") as log:
            self._process = child_process.start(
                self._command,
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def wait_until(self, ready: Callable[[], bool], seconds: float) -> None:
        """Wait until it is ready. Raises PeerFailedError: it ended before, or it is not ready after ``seconds``."""
        deadline = time.monotonic() + seconds
        while not ready():
            if not self.running:
                raise PeerFailedError(f"{self.name} ended before it was ready: {self.last_words()}")
            if time.monotonic() > deadline:
                raise PeerFailedError(f"{self.name} is not ready after {seconds:g} s: {self.last_words()}")
            time.sleep(0.1)

    def wait(self, seconds: float) -> None:
        """Wait for its end. Raises PeerFailedError: it failed, or it still runs after ``seconds``."""
        if self._process is None:
            raise PeerFailedError(f"{self.name} was not started")
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise PeerFailedError(f"{self.name} was not done after {seconds:g} s: {self.last_words()}") from None
        if status:
            raise PeerFailedError(f"{self.name} ended with {_ending(status)}: {self.last_words()}")

    def end(self) -> None:
        """SIGTERM to the group, SIGKILL after a while. Harmless if it is over."""
        if self._process is not None:
            child_process.stop(self._process, GRACE, group=True)

    def last_words(self) -> str:
        """The last line of its log that says something, and where the log is."""
        lines = [" ".join(_ESCAPES.sub("", line).split()) for line in self.text().splitlines()]
        said = [line for line in lines if line and not _BACKTRACE.match(line)]
        return f"{said[-1][:300] if said else 'it said nothing'} ({self.log})"

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""


def _ending(status: int) -> str:
    return f"status {status}" if status >= 0 else signal.Signals(-status).name


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def answers(url: str) -> bool:
    """Whether a GET is answered with 200."""
    try:
        with urllib.request.urlopen(url, timeout=1) as answer:
            return bool(answer.status == 200)
    except OSError:  # refused, reset, timed out, or answered with another status (HTTPError)
        return False


def library_path(
    wanted: Sequence[str] = ("libpython*.so*", "libcudart.so*", "libnvrtc.so*"), search: Sequence[Path] | None = None
) -> str:
    """``LD_LIBRARY_PATH`` for a server whose shared libraries pip and the system keep where the loader does not look.

    PegaFlow's server needs libpython3.X.so.1.0, libcudart.so.13 and, for its kernels, libnvrtc.so.13.

    Returns:
        What the variable holds now, and behind it every folder of ``search`` that has one of the ``wanted`` files.
    """
    folders = [folder for folder in (_library_folders() if search is None else search) if folder.is_dir()]
    found = [str(folder) for folder in folders if any(any(folder.glob(pattern)) for pattern in wanted)]
    return os.pathsep.join(
        dict.fromkeys(filter(None, [*os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep), *found]))
    )


def _library_folders() -> list[Path]:
    paths = [Path(entry) for entry in sys.path if entry]
    pip = [folder for path in paths for folder in sorted(path.glob("nvidia/*/lib"))]
    own = [Path(sysconfig.get_config_var("LIBDIR") or ""), Path(sys.base_prefix, "lib")]
    multiarch = sysconfig.get_config_var("MULTIARCH")
    system = [Path("/usr/lib", multiarch)] if multiarch else []
    cuda = [Path("/usr/local/cuda/lib64"), Path("/usr/local/cuda/targets/x86_64-linux/lib")]
    return [*own, *system, *pip, *cuda]
