"""Checks every layout once, byte for byte: random content per block, stored, loaded to other block ids, compared."""

from __future__ import annotations

import numpy as np

from kvsidecar.bench.engine import TIMEOUT, AttachedEngine
from kvsidecar.bench.errors import BenchError
from kvsidecar.bench.layouts import BLOCK_COUNTS
from kvsidecar.bench.memory import Bytes
from kvsidecar.bench.report import Measurement
from kvsidecar.bench.setting import Setting
from kvsidecar.client import Blocks
from kvsidecar.support.units import MiB

SPREAD = 16 * MiB


class Content:
    """Random bytes for many blocks, held once: each block is a window of one random buffer, at a random place."""

    def __init__(self, count: int, block_bytes: int, rng: np.random.Generator) -> None:
        self._random = np.frombuffer(rng.bytes(block_bytes + SPREAD), np.uint8)
        self._starts = rng.integers(0, SPREAD, count).tolist()
        self._block_bytes = block_bytes

    def of(self, index: int) -> Bytes:
        start = self._starts[index]
        return self._random[start : start + self._block_bytes]


def measure(setting: Setting, out: Measurement) -> None:
    wrong = []
    for layout in setting.layouts():
        setting.say(layout.name)
        with setting.engine(setting.sized(layout)) as engine:
            count = min(max(BLOCK_COUNTS), setting.in_flight_bytes // layout.block_bytes, engine.layout.num_blocks // 2)
            wrong_blocks = round_trip(engine, count, setting.rng)
            out.add(
                layout=layout.name,
                what=layout.what,
                blocks=count,
                nbytes=count * layout.block_bytes,
                wrong_blocks=wrong_blocks,
            )
            if wrong_blocks:
                wrong.append(f"{wrong_blocks} of {count} blocks of {layout.name}")
            engine.clear()
    if wrong:
        raise BenchError(f"loaded bytes differ from stored bytes: {', '.join(wrong)}")


def round_trip(engine: AttachedEngine, count: int, rng: np.random.Generator) -> int:
    """Store ``count`` blocks, load them to other ids, which are zero before. Returns how many came back different."""
    source, target = engine.layout.block_ids(count, 2, rng)
    content = Content(count, engine.layout.block_bytes, rng)
    for index in range(count):
        engine.memory.write(source[index], content.of(index))
    engine.memory.settle()
    hashes = engine.fresh(count)
    engine.finish(engine.client.store([Blocks(0, hashes, source)]))
    found = engine.client.lookup(engine.namespace, {0: hashes}, lease_seconds=TIMEOUT)
    engine.finish(engine.client.load([Blocks(0, hashes, target)], lease=found.lease))
    if found.lease is not None:
        engine.client.release(found.lease)
    loaded = np.empty((count, engine.layout.block_bytes), np.uint8)
    for index in range(count):
        engine.memory.read(target[index], loaded[index])
    engine.memory.settle()
    return sum(not np.array_equal(loaded[index], content.of(index)) for index in range(count))
