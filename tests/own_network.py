"""Run a command in a network of its own, where nothing but the command is: only loopback, and it is up.

    python -m tests.own_network COMMAND...

For what listens on all addresses, such as the client of Mooncake Store. Needs root, or user namespaces.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
SIOCSIFFLAGS, IFF_UP = 0x8914, 1


def enter() -> None:
    """Move this process to a new network namespace.

    Raises:
        OSError: the kernel does not allow it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    user = 0 if os.geteuid() == 0 else CLONE_NEWUSER
    if libc.unshare(CLONE_NEWNET | user):
        raise OSError(ctypes.get_errno(), f"no network of its own: {os.strerror(ctypes.get_errno())}")
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh", b"lo", IFF_UP))


if __name__ == "__main__":
    enter()
    os.execvp(sys.argv[1], sys.argv[1:])
