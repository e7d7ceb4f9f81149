"""Which run of which kernel this is."""

from __future__ import annotations

from pathlib import Path


def boot_id() -> str:
    """The same for all processes of a node until it boots again, also in containers.

    Raises:
        OSError: the kernel does not say.
    """
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
