"""Runs attacks beside a test."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from kvsidecar.support.child_process import environment
from tests.harness import SECONDS


class Attack:
    """One attack's process."""

    def __init__(self, name: str, target: object, seconds: float) -> None:
        command = [sys.executable, "-m", f"tests.attacks.{name}", str(target), str(seconds)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())

    def did(self) -> dict[str, int]:
        """Waits for its end. What it did, counted."""
        said, _ = self.process.communicate(timeout=2 * SECONDS)
        found: dict[str, int] = json.loads(said.splitlines()[-1])
        return found


@contextmanager
def attack(name: str, target: object, seconds: float) -> Iterator[Attack]:
    """Under way inside the block, for ``seconds`` at most.

    Args:
        target: the directory of the daemon's socket, or its HTTP port; the module says which.
    """
    running = Attack(name, target, seconds)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.wait()
        if running.process.stdout is not None:
            running.process.stdout.close()
