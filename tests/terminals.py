"""The terminals of a reader who types the commands of a page."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvsidecar.support.child_process import environment
from tests.harness import SECONDS

DOCS = Path(__file__).parents[1] / "docs"


def blocks_of(page: str) -> dict[str, list[str]]:
    """Section of a page of docs/ -> its commands."""
    sections = re.split(r"^## ", (DOCS / page).read_text(), flags=re.MULTILINE)[1:]
    return {
        section.partition("\n")[0]: re.findall(r"^```sh\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
        for section in sections
    }


def free_ports(count: int) -> list[int]:
    """Below those that the kernel gives to others between now and when they are used."""
    found: list[int] = []
    for port in random.sample(range(20_000, 32_000), 200):
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            found.append(port)
            if len(found) == count:
                break
    return found


class Terminals:
    """Where a reader types the commands of the page. Each command of a block must succeed.

    Args:
        directory: where the reader is; the environment .venv is active if it is there.
        sockets: a directory with a short path for the daemon's socket.
        ports: those that the page names; the daemon's is 9464.
        replaced: other text of the page -> what is typed in its place.
        variables: environment variables.
    """

    def __init__(
        self, directory: Path, sockets: Path, ports: Iterable[str], replaced: Mapping[str, str], **variables: str
    ) -> None:
        self.directory = directory
        names = tuple(ports)
        self.ports = dict(zip(names, free_ports(len(names)), strict=True))
        self._replaced = dict(replaced)
        self._env = environment(
            # The directory of python3, and no environment that is active already.
            PATH=f"{Path(sys.base_prefix) / 'bin'}:{os.environ['PATH']}",
            KVSIDECAR_SOCKET=str(sockets / "kvsidecar.sock"),
            KVSIDECAR_HTTP_PORT=str(self.ports["9464"]),
            PIP_QUIET="1",
            PIP_NO_COMPILE="1",
            PIP_DISABLE_PIP_VERSION_CHECK="1",
            **variables,
        )
        self._env.pop("PYTHONPATH", None)
        self._left: list[subprocess.Popen[bytes]] = []
        self._started = 0

    def typed(self, block: str) -> list[str]:
        for name, port in self.ports.items():
            block = re.sub(rf"(localhost:|--port ){name}\b", rf"\g<1>{port}", block)
        for shown, typed in self._replaced.items():
            block = block.replace(shown, typed)
        active = ". .venv/bin/activate; " if (self.directory / ".venv").exists() else ""
        return ["bash", "-euo", "pipefail", "-c", active + block]

    def run(self, block: str) -> str:
        command = self.typed(block)
        ran = subprocess.run(command, cwd=self.directory, env=self._env, capture_output=True, text=True, timeout=800)
        assert ran.returncode == 0, f"{block}\n{ran.stdout}\n{ran.stderr}"
        return ran.stdout

    def start(self, block: str) -> subprocess.Popen[bytes]:
        """For what runs until its reader ends it."""
        lines = block.replace("\\\n", " ").splitlines()
        command = self.typed("\n".join([*lines[:-1], f"exec {lines[-1]}"]))
        self._started += 1
        with open(self.directory / f"log-{self._started}", "wb") as log:
            self._left.append(subprocess.Popen(command, cwd=self.directory, env=self._env, stdout=log, stderr=log))
        return self._left[-1]

    def interrupt(self, process: subprocess.Popen[bytes]) -> None:
        """Ctrl-C, and wait for its end."""
        self._left.remove(process)
        process.send_signal(signal.SIGINT)
        process.wait(SECONDS)

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.directory.glob("log-*")))

    def url(self, port: str, path: str = "/") -> str:
        return f"http://localhost:{self.ports[port]}{path}"

    def answers(self, port: str, path: str) -> Any:
        """The JSON that is answered; nothing until there is some."""
        assert all(each.poll() is None for each in self._left), self.logs()
        with contextlib.suppress(OSError), urllib.request.urlopen(self.url(port, path), timeout=SECONDS) as reply:
            return json.load(reply)

    def close(self) -> None:
        for process in reversed(self._left):
            process.terminate()
            process.wait(SECONDS)
