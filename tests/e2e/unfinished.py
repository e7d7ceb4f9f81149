"""Clients that do not finish what they begin."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TypeVar

from tests.e2e.leftovers import open_fds
from tests.harness import SECONDS, DaemonProcess, eventually

Answer = TypeVar("Answer")


def ended(daemon: DaemonProcess) -> float:
    """How many were ended so far, for a limit or as unfinished."""
    return daemon.refused("limit") + daemon.refused("unfinished")


def before_any_is_ended(daemon: DaemonProcess, attempt: Callable[[ExitStack], Answer]) -> tuple[ExitStack, Answer]:
    """Call ``attempt`` until it returns before the daemon has ended one of its clients as unfinished. On a slow machine
    it may take longer than the daemon gives them; its clients are closed then, and it is made again.

    Args:
        attempt: called with what closes the clients that it begins. Returns also where the daemon has ended them.

    Returns:
        What closes the clients of the last attempt, and what that attempt returned.
    """
    fds = open_fds(daemon)
    for _ in range(10):
        before = daemon.refused("unfinished")
        with ExitStack() as stack:
            answer = attempt(stack)
            if daemon.refused("unfinished") == before:
                return stack.pop_all(), answer
        eventually(lambda: open_fds(daemon) <= fds + 4)  # a client that was just there may still have been connecting
    raise AssertionError("each attempt took too long")


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
