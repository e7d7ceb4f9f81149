"""Processes in a PID namespace of their own, as containers have: with any PID value that a test wants."""

from __future__ import annotations

import functools
import os
import socket
import subprocess
from pathlib import Path

import pytest

from kvsidecar.support import peer

# An ordinary user may make PID namespaces only inside a user namespace of his own, where the system allows those.
# The end of `unshare` kills what runs in it, also when it is itself killed.
UNSHARE = (
    "unshare",
    *(() if os.geteuid() == 0 else ("--user", "--map-root-user")),
    "--pid", "--fork", "--mount-proc", "--kill-child",
)  # fmt: skip

_NEXT_PID = 'echo $(($0 - 1)) > /proc/sys/kernel/ns_last_pid && { "$@"; exit $?; }'


def with_pid(pid: int) -> tuple[str, ...]:
    """A command under which another command runs in a new PID namespace and has this PID there."""
    return (*UNSHARE, "sh", "-c", _NEXT_PID, str(pid))


@functools.cache
def _refusal() -> str:
    """Why this system makes no PID namespaces, or ""."""
    try:
        ran = subprocess.run([*with_pid(4711), "sh", "-c", "echo $$"], capture_output=True, text=True, timeout=30)
    except OSError as error:
        return str(error)
    return "" if ran.stdout == "4711\n" else ran.stderr.strip() or f"unshare said {ran.stdout!r}"


def _has_peer_pidfd() -> bool:
    """Whether the kernel gives a pidfd of who is at the other end of a socket (Linux 6.5)."""
    one, other = socket.socketpair()
    with one, other:
        fd = peer.kernel_pidfd(one)
    if fd is not None:
        os.close(fd)
    return fd is not None


needs_pid_namespaces = pytest.mark.skipif(bool(_refusal()), reason=f"no PID namespaces here: {_refusal()}")
needs_peer_pidfd = pytest.mark.skipif(
    not _has_peer_pidfd(), reason="before Linux 6.5 a process of another PID namespace cannot be watched"
)


def pid_inside(pid: int) -> int:
    """The PID that a process has in its own namespace."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("NSpid:")[2].splitlines()[0].split()[-1])
