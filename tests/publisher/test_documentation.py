"""The program of docs/routers.md shows what a real publisher says."""

from __future__ import annotations

import sys
from pathlib import Path

from kvsidecar.support import child_process
from tests.docs.pages import fences
from tests.harness import SECONDS, DaemonProcess, eventually
from tests.publisher.engine import TOPIC, Engine
from tests.publisher.process import PublisherProcess

(PROGRAM,) = fences("docs/routers.md", "python")


def test_the_program_of_the_page_shows_events(short_dir: Path) -> None:
    with (
        DaemonProcess(short_dir, "--pool-size", "1MiB").wait_ready() as daemon,
        PublisherProcess(short_dir, daemon.socket) as publisher,
    ):
        assert isinstance(daemon, DaemonProcess)
        output = short_dir / "output"
        program = PROGRAM.replace("tcp://127.0.0.1:5557", f"ipc://{publisher.path}")
        with output.open("wb") as file:
            reader = child_process.start([sys.executable, "-u", "-c", program], stdout=file, stderr=file)
        try:
            engine = Engine(daemon)
            engine.store(1)
            eventually(lambda: f" {TOPIC} BlockStored CPU 4\n" in output.read_text(), output.read_text)
            engine.rank.close()
        finally:
            reader.kill()
            reader.wait(SECONDS)
