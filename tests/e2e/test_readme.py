"""The README's snippets work as they stand."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from kvsidecar.support.memory_limits import memlock_limit
from tests.harness import SECONDS, DaemonProcess, environment
from tests.marks import promise

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def snippets(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@promise("Save this as `engine.py` and run it")
def test_the_client_example_runs_against_the_daemon_of_the_readme(short_dir: Path) -> None:
    (serve,) = [line for text in snippets("sh") for line in text.splitlines() if line.startswith("kvsidecar serve")]
    (example,) = [text for text in snippets("python") if "HostBuffer" in text]
    flags = shlex.split(serve)[2:]
    limit = memlock_limit()
    if limit is not None and limit < 1 << 30:
        flags += ["--pool-size", "4MiB"]  # an ordinary user may not lock what the README's reader with a GPU pins
    with DaemonProcess(short_dir, *flags) as daemon:
        ran = subprocess.run(
            [sys.executable, "-c", example],
            capture_output=True, text=True, timeout=SECONDS, env=environment(KVSIDECAR_SOCKET=daemon.socket),
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        assert "3 blocks can be loaded" in ran.stdout
        assert "state=<State.READY" in ran.stdout
        for path in ("/ready", "/metrics"):
            assert daemon.get(path)[0] == 200
