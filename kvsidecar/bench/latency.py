"""Latencies of the calls that a scheduler and an engine's thread wait for: lookups, submissions, polls."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvsidecar.bench.engine import AttachedEngine
from kvsidecar.bench.errors import BenchError
from kvsidecar.bench.layouts import TINY
from kvsidecar.bench.report import Measurement
from kvsidecar.bench.setting import Setting
from kvsidecar.bench.stats import latency, no_garbage_collection
from kvsidecar.client import LookupMode
from kvsidecar.types import Direction

HASHES = (1, 8, 64, 512)
MISSES = 4096
SAMPLES = 1000
LEASE_SECONDS = 30.0
SUBMIT_BLOCKS = (1, 512)


def lookups(setting: Setting, out: Measurement) -> None:
    """Latency by number of hashes, with a lease as a scheduler takes it, and without."""
    samples = setting.samples(SAMPLES)
    with setting.engine(TINY) as engine, engine.held(max(HASHES), 1) as held, no_garbage_collection():
        for count in HASHES:
            hashes = held[0].hashes[:count]
            for lease in (False, True):
                row = time_lookups(engine, lambda hashes=hashes: hashes, count, samples, lease=lease)  # type: ignore[misc]
                out.add(hashes=count, hits=count, lease=lease, mode="prefix", **row)
        for mode in LookupMode:
            row = time_lookups(engine, lambda: engine.fresh(MISSES), 0, samples, mode=mode)
            out.add(hashes=MISSES, hits=0, lease=False, mode=mode.value, **row)
        engine.clear()


def time_lookups(
    engine: AttachedEngine,
    hashes: Callable[[], list[bytes]],
    hits: int,
    samples: int,
    *,
    lease: bool = False,
    mode: LookupMode = LookupMode.PREFIX,
) -> dict[str, float]:
    """Latencies of successive lookups, each of which must find the first ``hits`` hashes."""
    took = []
    client, namespace, clock = engine.client, engine.namespace, time.perf_counter
    for _ in range(samples):
        groups = {0: hashes()}
        started = clock()
        found = client.lookup(namespace, groups, mode=mode, lease_seconds=LEASE_SECONDS if lease else 0.0)
        took.append(clock() - started)
        if found.groups[0].hits != hits:
            raise BenchError(f"a lookup found {found.groups[0].hits} blocks instead of {hits} ({found.reason})")
        if found.lease is not None:
            client.release(found.lease)
    return latency(took)


def submit(setting: Setting, out: Measurement) -> None:
    """Time in `Client.store`, `Client.load` and an empty `Client.poll`: all that an engine's thread spends on a job."""
    samples, clock = setting.samples(SAMPLES), time.perf_counter
    with setting.engine(TINY) as engine, no_garbage_collection():
        client = engine.client
        for blocks in SUBMIT_BLOCKS:
            with engine.held(blocks, 1) as held:
                for direction in Direction:
                    took = []
                    for _ in range(samples):
                        store = direction is Direction.STORE
                        (job_blocks,) = engine.jobs([engine.fresh(blocks) if store else held[0].hashes])
                        started = clock()
                        job = client.store(job_blocks) if store else client.load(job_blocks, lease=held[0].lease)
                        took.append(clock() - started)
                        engine.finish(job)
                    out.add(call=direction.value, blocks=blocks, **latency(took))
            engine.clear()
        took = []
        for _ in range(samples):
            started = clock()
            client.poll()
            took.append(clock() - started)
        out.add(call="poll", blocks=0, **latency(took))
