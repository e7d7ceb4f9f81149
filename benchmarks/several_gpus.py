"""A tensor-parallel group with a rank on each GPU loads a hit of 8,192 tokens: time to the last byte, beside one rank.

python -m benchmarks.several_gpus [--device auto|cuda|host] [--devices N] [--json FILE] [-- SERVE OPTIONS]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from kvsidecar.bench import machine
from kvsidecar.bench.driver import Cuda
from kvsidecar.bench.layouts import Layout
from kvsidecar.bench.memory import engine_memory
from kvsidecar.bench.options import BenchOptions
from kvsidecar.bench.processes import BenchChild, serve
from kvsidecar.bench.setting import Setting
from kvsidecar.client import Blocks, Client, Outcome
from kvsidecar.support import cuda_driver
from kvsidecar.support.units import MiB

HIT_TOKENS = 8192
LAYOUT_NAMES = ("tp8-4k", "stacked-64k")
ROUNDS = 7
TIMEOUT = 60.0


class Rank:
    """One rank of a tensor-parallel group: it has its shard of every block."""

    def __init__(self, config: dict[str, Any], stack: ExitStack) -> None:
        self._layout = Layout.from_json(config["layout"])
        cuda = None
        if config["cuda"]:
            cuda = Cuda(config["ordinal"])
            self._layout = self._layout.sized(cuda.memory_info()[0])
        memory = engine_memory(self._layout, cuda, config["on"])
        number, ranks = config["rank"], config["ranks"]
        self._client = stack.enter_context(Client(config["socket"], name=f"rank-{number}", timeout=TIMEOUT))
        self._namespace = replace(self._layout.namespace(config["run"]), tp_size=ranks)
        self._client.attach(
            instance="group", namespace=self._namespace, rank=number, world_size=ranks, buffers=memory.kv_buffers(),
            groups=[replace(self._layout.group(), shard=number, num_shards=ranks)],
        )  # fmt: skip
        if not self._client.wait_ready(TIMEOUT).ready:
            raise RuntimeError("the daemon is not ready")
        self._client.set_idle(True)
        self._ids = np.random.default_rng(number).permutation(self._layout.num_blocks).astype(np.int64)
        self._run = config["run"]

    def _blocks(self, count: int) -> list[Blocks]:
        hashes = [hashlib.sha256(f"{self._run}/{each}".encode()).digest() for each in range(count)]
        return [Blocks(0, b"".join(hashes), self._ids[:count])]

    def store(self, count: int) -> dict[str, Any]:
        return self._timed(self._client.store(self._blocks(count)), time.monotonic())

    def lease(self, count: int) -> dict[str, Any]:
        found = self._client.lookup(self._namespace, {0: self._blocks(count)[0].hashes}, lease_seconds=TIMEOUT)
        return {"hits": found.groups[0].hits, "lease": found.lease}

    def load(self, count: int, lease: int) -> dict[str, Any]:
        blocks = self._blocks(count)
        began = time.monotonic()
        return self._timed(self._client.load(blocks, lease=lease), began)

    def _timed(self, job: int, began: float) -> dict[str, Any]:
        done = self._client.wait([job], TIMEOUT)[job]
        if done.outcome is not Outcome.DONE:
            raise RuntimeError(f"{done.outcome}: {done.reason} {done.error}")
        return {"began": began, "ended": time.monotonic(), "bytes": done.nbytes}


def rank_main(config: dict[str, Any]) -> None:
    with ExitStack() as stack:
        rank = Rank(config, stack)
        sys.stdout.write("{}\n")
        sys.stdout.flush()
        serve({name: getattr(rank, name) for name in ("store", "lease", "load")})


class Group:
    """The ranks of one layout, a device each."""

    def __init__(self, setting: Setting, socket: str, layout: Layout, devices: list[str], stack: ExitStack) -> None:
        self.ranks: list[BenchChild] = []
        for number, device in enumerate(devices):
            config = {
                "socket": socket, "cuda": setting.cuda is not None, "ordinal": number, "on": device, "rank": number,
                "ranks": len(devices), "layout": layout.to_json(), "run": setting.run,
            }  # fmt: skip
            child = BenchChild("benchmarks.several_gpus", config, setting.directory)
            stack.callback(child.close)
            self.ranks.append(child)
        for child in self.ranks:
            child.answer()

    def all(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        for child in self.ranks:
            child.ask(do, **arguments)
        return [child.answer() for child in self.ranks]


def hit(group: Group, blocks: int) -> dict[str, Any]:
    """Milliseconds from the first request of a load to the last byte of the last rank."""
    group.all("store", count=blocks)
    alone, together, nbytes = [], [], 0
    for _ in range(ROUNDS):
        found = group.ranks[0].call("lease", count=blocks)
        assert found["hits"] == blocks, found
        each = group.ranks[0].call("load", count=blocks, lease=found["lease"])
        alone.append(each["ended"] - each["began"])
        every = group.all("load", count=blocks, lease=found["lease"])
        together.append(max(each["ended"] for each in every) - min(each["began"] for each in every))
        nbytes = sum(each["bytes"] for each in every)
    return {
        "rank_bytes": nbytes // len(group.ranks),
        "alone_ms": round(1e3 * statistics.median(alone), 3),
        "together_ms": round(1e3 * statistics.median(together), 3),
        "together_gbps": round(nbytes / statistics.median(together) / 1e9, 1),
    }


def measure(options: argparse.Namespace, directory: Path, console: Console) -> dict[str, Any]:
    setting = Setting(
        BenchOptions(
            device=options.device, serve_flags=tuple(options.serve), pool_bytes=options.pool_mib * MiB or None
        ),
        directory,
        lambda text: console.print(text, style="dim"),
    )
    result: dict[str, Any] = {"hits": []}
    with ExitStack() as stack:
        stack.callback(setting.close)
        if setting.cuda is not None:
            count = min(options.devices or 1 << 10, cuda_driver.device_count())
            devices = [cuda_driver.device_uuid(ordinal) for ordinal in range(count)]
            daemon = setting.daemon()
        else:
            devices = ["host", *(f"host-{number}" for number in range(1, options.devices or 2))]
            flags = ["--devices", ",".join(devices)]
            daemon = stack.enter_context(setting.private_daemon(setting.pool_bytes, flags))
        result["devices"] = len(devices)
        result["machine"] = machine.facts(setting.cuda)
        layouts = {layout.name: layout for layout in setting.layouts()}
        for name in LAYOUT_NAMES:
            with ExitStack() as ranks:
                group = Group(setting, daemon.socket, layouts[name], devices, ranks)
                blocks = HIT_TOKENS // 16
                row = {"layout": name, "blocks": blocks, **hit(group, blocks)}
                result["hits"].append(row)
    return result


def show(result: dict[str, Any], console: Console) -> None:
    columns = "layout", "blocks", "MB a rank", "one rank ms", f"{result['devices']} ranks at once ms", "GB/s of all"
    table = Table(*columns, title=f"A hit of {HIT_TOKENS} tokens, loaded by a tensor-parallel group")
    for row in result["hits"]:
        table.add_row(
            row["layout"], str(row["blocks"]), f"{row['rank_bytes'] / 1e6:.0f}", f"{row['alone_ms']:.2f}",
            f"{row['together_ms']:.2f}", f"{row['together_gbps']:.1f}",
        )  # fmt: skip
    console.print(table)


def main() -> None:
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        rank_main(json.loads(sys.argv[1]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("auto", "cuda", "host"), default="auto")
    parser.add_argument("--devices", type=int, help="how many; default: all GPUs, or 2 of the host")
    parser.add_argument("--pool-mib", type=int, default=0, help="MiB; default: as kvsidecar bench")
    parser.add_argument("--json", type=Path)
    parser.add_argument("serve", nargs="*", help="options for kvsidecar serve, after --")
    options = parser.parse_args()
    console = Console(width=120)
    with tempfile.TemporaryDirectory(prefix="kvs-") as directory:
        result = measure(options, Path(directory), console)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    show(result, console)


if __name__ == "__main__":
    main()
