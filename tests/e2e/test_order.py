"""The race of a store with the kernels that write its blocks, on a GPU. The test proves itself: without an order every
round is corrupted; with each of the two orders none is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvsidecar.client import DEVICE, Blocks, GroupLayout
from tests.harness import NAMESPACE, SECONDS, DaemonProcess, done, eventually, hashes

torch = pytest.importorskip("torch")
from kvsidecar.client.torch import TorchEventRing, TorchExporter  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.torch,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="there is no NVIDIA GPU"),
]

ROUNDS = 150
BLOCKS, ELEMENTS = 16, 64 * 1024
DELAY_CYCLES = 10_000_000
"""About 5 ms on an H200: far longer than an RPC and a copy."""


@pytest.fixture
def cuda_daemon(short_dir: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(short_dir, "--pool-size", "256MiB", device="cuda") as process:
        yield process.wait_ready()


class Racer:
    """A rank whose blocks are written late: a kernel of some milliseconds, then the content, on one stream."""

    def __init__(self, daemon: DaemonProcess, events: TorchEventRing | None) -> None:
        self.kv = torch.zeros(BLOCKS, ELEMENTS, dtype=torch.int32, device="cuda")
        exporter = TorchExporter()
        regions = exporter.regions([self.kv])
        self.client = daemon.client()
        self.client.attach(
            instance="racer",
            namespace=NAMESPACE,
            buffers=exporter.kv_buffers(),
            groups=[GroupLayout(0, BLOCKS, 0, 1, regions)],
            events=events,
        )

    def round(self, number: int, after: str) -> int | None:
        """Store one block while it is being written. Returns how many of its elements came back wrong; None if the
        store was not over before what writes the block, though it did not wait for that."""
        block, target = number % (BLOCKS // 2), BLOCKS // 2 + number % (BLOCKS // 2)
        torch.cuda._sleep(DELAY_CYCLES)
        self.kv[block].fill_(number + 1)
        written = torch.cuda.Event()
        written.record()
        waiting: Any = None
        if after == "host":
            waiting = torch.cuda.Event()
            waiting.record()
        elif after == "device":
            waiting = DEVICE
        names = hashes((after, number))
        job = self.client.store([Blocks(0, names, [block])], after=waiting)
        done(self.client.wait([job], SECONDS)[job])
        if after == "none" and written.query():
            return None
        torch.cuda.synchronize()
        job = self.client.load([Blocks(0, names, [target])])
        done(self.client.wait([job], SECONDS)[job])
        return int((self.kv[target] != number + 1).sum())


def test_without_an_order_every_store_is_corrupted_and_with_either_none_is(cuda_daemon: DaemonProcess) -> None:
    racer = Racer(cuda_daemon, TorchEventRing())
    assert racer.client.device_order, racer.client.device_order_refused
    wrong = {after: [racer.round(number, after) for number in range(ROUNDS)] for after in ("none", "host", "device")}
    races = [elements for elements in wrong["none"] if elements is not None]
    print(f"corrupted rounds: {sum(map(bool, races))} of {len(races)}", {a: sum(map(bool, wrong[a])) for a in wrong})
    assert races, "this machine was too slow to store a block before it is written"
    assert all(races)
    assert not any(wrong["host"] + wrong["device"])
    racer.client.close()


def test_an_engine_killed_while_its_store_waits_for_compute_is_unmapped(
    cuda_daemon: DaemonProcess,
) -> None:
    """A wait in a stream would never end here (benchmarks/dead_event.py)."""
    script = (
        "import sys, torch\n"
        "from tests import harness\n"
        "from tests.e2e import test_order as t\n"
        "daemon = object.__new__(harness.DaemonProcess)\n"
        "daemon.socket = sys.argv[1]\n"
        "racer = t.Racer(daemon, t.TorchEventRing())\n"
        "for _ in range(8): torch.cuda._sleep(1_900_000_000)\n"
        "racer.client.store([t.Blocks(0, harness.hashes('late'), [0])], after=t.DEVICE)\n"
        "print('waiting', flush=True)\n"
        "sys.stdin.read()\n"
    )
    engine = subprocess.Popen(
        [sys.executable, "-c", script, cuda_daemon.socket], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert engine.stdout is not None
    assert engine.stdout.readline() == "waiting\n"
    eventually(lambda: cuda_daemon.metric('kvsidecar_jobs_queued{direction="store"}'))
    healthy = Racer(cuda_daemon, None)
    assert healthy.round(1, "host") == 0, "a store that waits held up another engine's"
    engine.kill()
    engine.wait()
    cuda_daemon.wait_log("rank detached")
    engine.communicate()
    assert cuda_daemon.metric("kvsidecar_pool_reserved_bytes") == 0
    assert cuda_daemon.metric("kvsidecar_pool_quarantined_bytes") == 0
    assert healthy.round(2, "host") == 0
    healthy.client.close()
