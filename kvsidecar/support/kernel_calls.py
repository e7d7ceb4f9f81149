"""System calls that a kernel may lack, or a container's seccomp profile refuse."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from kvsidecar.errors import KernelRefuses

_REFUSED: Final = frozenset({errno.EPERM, errno.EACCES, errno.ENOSYS})
_NEEDED: Final[dict[str, Callable[[], int]]] = {
    "pidfd_open": lambda: os.pidfd_open(os.getpid()),
    "memfd_create": lambda: os.memfd_create("kvsidecar-check", os.MFD_CLOEXEC),
    "eventfd2": lambda: os.eventfd(0, os.EFD_CLOEXEC),
}
"""Without these there is no daemon."""
_NR_OPEN: Final = 1 << 20
"""What fs.nr_open is by default, which no limit of a process exceeds."""


@contextmanager
def needed(call: str, error: Callable[[str], Exception]) -> Iterator[None]:
    """Raise ``error`` with one sentence if this system call is refused within."""
    try:
        yield
    except OSError as why:
        if why.errno not in _REFUSED:
            raise
        raise error(
            f"the kernel refuses the system call {call} ({why.strerror}): use Linux 5.4 or newer, and a seccomp "
            f"profile that allows it"
        ) from why


def check() -> None:
    """Raises KernelRefuses if this process cannot be a daemon."""
    for call, make in _NEEDED.items():
        with needed(call, KernelRefuses):
            os.close(make())


def refused() -> tuple[str, ...]:
    """System calls that a daemon needs and this process may not make."""
    found = []
    for call, make in _NEEDED.items():
        try:
            os.close(make())
        except OSError:
            found.append(call)
    return tuple(found)


def usable_cores() -> int:
    """Cores that this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except OSError:
        return os.cpu_count() or 1


def descriptor_limit() -> int:
    """Descriptors that this process may have open (RLIMIT_NOFILE)."""
    try:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    except OSError:  # it may be forbidden to ask
        return _NR_OPEN
    return _NR_OPEN if soft == resource.RLIM_INFINITY else soft
