"""Starts a copier's process. Imports little: the first one starts while the daemon still imports its own modules."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import kvsidecar

_ROOT: Final = str(Path(kvsidecar.__file__).resolve().parents[1])


@dataclass(frozen=True, slots=True)
class Launched:
    """A process that was started, and the daemon's end of its socket."""

    process: subprocess.Popen[bytes]
    connection: socket.socket


def launch() -> Launched:
    """Start a process, which waits for requests.

    Call this in the main thread: the kernel kills the process when the thread that started it ends.

    It inherits no lock: stopped in its first instants, before it has asked the kernel to die with the daemon, it would
    hold it for ever. It is given the locks afterwards: see `kvsidecar.copier.link.CopierLink.hello`.

    Raises:
        OSError: no process can be started.
    """
    near, far = socket.socketpair()
    # -P: a module in the working directory must not take the place of one of ours.
    command = [sys.executable, "-P", "-m", "kvsidecar.copier.process", str(far.fileno())]
    paths = [_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        with far:
            process = subprocess.Popen(
                command,
                pass_fds=(far.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )
    except BaseException:
        near.close()
        raise
    return Launched(process, near)
