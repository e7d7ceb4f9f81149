"""What each kind of copy reaches on this GPU: behind the cost model of ``kvsidecar/copier/recipes.py``.

    python benchmarks/copy_methods.py

Random blocks of a layer-stacked region, one stream, no RPC and no daemon: batches of pieces of several sizes
(cuMemcpyBatchAsync) and one pitched copy a block (cuMemcpy3DBatchAsync). GB/s, median of five; in brackets the share of
the limit, one large copy.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import numpy.typing as npt

from kvsidecar.copier.copy_plan import MAX_PITCHED
from kvsidecar.device.base import COPY, CopyCall, CopyStream
from kvsidecar.device.cuda.platform import CudaPlatform
from kvsidecar.support import host_memory
from kvsidecar.support.memory_limits import THP_BYTES, PageKind, Pages
from kvsidecar.support.units import GiB, KiB, MiB
from kvsidecar.types import Direction

SHAPES = [(1, 2 * MiB), (32, 128 * KiB), (32, 64 * KiB), (64, 32 * KiB), (61, 18 * KiB), (80, 8 * KiB), (160, 4 * KiB)]
"""(rows, bytes of a row) of a block."""
NUM_BLOCKS = 1024
JOBS = (1, 8, 64, 512)
BATCHES = (32, 64, 256, 1024, 1 << 30)
POOL = 4 * GiB + 256 * MiB
ROUNDS = 5


def main() -> None:
    platform = CudaPlatform()
    device = platform.device(platform.device_uuids()[0])
    pages = Pages(PageKind.THP, THP_BYTES)
    pool = host_memory.map_file(host_memory.create_file(POOL, pages), POOL, pages)
    host_memory.populate(pool, POOL, pages.kind)
    platform.pin(pool, POOL)
    memory = device.allocate(POOL)
    rng = np.random.default_rng(0)
    for direction in Direction:
        stream = device.open_stream(direction)
        whole = copies_of(memory.address, np.zeros(1, np.uint64), np.zeros(1, np.uint64), 1, GiB)
        limit = measure(stream, pool, [CopyCall(whole, batched=False, nbytes=GiB)])
        print(f"\n{direction}: one copy of 1 GiB {limit:.1f} GB/s")
        names = ["pitched", *(f"batch of {size}" if size < 1 << 20 else "batch of all" for size in BATCHES)]
        print(f"{'rows':>12} {'blocks':>6}" + "".join(f"{name:>18}" for name in names))
        for num_rows, row_bytes in SHAPES:
            for job in JOBS:
                blocks = rng.permutation(NUM_BLOCKS)[:job].astype(np.uint64)
                slots = rng.permutation(NUM_BLOCKS)[:job].astype(np.uint64)
                pitched = copies_of(memory.address, blocks, slots, num_rows, row_bytes)
                pieces = rows_of(pitched)
                cells = [measure(stream, pool, calls_of(pitched, MAX_PITCHED, batched=False))]
                cells += [measure(stream, pool, calls_of(pieces, size, batched=True)) for size in BATCHES]
                shown = "".join(f"{gbps:>11.1f} ({gbps / limit:4.0%})" for gbps in cells)
                print(f"{num_rows:>4} x {row_bytes // KiB:>4}K {job:>6}{shown}", flush=True)


def copies_of(
    address: int, blocks: npt.NDArray[np.uint64], slots: npt.NDArray[np.uint64], num_rows: int, row_bytes: int
) -> npt.NDArray[np.void]:
    """One pitched copy a block; layers lie ``NUM_BLOCKS`` rows apart."""
    copies = np.zeros(len(blocks), COPY)
    copies["device_address"] = np.uint64(address) + blocks * np.uint64(row_bytes)
    copies["device_pitch"] = NUM_BLOCKS * row_bytes
    copies["host_offset"] = slots * np.uint64(num_rows * row_bytes)
    copies["host_pitch"] = copies["row_bytes"] = row_bytes
    copies["num_rows"] = num_rows
    return copies


def rows_of(pitched: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """The same as pieces of one row."""
    counts = pitched["num_rows"].astype(np.int64)
    pieces = np.repeat(pitched, counts)
    row = (np.arange(len(pieces)) - np.repeat(np.cumsum(counts) - counts, counts)).astype(np.uint64)
    pieces["device_address"] += row * pieces["device_pitch"]
    pieces["host_offset"] += row * pieces["host_pitch"]
    pieces["num_rows"] = 1
    return pieces


def calls_of(copies: npt.NDArray[np.void], size: int, *, batched: bool) -> list[CopyCall]:
    parts = [copies[first : first + size] for first in range(0, len(copies), size)]
    return [CopyCall(part, batched, int((part["row_bytes"] * part["num_rows"]).sum())) for part in parts]


def measure(stream: CopyStream, pool: int, calls: list[CopyCall]) -> float:
    """GB/s of these calls, one after another."""
    prepared = [stream.prepare(call, pool) for call in calls]
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        marks = [stream.issue(each) for each in prepared]
        while not marks[-1].is_done():
            pass
        seconds.append(time.perf_counter() - started)
    return sum(call.nbytes for call in calls) / statistics.median(seconds) / 1e9


if __name__ == "__main__":
    main()
