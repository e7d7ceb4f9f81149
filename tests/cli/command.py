"""Runs a command of `kvsidecar`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tests import warm
from tests.harness import NAMESPACE, SECONDS, DaemonProcess, environment, hashes


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


def hold_blocks(daemon: DaemonProcess, file: Path, name: str, *blocks: str, seconds: int = 600) -> None:
    file.write_text("\n".join(each.hex() for each in hashes(*blocks)))
    where = ("--namespace", NAMESPACE.model, "--hashes", str(file), "--socket", daemon.socket)
    assert run("pin", name, *where, "--seconds", str(seconds)).returncode == 0


def seconds_left(daemon: DaemonProcess) -> dict[str, float]:
    with daemon.client() as client:
        return {hold.name: hold.seconds_left for hold in client.status().pins}
