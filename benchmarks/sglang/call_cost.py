"""What each call of the linker costs SGLang's scheduler thread, with a real daemon on the host device.

python -m benchmarks.sglang.call_cost [--layers 32] [--page 64] [--rounds 200] [--json FILE]

Starts the daemon. Needs neither SGLang nor torch: objects with arrays stand in for SGLang's transfers with tensors, so
the copy of indices from a GPU is not in it. Pages are small: this is about calls, not about bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.sglang.load_layers import OneRank, host_memory
from kvsidecar.client import Namespace, Residency, ResidencyChange
from kvsidecar.integrations.namespace_facts import EngineIdentity
from kvsidecar.integrations.sglang.counters import RankCounters
from kvsidecar.integrations.sglang.events import PageEvents
from kvsidecar.integrations.sglang.groups import KV, groups_of
from kvsidecar.integrations.sglang.options import LinkerOptions
from kvsidecar.integrations.sglang.rank_side import RankFacts, RankSide
from kvsidecar.integrations.sglang.weights import Weights
from tests.harness import SECONDS, DaemonProcess, eventually
from tests.linker.events import Watch, wire

ROW = 64
SIZES = (8, 64, 512, 2048)
"""Pages of one call."""


class Bench:
    def __init__(self, socket: str, layers: int, page: int, chunks: int) -> None:
        pages = 2 * max(SIZES)
        self.page, self.pages = page, pages
        groups = groups_of([(KV, range(layers), False)], layers, chunks)
        self.clock = time.monotonic
        options = LinkerOptions.parse({"socket": socket, "lookup_budget": SECONDS, "load_chunks": chunks})
        self.side = RankSide(
            options,
            RankFacts(
                EngineIdentity(Namespace("bench", "bf16", "sglang pages by layer", page, 1, 1, "sglang sha256"), {}),
                "bench",
                groups,
                host_memory(groups, ROW, pages)[0],
                page,
            ),
            OneRank(),
            Weights(32, lambda: "default", "bench"),
            RankCounters(),
        )
        assert self.side._client.wait_ready(SECONDS).ready
        self._numbers = iter(range(1 << 40))

    def transfer(self, name: str, count: int) -> Any:
        keys = [hashlib.sha256(f"{name} {i}".encode()).hexdigest() for i in range(count)]
        slots = (np.arange(count)[:, None] * self.page + np.arange(self.page)).ravel()
        return SimpleNamespace(name=KV, keys=keys, device_indices=slots)

    def settle(self) -> None:
        eventually(self.side.completed, "an offload")
        self.side.pop()

    def events(self, timed: Callable[..., Any], keys: list[str]) -> None:
        """What KV events add: SGLang's own event of these pages is read, they are noted with a store, and announced,
        512 in a step, when the daemon tells that it has them."""
        names = [int.from_bytes(bytes.fromhex(each)[:8], "big", signed=True) for each in keys]
        own = wire.BlockStored(names, None, [1] * self.page * len(names), self.page, medium=wire.StorageMedium.GPU)
        hashes, watch = b"".join(map(bytes.fromhex, keys)), Watch()
        events = PageEvents(wire, 0, self.page, watch, lambda hashes: hashes)
        timed("events: nothing new", events.take, [])
        timed("events: SGLang's own are read", events.take, [own])
        assert any(timed("events: notes of a store", events.notes, 0, hashes))
        watch.news = [ResidencyChange(Residency.RESET), ResidencyChange(Residency.STORED, 0, hashes)]
        while not timed("events: the daemon's, a step", events.take, []):
            pass

    def row(self, count: int, rounds: int) -> dict[str, list[float]]:
        """Seconds of each call, by name."""
        found: dict[str, list[float]] = {}

        def timed(name: str, call: Callable[..., Any], *arguments: Any) -> Any:
            began = time.perf_counter()
            result = call(*arguments)
            found.setdefault(name, []).append(time.perf_counter() - began)
            return result

        side = self.side
        for _ in range(rounds):
            rid = f"r{next(self._numbers)}"
            new = [self.transfer(rid, count)]
            timed("lookup, miss", side.lookup, f"miss {rid}", new)
            timed("offload, new pages", side.offload, new)
            timed("poll of completions", side.completed)
            self.settle()
            timed("offload, known pages", side.offload, new)
            self.settle()
            hit = timed("lookup, hit", side.lookup, rid, new)
            assert hit[-1] == count
            timed("lookup, repeated", side.lookup, rid, new)
            assert timed("load: queue", side.load, rid, new)
            index = timed("load: start", side.loads.start)
            side.loads.set_consumer(index)
            timed("load: wait for the first layers", side.loads.wait_until, 0)
            assert timed("load: wait for the others", side.loads.finish, index)
            self.events(timed, new[0].keys)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--page", type=int, default=64, help="tokens in a page")
    parser.add_argument("--chunks", type=int, default=4, help="load_chunks")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[int, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="kvs-") as directory:
        pool = 64 << 20
        with DaemonProcess(
            Path(directory), "--pool-size", str(pool), "--log-level", "warning", until="ready"
        ) as daemon:
            bench = Bench(daemon.socket, options.layers, options.page, options.chunks)
            for count in SIZES:
                results[count] = bench.row(count, options.rounds)
            bench.side.close()
    table = Table(title=f"microseconds, median (p90) of {options.rounds}; {options.chunks} chunks")
    table.add_column("call")
    for count in SIZES:
        table.add_column(f"{count} pages", justify="right")
    for name in results[SIZES[0]]:
        cells = [np.percentile(results[count][name], (50, 90)) * 1e6 for count in SIZES]
        table.add_row(name, *(f"{median:.0f} ({high:.0f})" for median, high in cells))
    Console(width=120).print(table)
    if options.json is not None:
        options.json.write_text(json.dumps({str(count): rows for count, rows in results.items()}))


if __name__ == "__main__":
    main()
