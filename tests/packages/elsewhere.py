"""Runs `kvsidecar` as on another platform: `python elsewhere.py win32|darwin ... kvsidecar ARGUMENTS`.

What our modules see of Python is what that platform has, after the standard library and the dependencies, which support
it themselves, are imported.
"""

from __future__ import annotations

import asyncio  # noqa: F401
import concurrent.futures  # noqa: F401
import ctypes
import mmap
import multiprocessing  # noqa: F401
import os
import select
import shutil  # noqa: F401
import signal
import socket
import subprocess  # noqa: F401
import sys
import types
import warnings

import click  # noqa: F401
import google.protobuf.descriptor_pool
import google.protobuf.runtime_version  # noqa: F401
import grpc  # noqa: F401
import numpy as np  # noqa: F401
import rich.console
import rich.live
import rich.progress
import rich.status
import rich.table  # noqa: F401

OF_LINUX = {
    mmap: "MADV_HUGEPAGE MADV_POPULATE_WRITE",
    os: "EFD_CLOEXEC EFD_NONBLOCK MFD_ALLOW_SEALING MFD_CLOEXEC O_DIRECT O_TMPFILE eventfd memfd_create pidfd_open "
    "posix_fadvise sched_getaffinity",
    select: "epoll",
    signal: "pidfd_send_signal sigtimedwait",
    socket: "MSG_CMSG_CLOEXEC SO_PEERCRED",
}
OF_UNIX = {
    mmap: "MAP_ANONYMOUS MAP_PRIVATE MAP_SHARED PROT_READ PROT_WRITE",
    os: "O_CLOEXEC O_DIRECTORY O_NOFOLLOW O_NONBLOCK chown fork getegid geteuid getgid getgroups getpgid getuid killpg "
    "set_blocking statvfs uname",
    select: "POLLIN poll",
    signal: "SIGCHLD SIGHUP SIGKILL SIGUSR1 SIGUSR2 pthread_sigmask sigwait",
    socket: "AF_UNIX CMSG_LEN CMSG_SPACE MSG_DONTWAIT SCM_RIGHTS",
}
MODULES_OF_UNIX = ("curses", "fcntl", "grp", "posix", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty")


class _Keyboard(types.ModuleType):
    """msvcrt, of somebody who types q."""

    def kbhit(self) -> bool:
        return True

    def getwch(self) -> str:
        return "q"


def _none(*_: object, **__: object) -> ctypes.CDLL:
    raise AssertionError("a library of the system is loaded")


def become(platform: str) -> None:
    windows = platform == "win32"
    warnings.simplefilter("ignore", EncodingWarning)
    for each in (OF_LINUX, OF_UNIX) if windows else (OF_LINUX,):
        for module, names in each.items():
            for name in names.split():
                if hasattr(module, name):
                    delattr(module, name)
    if windows:
        sys.modules.update(dict.fromkeys(MODULES_OF_UNIX))
        sys.modules["msvcrt"] = _Keyboard("msvcrt")
        # A text file is not UTF-8 there, unless it is said.
        warnings.filterwarnings("error", category=EncodingWarning, module=r"kvsidecar\.")
    ctypes.CDLL = _none  # type: ignore[assignment,misc]
    sys.platform = platform


if __name__ == "__main__":
    become(sys.argv[1])
    sys.argv = sys.argv[sys.argv.index("kvsidecar") :]
    from kvsidecar.cli.main import main

    main()
