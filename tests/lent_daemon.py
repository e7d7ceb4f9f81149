"""One daemon for many tests, one after the other: most of what a test of a daemon takes is the daemon's start.

For tests that only attach, store, load, look up, and are refused. What a daemon has counted and logged is not undone:
a test sees what was counted and logged since it began.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from kvsidecar.client.local_operator import Operator
from kvsidecar.errors import ClientError
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.harness import SECONDS, DaemonProcess, eventually

AT_REST_SECONDS = 2.0
"""A daemon that is longer at work for a test that has ended is not lent again; a slow machine only starts more."""
COUNTERS = ("_total", "_bucket", "_count", "_sum")


class LentDaemon(DaemonProcess):
    """A ready daemon with a pool of 1 MiB on the host device."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._before: dict[str, float] = {}
        self.wait_ready()
        self._started_with = self.copiers()

    def begin(self, local: bool) -> None:
        """Before a test."""
        self.local = local
        self._before = dict(self._counters())
        self.log.clear()
        self._ahead.clear()

    def _counters(self) -> list[tuple[str, float]]:
        samples = (line.rpartition(" ") for line in self.get("/metrics")[1].splitlines() if not line.startswith("#"))
        return [(name, float(value)) for name, _, value in samples if name.partition("{")[0].endswith(COUNTERS)]

    def metric(self, name: str) -> float:
        return super().metric(name) - self._before.get(name, 0.0)

    def is_as_new(self) -> bool:
        """Discard its blocks. Returns whether another test may have it: it runs, nothing is attached, held or under
        way, and its copiers are the first ones."""
        if self.process.poll() is not None or self.is_stopped():
            return False
        operator = Operator(self.socket, SECONDS)
        try:
            eventually(self._is_at_rest, seconds=AT_REST_SECONDS)
            operator.call("Clear", pb.ClearRequest(all=True))
        except (AssertionError, ClientError, OSError):  # it takes no more connections, for example
            return False
        finally:
            operator.close()
        self.wait_log("cleared")  # and with it all that the test has made it say
        pool = self.get("/status")[1]["pool"]
        return pool["used_bytes"] == pool["quarantined_bytes"] == 0 and self.copiers() == self._started_with

    def _is_at_rest(self) -> bool:
        status: dict[str, Any] = self.get("/status")[1]
        jobs, pool = status["jobs"], status["pool"]
        held = status["ranks"] or status["pins"] or pool["leases"] or jobs["queued"] or jobs["running"]
        said = Counter(line["event"] for line in self.read_so_far())
        detached = said["rank attached"] == said["rank detached"]  # said when its memory is unmapped, a little later
        return not held and detached and status["readiness"]["state"] == "ready"


class Lending:
    """Has the daemon that is lent, and starts another one where a test has changed it for good."""

    def __init__(self) -> None:
        self._daemon: LentDaemon | None = None
        self._directory = Path()

    def lend(self, local: bool) -> LentDaemon:
        if self._daemon is None:
            self._directory = Path(tempfile.mkdtemp(prefix="kvs-"))
            self._daemon = LentDaemon(self._directory)
        self._daemon.begin(local)
        return self._daemon

    def take_back(self) -> None:
        if self._daemon is not None and not self._daemon.is_as_new():
            self.close()

    def close(self) -> None:
        if self._daemon is not None:
            self._daemon.__exit__(None, None, None)
            shutil.rmtree(self._directory)
            self._daemon = None
