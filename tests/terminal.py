"""What a person sees in a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence

from kvsidecar.support import child_process
from tests.harness import environment, eventually

_AS_A_TERMINAL_DOES = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(1, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Goes before the command. Its signals are not what the tests were started with, as by nohup."""


class Terminal:
    """A command in a pseudo-terminal.

    Args:
        arguments: of `kvsidecar`.
        columns: its width; it has 24 lines.
        under: a command that runs the other one.
        stdin: whether standard input is the terminal; otherwise it is empty.
        variables: of the environment.
    """

    def __init__(
        self, *arguments: str, columns: int = 80, under: Sequence[str] = (), stdin: bool = True, **variables: str
    ) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
        self.before = termios.tcgetattr(slave)
        self._slave = slave
        command = [
            sys.executable,
            "-I",
            "-S",
            "-c",
            _AS_A_TERMINAL_DOES,
            *under,
            sys.executable,
            "-m",
            "kvsidecar",
            *arguments,
        ]
        ours = ("COLUMNS", "LINES", "NO_COLOR")
        inherited = {name: value for name, value in environment().items() if name not in ours}
        self.process = child_process.start(
            command, stdin=slave if stdin else subprocess.DEVNULL, stdout=slave, stderr=slave,
            env={**inherited, "TERM": "xterm", **variables},
            start_new_session=True,
        )  # fmt: skip

    def until(self, wanted: str, *, raw: bool = False) -> str:
        """Everything drawn from now on until this is; ``raw``: with what moves the cursor and colors."""
        drawn = read = ""

        def is_drawn() -> bool:
            nonlocal drawn, read
            read += self._read()  # may end within an escape sequence
            drawn = read if raw else re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", read)
            return wanted in drawn

        eventually(is_drawn, lambda: f"{wanted!r} was not drawn; this was: {drawn[-2000:]!r}", pause=0.0)
        return drawn

    def _read(self) -> str:
        """What has been drawn, or soon is."""
        if select.select([self._master], [], [], 0.05)[0]:
            return os.read(self._master, 65536).decode(errors="replace")
        return ""

    def press(self, key: bytes) -> None:
        os.write(self._master, key)

    def end(self) -> int:
        def has_ended() -> bool:
            self._read()  # a pseudo-terminal that nobody reads would keep the process from writing its last words
            return self.process.poll() is not None

        eventually(has_ended, "the process has ended", pause=0.0)
        return int(self.process.returncode)

    def hang_up(self) -> None:
        """Close it, as a window or a connection is closed: the kernel sends SIGHUP to who leads its session."""
        os.close(self._slave)
        os.close(self._master)
        self._slave = self._master = -1

    def restored(self) -> bool:
        return termios.tcgetattr(self._slave) == self.before

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for fd in {self._master, self._slave} - {-1}:
            os.close(fd)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
