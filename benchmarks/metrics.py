"""What a private daemon exports."""

from __future__ import annotations

import sys
import urllib.request

from kvsidecar.bench.processes import PrivateDaemon


def metric(daemon: PrivateDaemon, name: str) -> float:
    """The value of a sample, whose name may have labels behind it. Raises SystemExit if there is none."""
    with urllib.request.urlopen(daemon.said["listening"]["http"] + "/metrics") as reply:
        for line in reply.read().decode().splitlines():
            if line.startswith(name):
                return float(line.rpartition(" ")[2])
    sys.exit(f"{name} is not exported")
