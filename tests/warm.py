"""Starts ``python -m kvsidecar`` as a fork of a process that has imported it: nine tenths of a daemon's start, and of
its copier's, are imports, and the tests start hundreds of daemons.

The process that is forked has imported what a daemon and a copier import until they are ready, nothing else, and has
done nothing else: it has no second thread, and has read no settings. A fork has descriptors, environment, working
directory and signals of its own, and dies with the process that was forked, which dies with the tests.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from kvsidecar.support.child_process import environment

READ_WHEN_NEEDED: Final = (
    "KVSIDECAR_", "PYTEST_CURRENT_TEST", "NOTIFY_SOCKET", "WATCHDOG_", "COLUMNS",
)  # fmt: skip
"""Beginnings of the variables that nothing has read when the process is forked."""
MAX_REQUEST_BYTES: Final = 1 << 17
ROOM: Final = 2000
"""Bytes of a command line that a list of processes shows."""
_PR_SET_PDEATHSIG: Final = 1


def _ready_poll(fd: int, seconds: float | None) -> bool:
    poll = select.poll()  # select() knows the first 1024 descriptors only
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if seconds is None else 1000 * seconds))


class Forked:
    """One that was started. What the tests use of `subprocess.Popen`."""

    def __init__(self, args: Sequence[str], pid: int, ended: int) -> None:
        self.args, self.pid = args, pid
        self.returncode: int | None = None
        self._ended = ended
        """A pipe that has the exit status when the process has ended."""
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None and _ready_poll(self._ended, 0.0):
                self.returncode = os.waitstatus_to_exitcode(int(os.read(self._ended, 16)))
                os.close(self._ended)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not _ready_poll(self._ended, timeout):
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has been waited for, which the pipe does not tell yet
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Origin:
    """The process that is forked, as the tests see it."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = dict(variables)
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        # The last argument is room for the command lines of the forks.
        command = [sys.executable, "-m", "tests.warm", str(theirs.fileno()), "-" * ROOM]
        with theirs:
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=variables
            )
        atexit.register(self._close)

    def _close(self) -> None:
        self._connection.close()
        self._process.wait()

    def fits(self, variables: Mapping[str, str]) -> bool:
        """Whether a process with these variables would have imported the same, in the same way."""
        differ = {name for name, _ in self._variables.items() ^ variables.items()}
        return all(name.startswith(READ_WHEN_NEEDED) for name in differ)

    def fork(self, arguments: Sequence[str], fds: Sequence[int], variables: Mapping[str, str]) -> int:
        request = {"arguments": arguments, "variables": dict(variables), "directory": os.getcwd()}
        with self._lock:
            socket.send_fds(self._connection, [json.dumps(request).encode()], fds)
            return int(self._connection.recv(16))


_origin: _Origin | None = None
_making = threading.Lock()


def start(arguments: Sequence[str], variables: Mapping[str, str], *, stdout: int = 1, stderr: int = 2) -> Forked | None:
    """Start ``kvsidecar`` with these arguments, and an empty standard input.

    Returns:
        None: it has to be started in the usual way, because of its variables.
    """
    global _origin
    sys.audit("tests.warm.start", arguments)
    with _making:
        if (origin := _origin) is None:
            origin = _origin = _Origin(environment())
    if not origin.fits(variables):
        return None
    with open(os.devnull, "rb") as null:
        ended, theirs = os.pipe()
        try:
            pid = origin.fork(arguments, [null.fileno(), stdout, stderr, theirs], variables)
        finally:
            os.close(theirs)
    return Forked(["kvsidecar", *arguments], pid, ended)


def _import() -> None:
    """What ``kvsidecar serve`` and its copier import until they are ready, in the way they do."""
    os.environ["GRPC_VERBOSITY"] = "NONE"  # see `kvsidecar.support.log`
    gc.disable()
    from kvsidecar.cli import main  # noqa: F401
    from kvsidecar.copier import process  # noqa: F401
    from kvsidecar.daemon import carriers, serve  # noqa: F401
    from kvsidecar.device import host  # noqa: F401

    settings: Any = SimpleNamespace(tracing="off")
    nothing: Any = None
    serve._load(settings, nothing, nothing)
    gc.enable()


def _serve(connection: socket.socket) -> str:
    """Fork for each request. Returns in a fork, the module that it runs, with ``sys.argv`` set for it."""
    me, running = os.getpid(), dict[int, tuple[int, int]]()
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd in running:
                pid, ended = running.pop(fd)
                with contextlib.suppress(BrokenPipeError):  # nobody asks any more
                    os.write(ended, str(os.waitpid(pid, 0)[1]).encode())
                poll.unregister(fd)
                os.close(ended)
                os.close(fd)
                continue
            data, fds, _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, 4)
            if not data:
                os._exit(0)  # the tests have ended
            if (pid := os.fork()) == 0:
                for each in (connection.detach(), *running, *(ended for _, ended in running.values()), fds.pop()):
                    os.close(each)
                return _become(json.loads(data), fds, me)
            pidfd = os.pidfd_open(pid)
            running[pidfd] = pid, fds.pop()
            poll.register(pidfd, select.POLLIN)
            for each in fds:
                os.close(each)
            connection.send(str(pid).encode())


def _become(request: dict[str, Any], fds: Sequence[int], parent: int) -> str:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, (name, fd) in enumerate(zip(("stdin", "stdout", "stderr"), fds, strict=True)):
        os.dup2(fd, number)
        os.close(fd)
        was = getattr(sys, name)
        buffering = 0 if isinstance(was.buffer, io.RawIOBase) else -1
        binary = open(number, was.buffer.mode, buffering, closefd=False)  # noqa: SIM115 - until the end of this process
        text = io.TextIOWrapper(binary, was.encoding, was.errors, was.newlines, was.line_buffering, was.write_through)
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["variables"])
    arguments = request["arguments"]
    if arguments[0] == "serve" and "--check" not in arguments and (copiers_end := _fork_copier()) is not None:
        return _named("kvsidecar.copier.process", str(copiers_end))
    return _named("kvsidecar", *arguments)


class _Copier:
    """What a daemon uses of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _fork_copier() -> int | None:
    """Fork the daemon's first copier, which waits until it is wanted. Those that replace it are started as always.

    Returns:
        The number of the copier's socket, in it; None in the daemon.
    """
    from kvsidecar.daemon import serve
    from kvsidecar.support.supervised_child import Launched

    near, far = socket.socketpair()
    wanted, want = os.pipe()
    if (pid := os.fork()) == 0:
        near.close()
        os.close(want)
        if not os.read(wanted, 1):
            os._exit(0)  # the daemon has ended
        os.close(wanted)
        del sys.modules["kvsidecar.copier.process"]  # runpy would warn: it runs it as the program
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        os.close(null)
        return far.detach()
    far.close()
    os.close(wanted)

    launch_as_always = serve.launch  # type: ignore[attr-defined]

    def launch(module: str) -> Launched:
        serve.launch = launch_as_always  # type: ignore[attr-defined]
        os.write(want, b"1")
        os.close(want)
        process: Any = _Copier(pid)
        return Launched(process, near)

    serve.launch = launch  # type: ignore[attr-defined]
    return None


def _named(module: str, *arguments: str) -> str:
    """Have /proc show the command line of the usual start, as far as there is room. Returns the module."""
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    words = [sys.executable, "-m", module, *arguments]
    text = b"".join(os.fsencode(word) + b"\0" for word in words)
    ctypes.memmove(start, text[: end - start].ljust(end - start, b"\0"), end - start)
    sys.argv[1:] = arguments
    return module


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's: the tests decide
    _import()
    gc.freeze()  # a collection in a fork would write to the pages that it shares
    runpy.run_module(_serve(socket.socket(fileno=int(sys.argv[1]))), run_name="__main__", alter_sys=True)
