"""What processes have open."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def open_files(pid: int) -> dict[Path, str]:
    """What each descriptor refers to, by its path in /proc. Those that the process closes meanwhile are left out; a
    process that has ended has none."""
    found: dict[Path, str] = {}
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for each in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                found[each] = os.readlink(each)
    return found
