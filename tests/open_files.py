"""What processes have open."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def open_files(pid: int) -> dict[Path, str]:
    """By the path of the descriptor in /proc, what it refers to. Without those that are closed meanwhile, by threads of
    that process; a process that has ended has none."""
    found: dict[Path, str] = {}
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for each in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                found[each] = os.readlink(each)
    return found
