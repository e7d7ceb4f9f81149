"""Runs a command of `kvsidecar`."""

from __future__ import annotations

import subprocess
import sys

from tests.harness import SECONDS, environment


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvsidecar", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment(**variables))
