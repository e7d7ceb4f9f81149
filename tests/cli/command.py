"""Runs a command of `kvsidecar`."""

from __future__ import annotations

import subprocess
import sys
import tempfile

from tests import warm
from tests.harness import SECONDS, environment


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        process = warm.start(
            arguments, environment(**variables), stdout=stdout.fileno(), stderr=stderr.fileno()
        ) or subprocess.Popen(
            [sys.executable, "-m", "kvsidecar", *arguments], stdout=stdout, stderr=stderr, env=environment(**variables)
        )
        try:
            code = process.wait(SECONDS)
        finally:
            process.kill()
            process.wait()
        stdout.seek(0)
        stderr.seek(0)
        return subprocess.CompletedProcess(process.args, code, stdout.read(), stderr.read())
