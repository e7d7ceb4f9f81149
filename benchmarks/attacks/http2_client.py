"""Plain HTTP/2 over the gRPC socket, without grpc, for clients that break its rules."""

from __future__ import annotations

import contextlib
import fcntl
import json
import socket
import ssl
import struct
import sys
import termios
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from benchmarks.attacks.support import become

SOCKET_NAME = "kvs.sock"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PING, GOAWAY, CONTINUATION = 0, 1, 2, 3, 4, 6, 7, 9
END_STREAM, END_HEADERS, PADDED, WITH_PRIORITY = 0x1, 0x4, 0x8, 0x20

_LATER = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


def frame(kind: int, stream: int = 0, payload: bytes = b"", flags: int = 0) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def literal(name: bytes, value: bytes) -> bytes:
    """A header field that is not indexed. Both strings have less than 127 bytes."""
    return b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value


def request(method: str = "/kvsidecar.v1.Sidecar/Lookup") -> bytes:
    """The header block of a gRPC call."""
    fields = [b"\x83\x86", literal(b":path", method.encode()), literal(b":authority", b"localhost")]
    return b"".join([*fields, literal(b"content-type", b"application/grpc"), literal(b"te", b"trailers")])


def message(payload: bytes, declared: int | None = None) -> bytes:
    """A gRPC message, or the begin of one that is going to have ``declared`` bytes."""
    return b"\0" + (len(payload) if declared is None else declared).to_bytes(4, "big") + payload


class Connection:
    """One connection, non-blocking: what is not taken is kept, and what is answered is thrown away.

    Args:
        where: the path of the gRPC socket, or a connection, perhaps in TLS.
    """

    def __init__(self, where: Path | socket.socket) -> None:
        if isinstance(where, socket.socket):
            self.socket = where
        else:
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.settimeout(1.0)
            self.socket.connect(str(where))
        self.socket.setblocking(False)
        self.next_stream = 1
        self.received = 0
        """Bytes."""
        self.due = 0.0
        """When `run` lets it attack again, in monotonic seconds."""
        self._rest = b""
        self.open = self.send(PREFACE + frame(SETTINGS))

    def send(self, data: bytes) -> bool:
        """Send, or keep what is not taken now. Returns whether the connection is still open."""
        self._rest += data
        try:
            with contextlib.suppress(*_LATER):
                while self._rest:
                    self._rest = self._rest[self.socket.send(self._rest) :]
            with contextlib.suppress(*_LATER):
                while data := self.socket.recv(65536):
                    self.received += len(data)
                self.open = False
                return False
        except OSError:
            self.open = False
            return False
        return True

    @property
    def full(self) -> bool:
        return bool(self._rest)

    @property
    def taken(self) -> bool:
        """Whether the other end of a Unix socket has read all that was sent, or has closed it."""
        return not (self.open and struct.unpack("i", fcntl.ioctl(self.socket, termios.TIOCOUTQ, bytes(4)))[0])

    def close(self) -> None:
        self.socket.close()


def run(attack: Callable[[Connection, Counter[str]], None], connections: int, pause: float = 0.0) -> None:
    """Keep so many connections open for the time of the command line, and attack with each in turn. With a third
    argument, that is the user id that it is done with.

    Args:
        attack: sends some more; a connection that was closed is replaced by a new one.
        pause: of each connection between two attacks, in seconds.
    """
    if sys.argv[3:]:
        become(int(sys.argv[3]))
    path, until = Path(sys.argv[1], SOCKET_NAME), time.monotonic() + float(sys.argv[2])
    sent: Counter[str] = Counter()
    held: list[Connection] = []
    while time.monotonic() < until:
        for each in [each for each in held if not each.open]:
            each.close()
            held.remove(each)
        with contextlib.suppress(OSError):
            while len(held) < connections and time.monotonic() < until:
                held.append(Connection(path))
                sent["connections"] += 1
        before = sent.total()
        for each in held:
            if each.send(b"") and not each.full and (now := time.monotonic()) >= each.due:
                each.due = now + pause
                attack(each, sent)
        if sent.total() == before:
            time.sleep(0.005)
    print(json.dumps(dict(sent)))
