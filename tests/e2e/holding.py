"""What operators hold with `kvsidecar pin`."""

from __future__ import annotations

from pathlib import Path

from tests.cli.command import run
from tests.harness import NAMESPACE, DaemonProcess, hashes


def hold_blocks(daemon: DaemonProcess, file: Path, name: str, *blocks: str, seconds: int = 600) -> None:
    file.write_text("\n".join(each.hex() for each in hashes(*blocks)))
    where = ("--namespace", NAMESPACE.model, "--hashes", str(file), "--socket", daemon.socket)
    assert run("pin", name, *where, "--seconds", str(seconds)).returncode == 0


def seconds_left(daemon: DaemonProcess) -> dict[str, float]:
    with daemon.client() as client:
        return {hold.name: hold.seconds_left for hold in client.status().pins}
