"""``python -m tests.refused_calls NAME[,NAME...] COMMAND...``: runs a command for which the kernel refuses these system
calls with EPERM, as a container's seccomp profile does that does not know them."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Sequence
from typing import Final

NUMBERS: Final = {
    "x86_64": {
        "eventfd2": 290,
        "flock": 73,
        "madvise": 28,
        "mbind": 237,
        "membarrier": 324,
        "memfd_create": 319,
        "mlock": 149,
        "pidfd_open": 434,
        "prlimit64": 302,
        "sched_getaffinity": 204,
        "timerfd_create": 283,
    },
    "aarch64": {
        "eventfd2": 19,
        "flock": 32,
        "madvise": 233,
        "mbind": 235,
        "membarrier": 283,
        "memfd_create": 279,
        "mlock": 228,
        "pidfd_open": 434,
        "prlimit64": 261,
        "sched_getaffinity": 123,
        "timerfd_create": 85,
    },
}
_LOAD_NUMBER: Final = (0x20, 0, 0, 0)
"""BPF_LD | BPF_W | BPF_ABS: the first word of struct seccomp_data."""
_EQUAL, _RETURN = 0x15, 0x06
_ERRNO, _ALLOW = 0x00050000, 0x7FFF0000
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2


class _Program(ctypes.Structure):
    """struct sock_fprog"""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def command(*names: str) -> list[str]:
    """To be put before a command."""
    return [sys.executable, "-m", "tests.refused_calls", ",".join(names)]


def can_refuse() -> bool:
    """Whether this kernel lets a process do that to itself."""
    return platform.machine() in NUMBERS and os.path.exists("/proc/sys/kernel/seccomp/actions_avail")


def refuse(names: Sequence[str]) -> None:
    """In this process and its children, from now on. Raises OSError."""
    numbers = [NUMBERS[platform.machine()][name] for name in names]
    steps = [_LOAD_NUMBER]
    for number in numbers:
        steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    steps.append((_RETURN, 0, 0, _ALLOW))
    text = b"".join(struct.pack("=HBBI", *step) for step in steps)
    program = _Program(len(steps), text)
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program)):
        raise OSError(ctypes.get_errno(), "no filter of system calls can be set")


if __name__ == "__main__":
    refuse(sys.argv[1].split(","))
    os.execvp(sys.argv[2], sys.argv[2:])
