"""What --zero-freed costs: how fast freed bytes are zeroed, stores with it and without, and the cache's own steps.

python -m benchmarks.zero_cost [--rounds 10] [--pool 512MiB]

Two daemons with the host device, one with the option; rounds take turns. Each store goes into a full pool, and evicts.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import numpy as np

from kvsidecar.bench.engine import AttachedEngine, attached
from kvsidecar.bench.layouts import Form, Layout
from kvsidecar.bench.processes import private_daemon
from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.freed import Freed
from kvsidecar.cache.grants import StoreGrant
from kvsidecar.cache.slots import SlotAllocator
from kvsidecar.core.zeroing import SLICE_BYTES
from kvsidecar.support import host_memory
from kvsidecar.support.units import KiB, parse_size
from kvsidecar.types import Namespace

NAMESPACE = Namespace("zero-cost", "bf16", "l", 16, 1, 1, "sha256")
JOB, JOBS = 32, 4
"""Blocks of a job, jobs at a time."""
LAYOUT = Layout("zero-cost", Form.CONTIGUOUS, 1, 256 * KiB, "whole blocks", num_blocks=JOB * JOBS)
SECONDS = 1.0
"""Of a round."""
SIZES = (1, 32, 512)


def store(engine: AttachedEngine, seconds: float) -> float:
    """GB/s of new blocks, one job after another."""
    stored, began = 0, time.perf_counter()
    while (took := time.perf_counter() - began) < seconds:
        stored += sum(job.nbytes for job in engine.run(engine.stores(JOB, JOBS), JOBS))
    return stored / took / 1e9


def clear(engine: AttachedEngine) -> tuple[int, float]:
    """Bytes, and seconds until they are zeroed."""
    used, began = engine.client.status().pool.used_bytes, time.perf_counter()
    engine.clear()
    while engine.client.status().pool.unzeroed_bytes:
        time.sleep(0.001)
    return used, time.perf_counter() - began


def zeroing() -> float:
    """GB/s of one thread, slice by slice, as the daemon does it."""
    memory = np.ones(256 << 20, np.uint8)
    took = []
    for _ in range(5):
        began = time.perf_counter()
        for offset in range(0, len(memory), SLICE_BYTES):
            host_memory.zero(memory.ctypes.data + offset, SLICE_BYTES)
        took.append(time.perf_counter() - began)
    return len(memory) / median(took) / 1e9


def steps(zero: bool) -> Callable[[int], float]:
    """The cache alone, full of blocks of 64 KiB: microseconds of a store of so many."""
    size, blocks = 64 << 10, 1 << 14
    cache = BlockCache(SlotAllocator(blocks * size, 1 << 26, freed=Freed(blocks * size) if zero else None))
    space = cache.open_space(NAMESPACE, 0, 1, 0, size)
    serial = 0

    def store(count: int) -> float:
        nonlocal serial
        hashes = b"".join(hashlib.sha256(b"%d" % (serial + each)).digest() for each in range(count))
        serial += count
        began = time.process_time()
        grant = cache.begin_store([(space, 0, hashes)])
        assert isinstance(grant, StoreGrant)
        cache.seal_all(grant)
        return (time.process_time() - began) * 1e6

    for _ in range(blocks // 512):
        store(512)
    return store


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--pool", type=parse_size, default=512 << 20)
    options = parser.parse_args()
    print(f"one thread zeroes {zeroing():.1f} GB/s")
    off, on = steps(zero=False), steps(zero=True)
    for size in SIZES:
        took = [(off(size), on(size)) for _ in range(200)]
        print(f"store of {size} blocks, the cache alone: {median(each[0] for each in took):.0f} us off, "
              f"{median(each[1] for each in took):.0f} us on")  # fmt: skip
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        engines = {}
        for name in ("off", "on"):
            flags = ["--zero-freed", name]
            daemon = stack.enter_context(private_daemon(Path(directory), "host", options.pool, flags))
            rng = np.random.default_rng(0)
            engines[name] = stack.enter_context(attached(daemon.socket, LAYOUT, None, run=name, rng=rng))
        for engine in engines.values():
            store(engine, 2 * SECONDS)
        rates = [{name: store(engine, SECONDS) for name, engine in engines.items()} for _ in range(options.rounds)]
        for name in engines:
            print(f"stores into a full pool, {name}: {median(each[name] for each in rates):.2f} GB/s")
        print(f"on / off of the same round: {median(each['on'] / each['off'] for each in rates):.3f}")
        cleared = [clear(engines["on"]) for _ in range(5) if store(engines["on"], SECONDS)]
        print(f"cleared: {cleared[0][0] >> 20} MiB, zeroed after {median(each[1] for each in cleared):.2f} s")


if __name__ == "__main__":
    main()
