"""The publisher goes behind the node's daemon and engines where they want the same core."""

from __future__ import annotations

import os
from pathlib import Path

from kvsidecar.publisher.run import NICE
from tests.publisher.process import PublisherProcess


def test_the_publisher_is_nice(short_dir: Path) -> None:
    with PublisherProcess(short_dir, f"{short_dir}/kvs.sock") as publisher:
        publisher.wait_log("publishing")
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpriority(os.PRIO_PROCESS, publisher.process.pid) == max(NICE, own)
        assert publisher.terminate() == 0
