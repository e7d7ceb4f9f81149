"""Child processes that do not outlive their parent: how one is started, and ended."""

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

_LAUNCHER: Final = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGTERM
if os.getppid() == int(sys.argv[1]):  # else the parent has died before the kernel was told
    os.execvp(sys.argv[2], sys.argv[2:])
"""


def environment(**more: str) -> dict[str, str]:
    """Of this process, without the settings of a daemon that its user runs for real."""
    return {**{name: value for name, value in os.environ.items() if not name.startswith("KVSIDECAR_")}, **more}


def start(command: Sequence[str], *, cores: frozenset[int] | None = None, **options: Any) -> subprocess.Popen[Any]:
    """Start a process that the kernel sends SIGTERM when the calling thread ends, however this process dies.

    Ctrl-C and SIGTERM wait until it is there, and raise then; it is killed first, because nobody would know it.

    Args:
        cores: the cores that it may run on; None for those of this process.
        options: of `subprocess.Popen`; without ``env`` it gets `environment`.
    """
    launched = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command]
    process: subprocess.Popen[Any] | None = None
    mine = os.sched_getaffinity(0)
    try:
        with _signals_held():
            if cores is not None:
                os.sched_setaffinity(0, cores)  # of this thread, and inherited by what it starts
            try:
                process = subprocess.Popen(launched, **{"env": environment(), **options})
            finally:
                os.sched_setaffinity(0, mine)
    except BaseException:
        if process is not None:
            process.kill()
            process.wait()
        raise
    return process


def stop(process: subprocess.Popen[Any], seconds: float, *, group: bool = False) -> bool:
    """SIGTERM, and SIGKILL to what has not ended after ``seconds`` or when this is interrupted.

    Args:
        group: to all of its process group, some of which may outlive it.

    Returns:
        Whether it has ended by itself.
    """

    def send(number: signal.Signals) -> None:
        if group:
            with suppress(ProcessLookupError):  # they are over
                os.killpg(process.pid, number)
        else:
            process.send_signal(number)  # unless it is over

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


def last_lines(log: Path, count: int = 8) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-count:])


@contextmanager
def _signals_held() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait until the block has ended.

    One that arrives inside `subprocess.Popen` would lose the process that was just started. By a handler and not by a
    mask: a mask would be inherited, and this process's other threads would take the signal all the same.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python raises them in the main thread only
        return
    held: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: held.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for came in held:
            signal.raise_signal(came)
