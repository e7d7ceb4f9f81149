"""Processes that were written down: which one a number means, whether it lives, and waiting for its end.

A process id is given to another process one day, so the start time is kept with it. Both are valid only in the PID
namespace that wrote them, and during one boot.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from kvsidecar.support.peer import close_all
from kvsidecar.support.polling import wait_readable

MAX_PID: Final = 1 << 22
"""The most that Linux allows (PID_MAX_LIMIT)."""
_PF_EXITING: Final = 0x4
"""A flag of tasks (include/linux/sched.h; field 9 of /proc/PID/stat)."""


class ProcessId(NamedTuple):
    """A process, whatever its number is given to later."""

    pid: int
    start_time: int
    """Clock ticks since the boot (field 22 of /proc/PID/stat)."""


def stat_fields(pid: int | str) -> list[str]:
    """The fields of /proc/PID/stat from the third on: field 22 is at index 19.

    Args:
        pid: or ``self``.

    Raises:
        OSError: there is no such process.
    """
    # The second field is the program's name in parentheses, and may contain anything.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def process_id(pid: int) -> ProcessId | None:
    """A process that lives, or has ended and is not waited for yet; None if there is none."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return ProcessId(pid, int(stat_fields(pid)[19]))
    return None


def is_ending(pid: int) -> bool:
    """Whether this process has begun to end, or has ended and is not waited for yet. It may take seconds: the kernel
    frees a process's memory before it closes its files."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return bool(int(stat_fields(pid)[6]) & _PF_EXITING)
    return False


class Watched:
    """The given processes that are visible from here, and a descriptor of each. A context manager."""

    def __init__(self, processes: Iterable[ProcessId]) -> None:
        self._pidfds: list[int] = []
        for each in processes:
            if not 0 < each.pid <= MAX_PID:
                continue
            with suppress(ProcessLookupError):
                self._pidfds.append(os.pidfd_open(each.pid))
                # Looked at once the descriptor holds the process: until then the number could change its owner.
                if process_id(each.pid) != each:
                    os.close(self._pidfds.pop())

    def __len__(self) -> int:
        return len(self._pidfds)

    async def wait(self, seconds: float) -> bool:
        """Whether all end within this time. A process that has ended has closed all its files, its GPU's too."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(seconds):
                for pidfd in self._pidfds:
                    if wait_readable(pidfd, 0.0):  # it has ended
                        continue
                    ended = asyncio.Event()
                    loop.add_reader(pidfd, ended.set)
                    try:
                        await ended.wait()
                    finally:
                        loop.remove_reader(pidfd)
        except TimeoutError:
            return False
        return True

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *_: object) -> None:
        close_all(self._pidfds)
