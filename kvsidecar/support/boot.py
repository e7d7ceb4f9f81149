"""The current boot of the machine: its id, and how long ago it was."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path
from typing import Final

OFFSETS: Final = Path("/proc/self/timens_offsets")


def boot_id() -> str:
    """Id of the current boot: one for all processes of a node, also in containers, until it boots again.

    Raises:
        OSError: the kernel does not provide it.
    """
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def boot_time() -> float:
    """Seconds since the machine was booted, including those in which it was suspended. All processes of a boot share
    this clock, also one after the other and in containers, and nobody can set it."""
    return (time.clock_gettime_ns(time.CLOCK_BOOTTIME) - boot_offset(OFFSETS)) / 1e9


@cache
def boot_offset(offsets: Path) -> int:
    """Nanoseconds by which ``CLOCK_BOOTTIME`` is ahead of the kernel's in this process's time namespace, which some
    containers have, and processes that were restored from a checkpoint. A process cannot leave it.

    Args:
        offsets: the kernel's file with the offsets (time_namespaces(7)).
    """
    try:
        lines = [line.split() for line in offsets.read_text().splitlines()]
    except OSError:  # a kernel without time namespaces
        return 0
    seconds, nanoseconds = next((line[1:] for line in lines if line[0] == "boottime"), ("0", "0"))
    return int(seconds) * 10**9 + int(nanoseconds)
