"""Host memory per token of a prompt: what a hit needs, what this project's pool takes for it, and vLLM's connectors.

python -m benchmarks.vllm.bytes_per_token                                # all models, TP 1, 2 and 8; two minutes
python -m benchmarks.vllm.bytes_per_token Llama-3.1-8B gpt-oss-120b --tp 8
python -m benchmarks.vllm.bytes_per_token --json bytes.json --markdown

No GPU, no weights and no daemon: published configurations go through vLLM's planner as on H200s, with its defaults
(`benchmarks.vllm.h200`). Then vLLM's scheduler computes a prompt of ``--tokens`` with each connector
(`benchmarks.vllm.stored_blocks`), and what it stores is counted on all ranks together, divided by the tokens that a
longer prompt hits.

* "A hit needs": every KV head, latent vector and state once: of all tokens for attention to all of them, of the window
  or the last chunk for other attention, and one state.
* "Pool": the slots that the daemon gives to the blocks which the connector stores, with what their slabs lose.
* "Simple" and "Offloading": the blocks that ``SimpleCPUOffloadConnector`` and ``OffloadingConnector`` have in host
  memory, each as large as vLLM's own code makes them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from rich.console import Console
from rich.table import Table

from benchmarks.vllm import h200
from benchmarks.vllm.bytes_table import COLUMNS, Found, Row, markdown
from benchmarks.vllm.published import CONFIGS, published
from kvsidecar.cache.slabs import Grid
from kvsidecar.cache.slots import size_class
from kvsidecar.daemon.pool_geometry import auto_slab_bytes
from kvsidecar.support.units import GiB

TOKENS = 30_000
"""Of the prompt. It ends within a chunk of Llama 4, as most prompts do."""
TP = (1, 2, 8)
POOL = Grid(512 * GiB, auto_slab_bytes(512 * GiB))
EXPORTED_BLOCKS = 7
"""Blocks of the memory that is laid out to be registered: a number that no other dimension has."""


def needed_bytes(vllm_config: Any, kv_cache_config: Any, hit: int) -> int:
    """What a hit of so many tokens needs: all that is distinct, and that is read by what follows."""
    tp, heads = vllm_config.parallel_config.tensor_parallel_size, vllm_config.model_config.get_total_num_kv_heads()
    groups = [kv_cache_config.kv_cache_groups[index] for index in kv_cache_config.prefix_cacheable_group_ids]
    return round(sum(_needed_of_layer(layer, hit, tp, heads) for group in groups for layer in _layers(group)))


def _layers(group: Any) -> Iterable[Any]:
    """The spec of each layer."""
    by_name = getattr(group.kv_cache_spec, "kv_cache_specs", {})
    return [by_name.get(name, group.kv_cache_spec) for name in group.layer_names]


def _needed_of_layer(spec: Any, hit: int, tp: int, heads: int) -> float:
    from vllm.v1 import kv_cache_interface as kv

    if isinstance(spec, kv.MambaSpec):
        return float(tp * spec.state_content_size_bytes)
    tokens = hit
    if isinstance(spec, kv.SlidingWindowSpec):
        tokens = min(hit, spec.sliding_window - 1)
    elif isinstance(spec, kv.ChunkedLocalAttentionSpec):
        tokens = hit % spec.attention_chunk_size
    is_latent = isinstance(spec, (kv.MLAAttentionSpec, kv.SlidingWindowMLASpec))
    ranks = 1.0 if is_latent else heads / spec.num_kv_heads
    return float(tokens * spec.unpadded_page_size_bytes / spec.block_size * ranks)


def shards_of(vllm_config: Any, kv_cache_config: Any) -> dict[int, list[int]]:
    """By group: the bytes of each shard of a block that some rank stores, as the ranks register their memory."""
    import torch
    from vllm.distributed import parallel_state
    from vllm.v1.core.kv_cache_config_builder import get_kv_cache_config_builder
    from vllm.v1.worker.utils import allocate_kv_cache

    from kvsidecar.integrations.vllm import memory, ranks
    from kvsidecar.integrations.vllm.groups import groups_of

    groups = groups_of(kv_cache_config, vllm_config)
    with mock.patch.object(vllm_config.cache_config, "num_gpu_blocks_override", EXPORTED_BLOCKS):
        small: Any = get_kv_cache_config_builder(vllm_config).get_kv_cache_config_from_groups(
            vllm_config, kv_cache_config.kv_cache_groups, EXPORTED_BLOCKS
        )
    small.kv_tp_replicas = kv_cache_config.kv_tp_replicas
    layout = vllm_config.cache_config.get_resolved_kv_cache_layout()
    with memory.SharedKVMemory():
        caches = allocate_kv_cache(small, torch.device("cpu"), layout)
    views = memory.views_of(caches, small, groups)
    found: dict[int, dict[int, int]] = {}
    tp, group_of_ranks = vllm_config.parallel_config.tensor_parallel_size, parallel_state.get_tp_group()
    for rank in range(tp):
        with mock.patch.multiple(group_of_ranks, rank_in_group=rank, world_size=tp):
            place, _ = ranks.place_of(vllm_config, groups, ())
        for each in memory.export(views, EXPORTED_BLOCKS, place).groups:
            if place.stores(each.group):
                found.setdefault(each.group, {})[each.shard] = each.shard_bytes
    return {group: list(shards.values()) for group, shards in found.items()}


def slot_bytes(shard_bytes: int) -> float:
    """What a shard takes of the pool: its slot, and its part of the end of a slab that is too short for one."""
    shape = POOL.shape(size_class(shard_bytes))
    slab = shape.units * POOL.unit
    return slab / (slab // shape.size)


def rows(models: Sequence[str], sizes: Sequence[int], tokens: int) -> Iterator[Row]:
    h200.stand_in()
    from benchmarks.vllm import stored_blocks

    with tempfile.TemporaryDirectory() as directory:
        planner = h200.H200Planner(directory)
        for model in models:
            for tp in sizes:

                def planned(transfer: Any, model: str = model, tp: int = tp) -> tuple[Any, Any]:
                    return planner.planned(published(model), tp, tokens + 1, transfer)

                ours = planned(stored_blocks.OURS)
                stored, shards = stored_blocks.stored_by_us(*ours, tokens), shards_of(*ours)
                yield Row(
                    model,
                    tp,
                    tokens=stored.hit,
                    needed=needed_bytes(*ours, stored.hit),
                    loaded=sum(count * sum(shards[group]) for group, count in stored.loaded.items()),
                    pool=round(
                        sum(count * sum(map(slot_bytes, shards[group])) for group, count in stored.blocks.items())
                    ),
                    simple=stored_blocks.held_by_simple(*planned(stored_blocks.SIMPLE), tokens),
                    offloading=stored_blocks.held_by_offloading(*planned(stored_blocks.OFFLOADING), tokens),
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"default: all ({', '.join(CONFIGS)})")
    parser.add_argument("--tp", default=",".join(map(str, TP)), help="tensor-parallel sizes")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of the prompt")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the rows")
    parser.add_argument("--markdown", action="store_true", help="print the table as it is in docs/sizing.md")
    options = parser.parse_args()
    if unknown := set(options.models) - set(CONFIGS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    found = []
    for row in rows(options.models or list(CONFIGS), [int(each) for each in options.tp.split(",")], options.tokens):
        print(*row.cells, file=sys.stderr, flush=True)
        found.append(row)
    if options.json:
        from vllm import __version__

        Found(__version__.partition("+")[0], options.tokens, tuple(found)).write(options.json)
    if options.markdown:
        print(markdown(found))
        return
    table = Table(*COLUMNS, title="KiB for each token, and how many times what a hit needs")
    for row in found:
        table.add_row(*row.cells)
    Console().print(table)


if __name__ == "__main__":
    main()
