"""What is made once for all workers of a run."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A directory that the first worker which asks for it fills; the others wait until it has.

    Args:
        make: fills the directory. Where it raises, the next worker that asks tries again, in an empty one.
    """
    workers = "PYTEST_XDIST_WORKER" in os.environ
    shared = factory.getbasetemp().parent if workers else factory.getbasetemp()
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        link = shared / name
        if not link.exists():
            directory = factory.mktemp(name)
            make(directory)
            link.symlink_to(directory, target_is_directory=True)
    return link.resolve()
