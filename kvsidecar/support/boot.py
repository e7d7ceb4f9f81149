"""Which run of which kernel this is, and how long it has run."""

from __future__ import annotations

import time
from pathlib import Path


def boot_id() -> str:
    """The same for all processes of a node until it boots again, also in containers.

    Raises:
        OSError: the kernel does not say.
    """
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def boot_time() -> float:
    """Seconds since the machine was booted, including those in which it was suspended. All processes of a boot share
    this clock, also one after the other, and nobody can set it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
