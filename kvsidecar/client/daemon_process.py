"""The daemon as a process of this machine, and whether it is gone: only then can none of its DMA run any more."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct

_UCRED = struct.Struct("3i")
_SO_PEERPIDFD = 77
"""Linux 6.5 (include/uapi/asm-generic/socket.h). Python 3.11 has no name for it."""


class DaemonProcess:
    """A pidfd of the process that listens at the other end of a Unix socket.

    The kernel names the process that called listen(), so this needs a daemon that binds its socket itself.

    Args:
        connection: a connected Unix stream socket. To be called before the daemon is known to have answered on it: an
            answer that comes afterwards proves that the number was not another process's by then.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.pid, _, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        """In this process's PID namespace; 0 if the daemon lives in another one."""
        self.fd: int | None = None
        """None: the kernel can neither open the peer's pidfd (before 6.5) nor name it in this PID namespace."""
        try:
            packed = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4)
            (self.fd,) = struct.unpack("i", packed)
        except OSError:
            if self.pid:
                with contextlib.suppress(OSError):  # the daemon has just died: connecting fails next, and says so
                    self.fd = os.pidfd_open(self.pid)

    def gone(self) -> bool:
        """Whether the process has ended: all of its threads, its memory, and the driver's files it had open.

        False if that cannot be known. A pidfd is readable once the last thread has passed exit_files() (the kernel's
        do_exit() closes them, then tells who waits): the driver has taken down its channels, and no DMA can run.
        """
        if self.fd is None:
            return False
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
