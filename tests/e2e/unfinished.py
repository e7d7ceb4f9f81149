"""Clients that do not finish what they begin."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TypeVar

from tests.harness import SECONDS, DaemonProcess, eventually

Answer = TypeVar("Answer")


def refusals(daemon: DaemonProcess, reason: str) -> float:
    return daemon.metric(f'kvsidecar_refusals_total{{reason="{reason}"}}')


def before_any_is_ended(daemon: DaemonProcess, attempt: Callable[[ExitStack], Answer]) -> tuple[ExitStack, Answer]:
    """What ``attempt`` returns where the daemon has ended nothing meanwhile for being unfinished too long, as it does
    where a machine is so slow that the attempt takes longer than that: then all is closed, and it is made again.

    Args:
        attempt: is given what closes the clients that it begins.

    Returns:
        What closes the clients of the last attempt, and what that returned.
    """
    fds = open_fds(daemon)
    for _ in range(10):
        before = refusals(daemon, "unfinished")
        with ExitStack() as stack:
            answer = attempt(stack)
            if refusals(daemon, "unfinished") == before:
                return stack.pop_all(), answer
        eventually(lambda: open_fds(daemon) <= fds + 4)  # a client that was just there may still have been connecting
    raise AssertionError("each attempt took too long")


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
