"""Frames of the attach socket, read by a test's own end."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from kvsidecar.protocol.framing import FrameReader


def frames(connection: socket.socket) -> Iterator[bytes]:
    """The payloads that arrive, until the other end closes. Reads nothing of what comes behind the one it gives."""
    reader = FrameReader()
    while True:
        while (payload := reader.next()) is not None:
            yield payload
        if not (data := connection.recv(reader.missing)):
            return
        reader.feed(data)


def receive(connection: socket.socket) -> bytes:
    """The next payload."""
    payload = next(frames(connection), None)
    assert payload is not None, "the other end closed the connection"
    return payload
