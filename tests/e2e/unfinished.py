"""Clients that do not finish what they begin."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tests.harness import SECONDS, DaemonProcess


def refusals(daemon: DaemonProcess, reason: str) -> float:
    return daemon.metric(f'kvsidecar_refusals_total{{reason="{reason}"}}')


def open_fds(daemon: DaemonProcess) -> int:
    return len(os.listdir(f"/proc/{daemon.process.pid}/fd"))


@contextmanager
def http(daemon: DaemonProcess, data: bytes = b"") -> Iterator[socket.socket]:
    host, port = daemon.http.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), SECONDS) as connection:
        connection.sendall(data)
        yield connection


def until_closed(connection: socket.socket) -> bytes:
    data = b""
    with suppress(ConnectionResetError):
        while chunk := connection.recv(65536):
            data += chunk
    return data
