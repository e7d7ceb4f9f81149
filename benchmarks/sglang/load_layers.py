"""How fast SGLang's linker loads pages into the GPU, as a whole and layer by layer.

python -m benchmarks.sglang.load_layers [--device cuda|host] [--tokens 8192] [--json FILE] [-- FLAGS OF kvsidecar serve]

For each ``load_chunks``, an engine's side of the linker stores the pages of a prompt and loads them again, in turns:
the time until the first layer may be computed, until the last one may, and the rate of the whole. The default shape is
that of Llama-3.1-8B. At the end each engine loads into empty pages once more, and every layer is compared with what was
stored, as soon as it may be computed. With --scattered, no page lies beside the next one of the prompt, as in an engine
that has run for a while. On the host device the copies are the processor's, which shows only that it works. Needs no
SGLang; on a GPU it needs torch, whose tensors have the layout of SGLang's pools: an allocation for each layer, K and V
its halves.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from kvsidecar.client import GroupLayout, HostBuffer, Namespace, Region
from kvsidecar.integrations.namespace_facts import EngineIdentity
from kvsidecar.integrations.rank_memory import RankMemory
from kvsidecar.integrations.sglang.counters import RankCounters
from kvsidecar.integrations.sglang.groups import KV, Groups, groups_of
from kvsidecar.integrations.sglang.options import LinkerOptions
from kvsidecar.integrations.sglang.rank_side import RankFacts, RankSide
from kvsidecar.integrations.sglang.weights import Weights
from kvsidecar.support.units import parse_size
from tests.harness import SECONDS, DaemonProcess, eventually


class OneRank:
    rank, size = 0, 1

    def agree(self, yes: bool) -> bool:
        return yes


def host_memory(groups: Groups, row: int, pages: int) -> tuple[RankMemory, Any]:
    """The memory, and its bytes as [layers, pages, row], which are random."""
    layers = sum(len(each.layers) for each in groups.all)
    buffer = HostBuffer(layers * pages * row)
    content = np.frombuffer(buffer.memory, np.uint8).reshape(layers, pages, row)
    content[:] = np.random.default_rng(1).integers(0, 256, content.shape, np.uint8)
    layouts = [
        GroupLayout(
            each.index,
            pages,
            0,
            1,
            tuple(Region(0, own[0] * pages * row, pages * row, row, row, len(own)) for own in each.slices.values()),
            (1,) * len(each.slices) if len(each.slices) > 1 else (),
        )
        for each in groups.all
    ]
    return RankMemory(buffer.kv_buffers(), tuple(layouts)), content


def cuda_memory(
    groups: Groups, layers: int, page: int, heads: int, dim: int, pages: int, staging: int | None
) -> tuple[RankMemory, Any, Any, Any]:
    """The memory, its content by layer as [2, pages, ...], which is random, what reads its slots behind the current
    stream, and the staging memory."""
    import torch

    from kvsidecar.integrations.sglang import pools
    from kvsidecar.integrations.sglang.staging import staging_for

    fused = [torch.randn((2, pages * page, heads, dim), dtype=torch.bfloat16, device="cuda") for _ in range(layers)]
    kvcache = type("MHATokenToKVPool", (), {})()
    kvcache.kv_cache_layout, kvcache.k_scale_buffer, kvcache.v_scale_buffer = "nhd", None, None
    kvcache.layer_num = layers
    kvcache.k_buffer, kvcache.v_buffer = [each[0] for each in fused], [each[1] for each in fused]
    params = SimpleNamespace(sidecar_draft_device_pools=(), mtp_draft_device_pools=())
    found, _ = pools.pools_of(kvcache, params, page, set())
    content = [each.view(2, pages, -1) for each in fused]
    memory, reader = pools.export(found, groups, 0, 1), pools.SlotReader(torch.device("cuda"), None)
    return memory, content, reader, staging_for(found, groups, memory.groups, staging)


def on_gpu(slots: Any) -> Any:
    """Where SGLang has them."""
    import torch

    return torch.from_numpy(slots).cuda()


def wait_for_gpu() -> None:
    """Until what the current stream was given is done: a layer may be there on the stream only."""
    import torch

    torch.cuda.current_stream().synchronize()


class Engine:
    def __init__(self, socket: str, chunks: int, options: argparse.Namespace) -> None:
        self.page, self.pages = options.page, -(-options.tokens // options.page)
        row = 2 * options.page * options.heads * options.dim * 2
        self.bytes = row * options.layers * self.pages
        groups = groups_of([(KV, range(options.layers), False)], options.layers, chunks)
        reader = staging = None
        places, count = np.arange(2 * self.pages), 2 * self.pages
        if options.scattered:  # every other page, so that none touches another one
            places, count = 2 * np.random.default_rng(0).permutation(places), 2 * count
        self.stored, self.loaded = np.split(places, 2)
        """Pages of the prompt, and those into which it is loaded."""
        if options.device == "cuda":
            memory, self.content, reader, staging = cuda_memory(
                groups, options.layers, options.page, options.heads, options.dim, count, options.staging
            )
        else:
            memory, self.content = host_memory(groups, row, count)
        self.layers = options.layers
        on_host = options.device == "host"
        self._indices: Callable[[Any], Any] = np.asarray if on_host else on_gpu
        self._synchronize: Callable[[], None] = (lambda: None) if on_host else wait_for_gpu
        self.staged = staging is not None
        namespace = Namespace("bench", "bf16", f"sglang, {chunks} parts", options.page, 1, 1, "sglang sha256")
        self.side = RankSide(
            LinkerOptions.parse(
                {
                    "socket": socket,
                    "lookup_budget": SECONDS,
                    "load_timeout": SECONDS,
                    "lease_seconds": 2 * SECONDS,
                    "load_chunks": chunks,
                }
            ),
            RankFacts(
                EngineIdentity(namespace, {}),
                f"bench {chunks}",
                groups,
                memory,
                options.page,
                reader,
                staging,
            ),
            OneRank(),
            Weights(32, lambda: "default", "bench"),
            RankCounters(),
        )
        for client in self.side._clients:
            assert client.wait_attached(SECONDS)
            assert client.wait_ready(SECONDS).ready
        self._loads = iter(range(1 << 40))
        assert self.side.offload([self.transfer(self.stored)])
        eventually(self.side.completed, "an offload")
        self.side.pop()

    def transfer(self, pages: Any) -> Any:
        keys = [hashlib.sha256(str(page).encode()).hexdigest() for page in range(self.pages)]
        slots = (pages[:, None] * self.page + np.arange(self.page)).ravel()
        return SimpleNamespace(name=KV, keys=keys, device_indices=self._indices(slots))

    def load(self, computed: Callable[[int], None] = lambda layer: None) -> tuple[float, float]:
        """Seconds until the first layer, and until the last one, may be computed. What SGLang does before the load is
        queued is not in it.

        Args:
            computed: called with each layer as soon as it may be.
        """
        rid, to = str(next(self._loads)), self.transfer(self.loaded)
        assert self.side.lookup(rid, [to])[-1] == self.pages
        began = time.perf_counter()
        assert self.side.load(rid, [to])
        index = self.side.loads.start()
        self.side.loads.set_consumer(index)
        self.side.loads.wait_until(0)
        self._synchronize()
        first = time.perf_counter() - began
        computed(0)
        for layer in range(1, self.layers):
            self.side.loads.wait_until(layer)
            computed(layer)
        self._synchronize()
        last = time.perf_counter() - began
        assert self.side.loads.finish(index)
        return first, last

    def compare(self) -> None:
        """Load into empty pages, and compare each layer as soon as it may be computed.

        Raises:
            RuntimeError: one is not what was stored.
        """
        for layer in self.content:
            layer[..., self.loaded, :] = 0
        self.load(self._compare)

    def _compare(self, layer: int) -> None:
        content = self.content[layer]
        wrong = (content[..., self.loaded, :] != content[..., self.stored, :]).any(-1).sum()
        if wrong:
            raise RuntimeError(f"{int(wrong)} pieces of layer {layer} are not what was stored")


def measure(options: argparse.Namespace, flags: Iterable[str]) -> dict[int, dict[str, Any]]:
    results: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="kvs-") as directory:
        flags = ("--pool-size", str(options.pool_size), "--log-level", "warning", *flags)
        with DaemonProcess(Path(directory), *flags, device=options.device, until="ready") as daemon:
            engines = {chunks: Engine(daemon.socket, chunks, options) for chunks in options.chunks}
            took: dict[int, list[tuple[float, float]]] = {chunks: [] for chunks in engines}
            for _ in range(options.rounds + 1):
                for chunks, engine in engines.items():
                    took[chunks].append(engine.load())
            for chunks, engine in engines.items():
                engine.compare()
                first, last = np.array(took[chunks][1:]).T  # the first one warms up
                results[chunks] = {
                    "bytes": engine.bytes, "staged": engine.staged, "first": first.tolist(), "last": last.tolist(),
                }  # fmt: skip
                engine.side.close()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "host"), default="cuda")
    parser.add_argument("--tokens", type=int, default=8192, help="of a prompt")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--page", type=int, default=64, help="tokens in a page")
    parser.add_argument("--heads", type=int, default=8, help="for keys and values")
    parser.add_argument("--dim", type=int, default=128, help="of a head, bfloat16")
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="load_chunks")
    parser.add_argument("--scattered", action="store_true", help="no page lies beside the next one of the prompt")
    parser.add_argument(
        "--staging", type=parse_size, help="GPU memory by way of which pages come (the linker's choice)"
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--pool-size", type=parse_size, default=parse_size("8GiB"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("flags", nargs="*", help="of kvsidecar serve, behind --")
    options = parser.parse_args()
    results = measure(options, options.flags)
    (size,) = {each["bytes"] for each in results.values()}
    pages = f"{'scattered ' if options.scattered else ''}pages of {options.page} tokens"
    if next(iter(results.values()))["staged"]:
        pages += " by way of staging memory"
    table = Table(title=f"{size / 1e6:.0f} MB a load, {pages}: median (p90) of {options.rounds}; all bytes compared")
    for column in ("load_chunks", "first layer, ms", "last layer, ms", "GB/s"):
        table.add_column(column, justify="right")
    for chunks, each in results.items():
        cells = [np.percentile(each[name], (50, 90)) * 1e3 for name in ("first", "last")]
        rate = size / np.median(each["last"]) / 1e9
        table.add_row(str(chunks), *(f"{median:.2f} ({high:.2f})" for median, high in cells), f"{rate:.1f}")
    Console(width=120).print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
