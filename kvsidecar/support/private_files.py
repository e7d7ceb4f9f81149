"""Files in a directory that others may be able to write to: nobody else can have put them there, or open them.

And whether a directory takes files at all.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path


def open_file(name: str, directory: int) -> int:
    """Open a file for reading and writing that `make_file` has made, in this process or an earlier one.

    Raises:
        OSError: it does not exist, or is not such a file; ``strerror`` says why.
    """
    # O_NONBLOCK: whatever it is, opening it does not wait.
    fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    is_ = os.fstat(fd)
    problems = {
        "it is not a regular file": not stat.S_ISREG(is_.st_mode),
        f"it belongs to uid {is_.st_uid}": is_.st_uid != os.geteuid(),
        f"its mode is {stat.S_IMODE(is_.st_mode):04o}, not 0600": stat.S_IMODE(is_.st_mode) != 0o600,
        "it has another name, too": is_.st_nlink != 1,
        "another file system is mounted over it": is_.st_dev != os.fstat(directory).st_dev,
    }
    for problem, applies in problems.items():
        if applies:
            os.close(fd)
            raise PermissionError(0, f"{name}: {problem}")
    return fd


def make_file(name: str, directory: int, nbytes: int) -> int:
    """Make a file of this size that reads as zeros, with mode 0600. Fails if the name is taken."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(name, flags, 0o600, dir_fd=directory)
    try:
        os.fchmod(fd, 0o600)  # whatever the umask is
        os.ftruncate(fd, nbytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def takes_none(directory: Path) -> str:
    """Why this process can make nothing in a directory, as the end of a sentence; empty if it can, as far as this is to
    be known without doing it."""
    try:
        fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return "does not exist"
    except NotADirectoryError:
        return "is not a directory"
    except OSError as error:
        return f"cannot be opened: {error.strerror}"
    try:
        has = os.fstatvfs(fd)
        # Such as /proc, to which root may write if the kernel is asked.
        if not has.f_blocks and not _is_in_memory(fd):
            return "is on a file system that holds no files"
    finally:
        os.close(fd)
    if has.f_flag & os.ST_RDONLY:
        return "is on a file system that is mounted read-only"
    if not os.access(directory, os.W_OK | os.X_OK, effective_ids=True):
        return "may not be written to"
    return ""


def _is_in_memory(fd: int) -> bool:
    """True if its file system is in memory: one without a limit has no blocks either."""
    from kvsidecar.support import host_memory  # NumPy, which a start waits for later

    return host_memory.huge_page_bytes(fd) is not None


def remove_directories(made: list[Path]) -> None:
    """Remove the directories that were made for a start that fails, the last one first, where nobody else has put
    anything there. The list is empty then."""
    while made:
        with suppress(OSError):
            made.pop().rmdir()
