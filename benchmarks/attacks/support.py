"""Runs attacks beside a test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from kvsidecar.support.child_process import environment
from tests.harness import SECONDS


def behind_all(pid: int = 0) -> None:
    """From now on this process's thread, and what it starts, runs where a core has nothing else to do."""
    os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))


def become(uid: int) -> None:
    """From now on this process is another user's, and of no group but its own."""
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)


class Attack:
    """One attack's process. See `attack`."""

    def __init__(self, name: str, target: object, seconds: float, *, behind: bool) -> None:
        command = [sys.executable, "-m", f"benchmarks.attacks.{name}", str(target), str(seconds)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
        if behind:
            behind_all(self.process.pid)

    def did(self) -> dict[str, int]:
        """Waits for its end. What it did, counted."""
        said, _ = self.process.communicate(timeout=2 * SECONDS)
        found: dict[str, int] = json.loads(said.splitlines()[-1])
        return found


@contextmanager
def attack(name: str, target: object, seconds: float, *, behind: bool = False) -> Iterator[Attack]:
    """Under way inside the block, for ``seconds`` at most.

    Args:
        target: the directory of the daemon's socket, or its HTTP port; the module says which.
        behind: it runs where a core has nothing else to do: what is seen is what it makes the daemon do, not that it
            takes its core.
    """
    running = Attack(name, target, seconds, behind=behind)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.wait()
        if running.process.stdout is not None:
            running.process.stdout.close()
