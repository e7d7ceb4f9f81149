"""Starts and stops child processes that do not outlive their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from kvsidecar.errors import TooManyProcesses
from kvsidecar.support.threads import LIMITS

_LAUNCHER: Final = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGTERM
if sys.argv[2] == "session":
    os.setsid()
if os.getppid() == int(sys.argv[1]):  # else the parent died before prctl
    os.execvp(sys.argv[3], sys.argv[3:])
"""


def environment(**more: str) -> dict[str, str]:
    """The environment of this process without the settings of a daemon, plus ``more``."""
    return {**{name: value for name, value in os.environ.items() if not name.startswith("KVSIDECAR_")}, **more}


def spawn(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """`subprocess.Popen` that never forks.

    `Popen` asks for a child that shares this process's memory until it executes the command, and where the kernel has
    none to give, because there are as many processes as may be, it forks. That runs what libraries have registered for
    a fork, whether or not the kernel has one then: gRPC's ends this process. With these options it uses posix_spawn,
    which fails. The child inherits the descriptors that are inheritable; those that Python makes are not.

    Args:
        command: begins with a path.

    Raises:
        TooManyProcesses, OSError: it cannot be started.
    """
    try:
        return subprocess.Popen(command, close_fds=False, **options)
    except BlockingIOError as error:
        raise TooManyProcesses(f"this user may start no more processes at present ({LIMITS})") from error


def start(
    command: Sequence[str], *, cores: frozenset[int] | None = None, start_new_session: bool = False, **options: Any
) -> subprocess.Popen[Any]:
    """Start a process to which the kernel sends SIGTERM when the calling thread ends, however this process dies.

    Ctrl-C and SIGTERM are delayed until the process is started. If they raise then, it is killed first, because the
    caller would have no handle on it.

    Args:
        cores: CPU cores that it may run on; None for those of this process.
        start_new_session: see `subprocess.Popen`.
        options: for `subprocess.Popen`. The default of ``env`` is `environment`.
    """
    session = "session" if start_new_session else "same"
    launched = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), session, *command]
    process: subprocess.Popen[Any] | None = None
    own_cores = None if cores is None else os.sched_getaffinity(0)
    try:
        with _signals_delayed():
            if cores is not None:
                os.sched_setaffinity(0, cores)  # of this thread; the child inherits it
            try:
                process = spawn(launched, **{"env": environment(), **options})
            finally:
                if own_cores is not None:
                    os.sched_setaffinity(0, own_cores)
    except BaseException:
        if process is not None:
            process.kill()
            process.wait()
        raise
    return process


def stop(process: subprocess.Popen[Any], seconds: float, *, group: bool = False) -> bool:
    """Send SIGTERM, and SIGKILL after ``seconds`` or on an interrupt.

    Args:
        group: signal the whole process group, parts of which may outlive the process.

    Returns:
        Whether SIGTERM was enough.
    """

    def send(number: signal.Signals) -> None:
        if group:
            with suppress(ProcessLookupError):  # all have exited
                os.killpg(process.pid, number)
        else:
            process.send_signal(number)  # no effect after its exit

    try:
        if process.poll() is None:
            send(signal.SIGTERM)
            process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    finally:
        send(signal.SIGKILL)
        process.wait()
    return True


def how_ended(code: int) -> str:
    """How a process has ended, by the code of `subprocess.Popen`. Real-time signals have no names."""
    if code >= 0:
        return f"exit code {code}"
    return signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"


def last_lines(log: Path, count: int = 8) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-count:])


@contextmanager
def _signals_delayed() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the end of the block.

    A signal inside `subprocess.Popen` would lose the process that was just started. A handler is used rather than a
    mask: the child would inherit a mask, and other threads of this process would receive the signal anyway.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python runs signal handlers in the main thread only
        return
    received: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for pending in received:
            signal.raise_signal(pending)
