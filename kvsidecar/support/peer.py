"""Identifies the peer of a Unix socket (unix(7))."""

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
    """The process that called connect() or listen(), at the time of that call."""

    pid: int
    """In this process's PID namespace; 0 if the peer's PID namespace is not visible here."""
    uid: int
    gid: int


def credentials(connection: socket.socket) -> Credentials:
    return Credentials(*_UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)))


def groups(connection: socket.socket) -> frozenset[int]:
    """The supplementary groups of the peer when it connected.

    Empty before Linux 4.13, and for more than 256 groups, the limit of Python's getsockopt. Then only policy rules for
    the peer's user and primary group apply.
    """
    with contextlib.suppress(OSError):
        return frozenset(array.array("I", connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 1024)))
    return frozenset()


def kernel_pidfd(connection: socket.socket) -> int | None:
    """A pidfd of the peer, in any PID namespace; None before Linux 6.5."""
    with contextlib.suppress(OSError):
        return int(connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
    return None


def pidfd(connection: socket.socket) -> int | None:
    """A pidfd of the peer, or None. Before Linux 6.5 it is opened by PID, which may have been reused."""
    if (fd := kernel_pidfd(connection)) is not None:
        return fd
    if pid := credentials(connection).pid:
        with contextlib.suppress(OSError):  # it has died
            return os.pidfd_open(pid)
    return None
