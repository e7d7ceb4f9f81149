"""Identifies the peer of a Unix socket, and receives its descriptors (unix(7))."""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import os
import socket
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_SO_PEERGROUPS = 59
"""Linux 4.13 (include/uapi/asm-generic/socket.h). Python has no name for it."""
_SO_PEERPIDFD = 77
"""Linux 6.5. Python 3.11 has no name for it."""

_SYS_PIDFD_GETFD = 438
"""Linux 5.6, with this number on every architecture. Python has no function for it."""

MAX_FDS = 253
"""The kernel's SCM_MAX_FD: one message cannot carry more."""

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


def send_fds(connection: socket.socket, data: bytes | memoryview, fds: Sequence[int]) -> bool:
    """Send all of ``data``, which must fit the socket's buffer, and at most `MAX_FDS` descriptors with its first byte.
    False, and nothing is sent: this user has too many on their way already (unix(7), ETOOMANYREFS).

    Raises:
        OSError: nothing was sent.
    """
    try:
        sent = socket.send_fds(connection, [data], fds)
    except OSError as error:
        if error.errno == errno.ETOOMANYREFS:
            return False
        raise
    assert sent == len(data)
    return True


def recv_fds(connection: socket.socket, nbytes: int) -> tuple[bytes, list[int], bool]:
    """Receive up to ``nbytes`` bytes and the descriptors with them, which are the caller's. A child that another thread
    starts meanwhile does not inherit them.

    Returns:
        The bytes, the descriptors, and whether some are missing: more were sent than this process has room for.
    """
    space = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)
    data, ancillary, flags, _ = connection.recvmsg(nbytes, space, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    return data, list(fds), bool(flags & socket.MSG_CTRUNC)


def take_fd(pidfd: int, number: int) -> int:
    """A duplicate of the descriptor that another process has open under this number; the caller's. It may do no more
    than that process's own, as one that was sent.

    Raises:
        OSError: EBADF: the process has none of this number. ESRCH: it has ended. EPERM, ENOSYS: the kernel refuses.
    """
    if not 0 <= number < 1 << 31:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    fd = ctypes.CDLL(None, use_errno=True).syscall(_SYS_PIDFD_GETFD, pidfd, number, 0)
    if fd < 0:
        why = ctypes.get_errno()
        raise OSError(why, os.strerror(why))
    return int(fd)


def close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
