"""The service manager's end of the notify socket, for the tests."""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

from tests.harness import SECONDS

Message = dict[str, str]

_WITH_DESCRIPTORS = """
import fcntl, os, sys
files, names, *command = sys.argv[1:]
fds = [fcntl.fcntl(os.open(file, os.O_RDWR), fcntl.F_DUPFD, 100) for file in files.split(",") if file]
for number, fd in enumerate(fds, start=3):
    os.dup2(fd, number)
    os.close(fd)
os.environ.update(LISTEN_FDS=str(len(fds)), LISTEN_FDNAMES=names, LISTEN_PID=str(os.getpid()))
os.execvp(command[0], command)
"""


class ServiceManager:
    """Listens, and keeps every message in ``heard``, and the descriptors of its store for the next process.

    Args:
        directory: for the socket.
        abstract: give the socket a name that no file system has.
    """

    def __init__(self, directory: Path, *, abstract: bool = False) -> None:
        path = str(directory / "notify")
        self.address = f"@{path}" if abstract else path
        self.heard: list[Message] = []
        self.stored: dict[str, int] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(f"\0{path}" if abstract else path)
        self._news: queue.SimpleQueue[Message] = queue.SimpleQueue()
        # Always reading: a queue of the kernel takes ten datagrams.
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            data, fds, *_ = socket.recv_fds(self._socket, 4096, 8)
            if not data:
                return
            # Like systemd: a line without = ends up as a field that nobody asks for.
            pairs = (line.partition("=") for line in data.decode().split("\n"))
            message = {name: value for name, _, value in pairs}
            self._store(message, fds)
            self._news.put(message)

    def _store(self, message: Message, fds: list[int]) -> None:
        """As systemd's store does; what is not stored is closed, which is the answer to BARRIER=1."""
        name = message.get("FDNAME", "stored")
        if message.get("FDSTOREREMOVE") == "1" and name in self.stored:
            os.close(self.stored.pop(name))
        for fd in fds:
            if message.get("FDSTORE") == "1":
                self.stored[name] = fd
            else:
                os.close(fd)

    def under(self) -> list[str]:
        """A command that runs another one with the stored descriptors, as systemd starts a service."""
        fds = ",".join(f"/proc/{os.getpid()}/fd/{fd}" for fd in self.stored.values())
        return [sys.executable, "-c", _WITH_DESCRIPTORS, fds, ":".join(self.stored)]

    def wait(self, field: str, text: str = "") -> Message:
        """The next message that has this field, with ``text`` in its value."""
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                message = self._news.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no {field} with {text!r}; heard {self.heard}") from None
            self.heard.append(message)
            if field in message and text in message[field]:
                return message

    def silent_for(self, seconds: float) -> bool:
        """Whether nothing more comes so long, after what has come already."""
        self.drain()
        try:
            self.heard.append(self._news.get(timeout=seconds))
        except queue.Empty:
            return True
        return False

    def drain(self) -> None:
        """Take what has been sent. After the end of the daemon this is all there will be."""
        probe = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        probe.sendto(b"LAST=1", self._socket.getsockname())
        probe.close()
        self.wait("LAST")
        self.heard.pop()

    def fields(self, *names: str) -> list[tuple[str, str]]:
        """What was heard of these fields, in order."""
        return [(name, message[name]) for message in self.heard for name in names if name in message]

    def __enter__(self) -> ServiceManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        probe = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        probe.sendto(b"", self._socket.getsockname())
        probe.close()
        self._reader.join()
        self._socket.close()
        for fd in self.stored.values():
            os.close(fd)
        if error is not None:
            print("the service manager heard:", *self.heard, sep="\n  ")
