"""What the cache costs as it grows: time per block of every call, resident bytes per block, and the longest pauses.

No byte is stored: the pool is a range of numbers. Each size is measured in a process of its own.

python benchmarks/scale.py [--blocks 10000 1000000 10000000] [--shards 1 2] [--eviction rhythm] [--records]
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from kvsidecar.cache.arrays import Words
from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.grants import LoadGrant, StoreGrant
from kvsidecar.cache.slots import SlotAllocator
from kvsidecar.cache.space_blocks import Space
from kvsidecar.daemon.pool_geometry import auto_slab_bytes
from kvsidecar.pool.record_table import RecordTable, TableFacts, map_table
from kvsidecar.types import Eviction, LookupMode, Namespace

HASH_BYTES = 32
JOB = 512
"""Blocks per job."""
MISSES = 4096
SMALL_JOBS = (1, 8)
"""Blocks per job of an engine that decodes."""
UNKNOWN_JOB = 2**62
"""Its hashes are never stored."""
PAGE = 4096

ROWS = {
    "begin_store": ("begin_store, free slots", "us/block"),
    "seal_all": ("seal_all", "us/block"),
    "evicting": ("begin_store, evicting", "us/block"),
    "begin_load": ("begin_load", "us/block"),
    "end_load": ("end_load", "us/block"),
    "lookup": (f"lookup of {JOB} hits", "us"),
    "lease": (f"lookup of {JOB} hits with lease, release", "us"),
    "misses": (f"lookup of {MISSES} misses, bitmap", "us"),
    "store_1": ("store of 1 block, free slots", "us"),
    "evict_1": ("store of 1 block, evicting", "us"),
    "load_1": ("load of 1 block", "us"),
    "lookup_1": ("lookup of 1 hash", "us"),
    "store_8": ("store of 8 blocks, free slots", "us"),
    "evict_8": ("store of 8 blocks, evicting", "us"),
    "load_8": ("load of 8 blocks", "us"),
    "lookup_8": ("lookup of 8 hashes", "us"),
    "resident": ("resident bytes per block", "B"),
    "longest_fill": ("longest call while filling", "ms"),
    "longest_full": ("longest call in the full pool", "ms"),
    "gc": ("full garbage collection", "ms"),
    "clear": ("clear", "ms"),
    "longest_sweep": ("longest step of the sweep after it", "ms"),
}
OF_RECORDS = {
    "adopt": ("taking over all blocks from their records", "ms"),
    "adopt_peak": ("most memory meanwhile, without the records, per block", "B"),
    "adopted": ("what of it the tables keep, per block", "B"),
}


class Clock:
    """Seconds of each call, by name."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        self.busy: defaultdict[str, list[float]] = defaultdict(list)
        """Of the processor alone: what others do on the machine makes calls look long."""

    def time(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        started, busy = time.perf_counter(), time.thread_time()
        answer = call(*arguments)
        self.busy[name].append(time.thread_time() - busy)
        self.seconds[name].append(time.perf_counter() - started)
        return answer

    def median(self, name: str, per: int = 1) -> float:
        """Microseconds."""
        return statistics.median(self.seconds[name]) / per * 1e6

    def longest(self, *names: str) -> float:
        """Milliseconds of the processor."""
        return max(max(self.busy[name]) for name in names) * 1e3


class Filled:
    """A cache with room for so many blocks, and a source of block hashes: job ``i`` has always the same."""

    def __init__(
        self, blocks: int, shards: int, block_bytes: int, job: int, *, recorded: bool, eviction: Eviction
    ) -> None:
        self.job, self.eviction = min(job, blocks), eviction
        self.num_jobs = blocks // self.job
        self.shards = range(shards)
        shard_bytes = -(-block_bytes // shards // PAGE) * PAGE
        slab = auto_slab_bytes(blocks * shards * shard_bytes) // shard_bytes * shard_bytes
        slots = self.num_jobs * self.job * shards
        self.pool, self.slab = slots * shard_bytes, slab
        self.facts = TableFacts(self.pool, slab, "", "")
        self.table: int | None = None
        if recorded:
            self.table = os.memfd_create("records")
            os.ftruncate(self.table, RecordTable.file_bytes(self.facts))
            RecordTable.create(map_table(self.table), self.facts)
        self.cache = self.start()
        self.namespace = Namespace("m", "bfloat16", "NHD", 16, 1, 1, "sha256", HASH_BYTES)
        self.space: Space
        for shard in self.shards:
            self.space = self.cache.open_space(self.namespace, 0, shards, shard, shard_bytes)

    def start(self, words: Words | None = None) -> BlockCache:
        """A cache with the blocks that the records have, if there are records.

        Args:
            words: of the table, if it is mapped already.
        """
        if words is None and self.table is not None:
            words = map_table(self.table)
        records = None if words is None else RecordTable.open(words, self.facts).records
        return BlockCache(SlotAllocator(self.pool, self.slab), records=records, eviction=self.eviction)

    def mapped(self) -> Words:
        """The table, of which all pages that have memory are mapped."""
        assert self.table is not None
        words, at = map_table(self.table), 0
        with suppress(OSError):  # there is no more data
            while True:
                at = os.lseek(self.table, at, os.SEEK_DATA)
                end = os.lseek(self.table, at, os.SEEK_HOLE)
                words[at // 8 : end // 8 : PAGE // 8].max()
                at = end
        return words

    def hashes(self, job: int, count: int | None = None) -> list[bytes]:
        packed = np.random.default_rng(job).bytes(HASH_BYTES * (count or self.job))
        return [packed[start : start + HASH_BYTES] for start in range(0, len(packed), HASH_BYTES)]

    def store(self, clock: Clock, hashes: list[bytes], begin: str, seal: str) -> None:
        for shard in self.shards:
            grant = clock.time(begin, self.cache.begin_store, [(self.space, shard, hashes)])
            assert isinstance(grant, StoreGrant), grant
            clock.time(seal, self.cache.seal_all, grant)

    def load(self, clock: Clock, hashes: list[bytes], begin: str, end: str) -> None:
        grant = clock.time(begin, self.cache.begin_load, [(self.space, 0, hashes)], None, 0.0)
        assert isinstance(grant, LoadGrant), grant
        clock.time(end, self.cache.end_load, grant)


def measure(
    blocks: int, shards: int, block_bytes: int, samples: int, recorded: bool, eviction: Eviction
) -> dict[str, float]:
    """All figures for one size: what `ROWS` names."""
    warm = Filled(2 * JOB, shards, block_bytes, JOB, recorded=recorded, eviction=eviction)
    for job in range(3):
        warm.store(Clock(), warm.hashes(job), "", "")
    before, clock, rng = resident_bytes(), Clock(), random.Random(0)
    full = Filled(blocks, shards, block_bytes, JOB, recorded=recorded, eviction=eviction)
    cache, space, job = full.cache, full.space, full.job

    for number in range(full.num_jobs):
        full.store(clock, full.hashes(number), "begin_store", "seal_all")
    resident = resident_bytes() - before
    stored = cache.stats().readable_blocks

    for _ in range(samples):
        hashes = full.hashes(rng.randrange(full.num_jobs))
        full.load(clock, hashes, "begin_load", "end_load")
        found = clock.time("lookup", cache.lookup, space, hashes, LookupMode.PREFIX)
        assert all(found)
        lease, _ = clock.time("lookup_and_lease", cache.lookup_and_lease, [(space, hashes)], LookupMode.PREFIX, 0, 9, 0)
        clock.time("release", cache.release, lease.id)
        clock.time("misses", cache.lookup, space, full.hashes(UNKNOWN_JOB, MISSES), LookupMode.BITMAP)
        for few in SMALL_JOBS:
            some = rng.sample(hashes, few)
            full.load(clock, some, f"begin_load_{few}", f"end_load_{few}")
            clock.time(f"lookup_{few}", cache.lookup, space, some, LookupMode.PREFIX)
    new = full.num_jobs
    for new in range(full.num_jobs, full.num_jobs + samples):
        full.store(clock, full.hashes(new), "evicting", "seal_evicting")
    small = [(few, full.hashes(new + 1 + each, few)) for few in SMALL_JOBS for each in range(samples)]
    for few, hashes in small:
        full.store(clock, hashes, f"evict_{few}", f"seal_evict_{few}")
    if recorded:
        adopt_peak, adopted = adopting(full, clock)
    clock.time("gc", gc.collect)
    clock.time("clear", cache.clear)
    while clock.time("sweep", cache.sweep):
        pass
    clock.time("sweep", cache.sweep)
    for few, hashes in small:
        full.store(clock, hashes, f"store_{few}", f"seal_{few}")
    cache.clear()
    while cache.sweep():
        pass
    assert cache.stats().free_bytes + cache.stats().wasted_bytes == cache.stats().total_bytes

    figures = {
        name: clock.median(name, job) for name in ("begin_store", "seal_all", "evicting", "begin_load", "end_load")
    }
    figures |= {name: clock.median(name) for name in ("lookup", "misses")}
    figures["lease"] = clock.median("lookup_and_lease") + clock.median("release")
    for few in SMALL_JOBS:
        figures[f"store_{few}"] = clock.median(f"store_{few}") + clock.median(f"seal_{few}")
        figures[f"evict_{few}"] = clock.median(f"evict_{few}") + clock.median(f"seal_evict_{few}")
        figures[f"load_{few}"] = clock.median(f"begin_load_{few}") + clock.median(f"end_load_{few}")
        figures[f"lookup_{few}"] = clock.median(f"lookup_{few}")
    figures["resident"] = resident / stored
    figures["longest_fill"] = clock.longest("begin_store", "seal_all")
    fill = ("begin_store", "seal_all", "gc", "clear", "sweep", "adopt")
    figures["longest_full"] = clock.longest(*[name for name in clock.seconds if name not in fill])
    figures |= {"gc": clock.longest("gc"), "clear": clock.longest("clear"), "longest_sweep": clock.longest("sweep")}
    if recorded:
        figures |= {"adopt": clock.longest("adopt"), "adopt_peak": adopt_peak, "adopted": adopted}
    return figures


def adopting(full: Filled, clock: Clock) -> tuple[float, float]:
    """Time it while another cache takes over all blocks. Returns the most memory that this takes meanwhile, and what it
    has at the end, in bytes for each block."""
    words = full.mapped()  # so that the pages of the records count before
    before = resident_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    again = clock.time("adopt", full.start, words)
    blocks = again.adopted.kept_blocks
    assert blocks == full.cache.stats().readable_blocks
    return (peak_bytes() - before) / blocks, (resident_bytes() - before) / blocks


def peak_bytes() -> int:
    """Most resident memory since the peak began."""
    (line,) = [each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[10_000, 1_000_000, 10_000_000])
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 2], help="shards per block")
    parser.add_argument("--block-bytes", type=int, default=65536, help="of all shards of a block together")
    parser.add_argument("--samples", type=int, default=200, help="jobs per figure, beside the filling")
    parser.add_argument("--records", action="store_true", help="record all blocks in shared memory, for the next run")
    parser.add_argument("--eviction", type=Eviction, choices=list(Eviction), default=Eviction.LRU)
    parser.add_argument("--json", action="store_true", help="one object per size instead of a table")
    options = parser.parse_args()
    results = []
    for shards in options.shards:
        for blocks in options.blocks:
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
                arguments = (blocks, shards, options.block_bytes, options.samples, options.records, options.eviction)
                figures = process.submit(measure, *arguments).result()
            results.append({"blocks": blocks, "shards": shards, **figures})
    if options.json:
        json.dump(results, sys.stdout, indent=2)
        print()
        return
    table = Table(title=f"The cache by number of blocks; jobs of {JOB} blocks, medians")
    table.add_column("what")
    for result in results:
        table.add_column(
            f"{result['blocks']:,}\n{result['shards']} shard{'s' * (result['shards'] > 1)}", justify="right"
        )
    table.add_column("")
    for name, (title, unit) in (ROWS | OF_RECORDS if options.records else ROWS).items():
        table.add_row(
            title, *[f"{result[name]:.{2 if unit in ('us/block', 'ms') else 0}f}" for result in results], unit
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)


if __name__ == "__main__":
    main()
