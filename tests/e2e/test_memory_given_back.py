"""A dead engine's memory is free again when the copier that has it is dead. Behind a last copy: test_faults.py.

Not by time, because no test knows how long a second of this machine is: nobody has it when the daemon says so.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvsidecar.support.cuda_driver import CudaContext
from tests.e2e.gpu_engine import ENGINE
from tests.e2e.leftovers import engine, holders, only_copiers_hold
from tests.harness import FIRST, DaemonProcess, Gate, eventually


def test_behind_its_copiers_death_nobody_has_the_memory(short_dir: Path, gate: Gate) -> None:
    with DaemonProcess(short_dir, KVSIDECAR_FAILPOINTS=f"store.in_flight@{FIRST}={gate}") as daemon:
        daemon.wait_ready()
        with engine(daemon, "store") as victim:
            daemon.wait_log("failpoint")
            victim.kill()
            victim.wait()
            only_copiers_hold(daemon)
            (copier,) = daemon.copiers()
            os.kill(copier, signal.SIGKILL)
            daemon.wait_log("a copier is down")
            assert holders(daemon) == set()
            eventually(lambda: daemon.get("/ready")[0] == 200)  # another one works
            assert holders(daemon) == set(), "imported for an engine that is dead"


@pytest.mark.gpu
@pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="there is no NVIDIA GPU")
def test_behind_its_copiers_death_the_memory_of_the_gpu_is_free(short_dir: Path, gate: Gate) -> None:
    context = CudaContext(0)
    failpoint = f"store.in_flight@{FIRST}={gate}"
    with DaemonProcess(short_dir, "--pool-size", "64MiB", device="cuda", KVSIDECAR_FAILPOINTS=failpoint) as daemon:
        daemon.wait_ready()
        before, _ = context.memory_info()
        # The copy that is held is of the large allocation: what no copy uses is given back at the engine's death.
        script = ENGINE.replace("rank.client.store", "big.store").replace("rank.client.wait", "big.wait")
        victim = subprocess.Popen([sys.executable, "-c", script, daemon.socket], stdin=subprocess.PIPE)
        daemon.wait_log("failpoint")
        victim.kill()
        victim.wait()
        assert before - context.memory_info()[0] >= 2 << 30, "the copier has it no more: this test would pass anyway"
        for copier in daemon.copiers():  # of other GPUs too
            os.kill(copier, signal.SIGKILL)
        killed = time.monotonic()
        eventually(lambda: before - context.memory_info()[0] < 1 << 30)
        print(f"released {time.monotonic() - killed:.3f} s after the copier's death")
    context.close()
