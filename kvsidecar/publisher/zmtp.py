"""ZMTP 3.1, the wire format of ZeroMQ, as far as a publisher and its routers need it. Pure: bytes in, frames out.

Not libzmq: that keeps an endless message of many parts in memory whatever its options, and any number of subscriptions
of one connection, and gives no way to end it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvsidecar.publisher.metrics import Reason, RouterRefused

MAX_FRAME_BYTES = 1024
"""Longest frame that a router may send: a command, a topic, or the first number of a replay."""
GREETING_BYTES = 64
_MORE, _LONG, _COMMAND = 1, 2, 4
_SIGNATURE = b"\xff" + (1).to_bytes(8, "big") + b"\x7f"
GREETING = (_SIGNATURE + b"\x03\x01" + b"NULL".ljust(20, b"\0")).ljust(GREETING_BYTES, b"\0")


@dataclass(frozen=True, slots=True)
class Frame:
    body: bytes
    more: bool = False
    is_command: bool = False


class ZmtpReader:
    """Cuts a connection's bytes into frames. Keeps no more than one frame and one read of bytes."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.minor: int | None = None
        """The peer's minor version; None: its greeting has not arrived."""

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Raises RouterRefused: it is not ZMTP 3 without encryption, or a frame is longer than `MAX_FRAME_BYTES`."""
        self._buffer += data
        if self.minor is None:
            if len(self._buffer) < GREETING_BYTES:
                self._check_greeting(bytes(self._buffer))
                return
            greeting = bytes(self._buffer[:GREETING_BYTES])
            self._check_greeting(greeting)
            self.minor = greeting[11]
            del self._buffer[:GREETING_BYTES]
        while (frame := self._cut()) is not None:
            yield frame

    @staticmethod
    def _check_greeting(sent: bytes) -> None:
        whole = len(sent) >= 32
        if (
            sent[:1] != b"\xff"
            or (len(sent) > 9 and not sent[9] & 1)
            or (len(sent) > 10 and sent[10] < 3)
            or (whole and sent[12:32] != GREETING[12:32])
        ):
            raise RouterRefused(Reason.PROTOCOL, "it does not speak ZMTP 3 without encryption")

    def _cut(self) -> Frame | None:
        buffer = self._buffer
        if not buffer:
            return None
        head = 9 if buffer[0] & _LONG else 2
        if len(buffer) < head:
            return None
        size = int.from_bytes(buffer[1:head], "big")
        if size > MAX_FRAME_BYTES:
            raise RouterRefused(Reason.FRAME, f"a frame of {size} bytes: {MAX_FRAME_BYTES} are allowed")
        if len(buffer) < head + size:
            return None
        frame = Frame(bytes(buffer[head : head + size]), bool(buffer[0] & _MORE), bool(buffer[0] & _COMMAND))
        del buffer[: head + size]
        return frame


def message(parts: Sequence[bytes]) -> list[bytes]:
    """The bytes to send for a message of these parts. Long parts are not copied."""
    pieces = []
    for i, each in enumerate(parts):
        flags = _MORE if i + 1 < len(parts) else 0
        if len(each) > 255:
            pieces += [bytes([flags | _LONG]) + len(each).to_bytes(8, "big"), each]
        else:
            pieces.append(bytes([flags, len(each)]) + each)
    return pieces


def command(name: bytes, body: bytes = b"") -> bytes:
    """The bytes to send for a command."""
    body = bytes([len(name)]) + name + body
    return bytes([_COMMAND, len(body)]) + body


def ready(socket_type: bytes) -> bytes:
    """The command that ends the handshake."""
    return command(b"READY", b"\x0bSocket-Type" + len(socket_type).to_bytes(4, "big") + socket_type)


def split_command(body: bytes) -> tuple[bytes, bytes]:
    """A command's name, and the rest of its body."""
    length = body[0] if body else 0
    return body[1 : 1 + length], body[1 + length :]
