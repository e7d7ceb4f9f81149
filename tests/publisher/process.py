"""A real ``kvsidecar publish``."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import TracebackType

from kvsidecar.support import child_process
from tests import warm
from tests.harness import SECONDS, environment, eventually


class PublisherProcess:
    """Publishes what the daemon at this socket holds, on sockets in a directory."""

    def __init__(self, directory: Path, socket: str, *options: str) -> None:
        self.path, self.replay = f"{directory}/kv.events", f"ipc://{directory}/kv.replay"
        self._log = directory / "publish.log"
        arguments = ["publish", "--socket", socket, "--bind", f"ipc://{self.path}", "--replay", self.replay]
        arguments += ["--node", "n1", *options]
        with self._log.open("ab") as log:
            self.process = warm.start(arguments, environment(), stderr=log.fileno()) or child_process.start(
                [sys.executable, "-m", "kvsidecar", *arguments], stderr=log
            )

    def wait_log(self, text: str, count: int = 1) -> None:
        eventually(lambda: self.log.count(text) >= count or self.process.poll() is not None, lambda: self.log)
        assert self.process.poll() is None, self.log

    def metric(self, name: str) -> float:
        """The value of a series, with its labels as they are exported. The publisher has the option ``--metrics``."""
        eventually(lambda: "metrics are served" in self.log, lambda: self.log)
        (url,) = set(re.findall(r"http://[^\s\"]+/metrics", self.log))
        with urllib.request.urlopen(url, timeout=SECONDS) as response:
            values = dict(line.rsplit(" ", 1) for line in response.read().decode().splitlines() if line[:1] != "#")
        return float(values[name])

    def refused(self, endpoint: str, reason: str) -> float:
        return self.metric(f'kvsidecar_publisher_refusals_total{{endpoint="{endpoint}",reason="{reason}"}}')

    @property
    def log(self) -> str:
        return self._log.read_text()

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(SECONDS)

    def __enter__(self) -> PublisherProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        try:
            self.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            print(self.log)
            raise
        if error is not None:
            print(self.log)
