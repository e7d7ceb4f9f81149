"""The cluster tier's engine beside Mooncake's own client, with the same store in the same run, in turns.

    python benchmarks/cluster_tier.py HOST:PORT [--batch 32] [--shard-bytes 2MiB] [--rounds 9] [--json FILE]

The engine writes and reads shards with their trailers, and verifies them. Mooncake's client puts and gets as many bytes
from one registered memory with ``batch_put_from`` and ``batch_get_into``, and verifies nothing. A share is the median
over the rounds of engine / client. What was put is removed again. It also times a find of shards that are not there,
which is what a lookup costs that misses the pool.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvsidecar.support.units import parse_size
from kvsidecar.tiers.backend import ReadEnd, ShardSpace, WriteEnd
from kvsidecar.tiers.cluster.backend import ClusterBackend, ClusterOptions, _address
from kvsidecar.types import Namespace

FINDS = (1, 64, 256, 1024, 4096)
FIND_TURNS = 50


def timed(call: Callable[[], list[int]], wanted: int) -> float:
    began = time.perf_counter()
    codes = call()
    seconds = time.perf_counter() - began
    if set(codes) != {wanted}:
        sys.exit(f"a call has ended with {sorted(set(codes))}, not {wanted}: is there room in the store?")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("master", help="of the store, which needs room for two batches")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--shard-bytes", type=parse_size, default="2MiB")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    size, batch = options.shard_bytes, options.batch
    space = ShardSpace(Namespace("benchmark", "bf16", "l", 16, 1, 1, "h"), 0, 0, 1, size)
    pool = memoryview(mmap.mmap(-1, batch * size))
    pool[:] = os.urandom(len(pool))
    shards = [pool[at : at + size] for at in range(0, len(pool), size)]
    engine = ClusterBackend(pool, ClusterOptions(options.master))
    store = engine._store
    places = [_address(each) for each in shards], [size] * batch
    speeds: dict[tuple[str, str], list[float]] = {}

    def note(who: str, what: str, seconds: float) -> None:
        speeds.setdefault((what, who), []).append(batch * size / seconds)

    def ours(hashes: list[bytes]) -> None:
        unknown = [None] * batch
        write = timed(lambda: list(engine.write(space, hashes, shards, unknown)), WriteEnd.DONE)
        note("engine", "write", write)
        note("engine", "read", timed(lambda: list(engine.read(space, hashes, shards)), ReadEnd.DONE))
        engine.forget(space.namespace)

    def theirs(hashes: list[bytes]) -> None:
        keys = [f"benchmark-{each.hex()}" for each in hashes]
        note("client", "write", timed(lambda: store.batch_put_from(keys, *places), 0))
        note("client", "read", timed(lambda: store.batch_get_into(keys, *places), size))
        store.batch_remove(keys, True)

    for number in range(options.rounds + 1):
        hashes = [random.randbytes(32) for _ in range(batch)]
        for turn in (ours, theirs) if number % 2 else (theirs, ours):
            turn(hashes)
        if not number:
            speeds.clear()  # connections were made
    finds = {}
    for count in FINDS:
        absent = [random.randbytes(32) for _ in range(count)]
        times = []
        for _ in range(FIND_TURNS):
            began = time.perf_counter()
            engine.find(space, absent)
            times.append(time.perf_counter() - began)
        finds[count] = statistics.median(times)
    engine.close()

    rows = []
    table = Table(title=f"GB/s, {batch} shards of {size} bytes a call")
    for column in ("", "engine", "client", "share", "shares of the rounds"):
        table.add_column(column, justify="right")
    for what in ("write", "read"):
        pairs = list(zip(speeds[what, "engine"], speeds[what, "client"], strict=True))
        shares = [engine_speed / client_speed for engine_speed, client_speed in pairs]
        medians = [statistics.median(column) for column in zip(*pairs, strict=True)]
        share = statistics.median(shares)
        rows.append({"what": what, "engine": medians[0], "client": medians[1], "share": share})
        each = " ".join(f"{share:.2f}" for share in shares)
        table.add_row(what, *(f"{speed / 1e9:.2f}" for speed in medians), f"{share:.0%}", each)
    console = Console()
    console.print(table)
    for count, seconds in finds.items():
        console.print(f"find {count:5} absent: {seconds * 1e3:.2f} ms")
    if options.json:
        options.json.write_text(json.dumps({"cores": os.cpu_count(), "rows": rows, "finds": finds}, indent=1))


if __name__ == "__main__":
    main()
