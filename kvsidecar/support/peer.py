"""The peer of a Unix socket, as the kernel identifies it (unix(7))."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
from typing import NamedTuple

_SO_PEERGROUPS = 59
"""Linux 4.13 (include/uapi/asm-generic/socket.h). Python has no name for it."""
_SO_PEERPIDFD = 77
"""Linux 6.5. Python 3.11 has no name for it."""

_UCRED = struct.Struct("3i")


class Credentials(NamedTuple):
    """Identifies the process that called connect() or listen(), as it was then."""

    pid: int
    """In this process's PID namespace; 0 if the peer lives in one that is not visible here."""
    uid: int
    gid: int


def credentials(connection: socket.socket) -> Credentials:
    return Credentials(*_UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)))


def groups(connection: socket.socket) -> frozenset[int]:
    """The supplementary groups of the peer when it connected.

    Empty before Linux 4.13, and for more than the 256 groups that Python's getsockopt has room for: only the rules for
    the peer's user and primary group apply then.
    """
    with contextlib.suppress(OSError):
        return frozenset(array.array("I", connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 1024)))
    return frozenset()


def kernel_pidfd(connection: socket.socket) -> int | None:
    """A pidfd of the process that connected, in any PID namespace; None before Linux 6.5."""
    with contextlib.suppress(OSError):
        return int(connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
    return None


def pidfd(connection: socket.socket) -> int | None:
    """A pidfd of the peer, if there is one. Before Linux 6.5 it is found by the PID, which another process may have got
    meanwhile."""
    if (fd := kernel_pidfd(connection)) is not None:
        return fd
    if pid := credentials(connection).pid:
        with contextlib.suppress(OSError):  # it has died
            return os.pidfd_open(pid)
    return None
