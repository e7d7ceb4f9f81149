"""Memory laid out by vLLM's own code, in every layout that it has: a slot is the whole block, and no other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")
pytest.importorskip("vllm.v1.kv_cache_layout", reason="this vLLM has a storage per layer")

import torch
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from kvsidecar.client import GroupLayout, HostBuffer
from kvsidecar.integrations.vllm import memory
from kvsidecar.integrations.vllm.groups import Group, GroupKind
from kvsidecar.integrations.vllm.ranks import Place

BLOCKS, LAYERS = 5, ("a", "b", "c")
FULL = kv.FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float16)
MLA = kv.MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=72, dtype=torch.bfloat16)
WINDOW = kv.SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float16, sliding_window=32)


def configured(layout: KVCacheLayout, *specs: Any) -> kv.KVCacheConfig:
    """Groups of three layers, that overlay each other."""
    tensors, groups = [], []
    for index, spec in enumerate(specs):
        names = [f"{layer}{index}" for layer in LAYERS]
        strides = kv.compute_layout_strides(spec, BLOCKS, len(names), layout)
        size = BLOCKS * len(names) * max(each.page_size_bytes for each in specs)
        tensors.append(kv.KVCacheTensor(size=size, layers=names, layer_stride=strides[0], block_stride=strides[1]))
        groups.append(kv.KVCacheGroupSpec(names, spec))
    return kv.KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=tensors, kv_cache_groups=groups)


def shared(config: kv.KVCacheConfig, layout: KVCacheLayout, kernel: list[int] | None) -> dict[str, torch.Tensor]:
    with memory.SharedKVMemory():
        caches: dict[str, torch.Tensor] = allocate_kv_cache(config, torch.device("cpu"), layout, kernel)
    return caches


def copy_slot(layout: GroupLayout, data: np.ndarray[Any, Any], source: int, target: int) -> int:
    """As a store and a load do. Returns the slot's bytes."""
    slot = []
    for region in layout.regions:
        for row in range(region.num_rows):
            start = region.offset + row * region.row_stride
            slot.append(data[start + source * region.block_stride :][: region.row_bytes].copy())
            data[start + target * region.block_stride :][: region.row_bytes] = slot[-1]
    return sum(len(each) for each in slot)


@pytest.mark.parametrize("spec", [FULL, MLA, WINDOW], ids=["full", "mla", "window"])
@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
@pytest.mark.parametrize("ratio", [1, 2])
def test_a_slot_is_the_block_of_every_layer(layout: KVCacheLayout, spec: Any, ratio: int) -> None:
    config = configured(layout, spec)
    try:
        caches = shared(config, layout, [spec.block_size // ratio])
    except ValueError as error:
        assert ratio > 1  # vLLM itself: blocks that are not dense are not split
        pytest.skip(str(error))
    check(config, caches)


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
def test_groups_that_overlay_each_other_each_have_their_blocks(layout: KVCacheLayout) -> None:
    config = configured(layout, FULL, WINDOW)
    check(config, shared(config, layout, None))


def check(config: kv.KVCacheConfig, caches: dict[str, torch.Tensor]) -> None:
    groups = [
        Group(i, GroupKind.FULL, tuple(each.layer_names), 16, 16, 16) for i, each in enumerate(config.kv_cache_groups)
    ]
    rank = memory.export(memory.views_of(caches, config, groups), BLOCKS, Place())
    assert len(rank.buffers.allocations) == 1
    buffer = HostBuffer.holding(next(iter(caches.values())).untyped_storage().data_ptr())
    assert buffer is not None
    data = np.frombuffer(buffer.memory, np.uint8)
    for group, layout in zip(groups, rank.groups, strict=True):
        data[:] = np.random.default_rng(1).integers(0, 256, data.size, np.uint8)
        spec = config.kv_cache_groups[group.index].kv_cache_spec
        before = {name: blocks_of(caches[name]).clone() for name in group.layer_names}
        assert copy_slot(layout, data, 3, 1) == layout.shard_bytes == len(LAYERS) * spec.page_size_bytes
        for name, was in before.items():
            now = blocks_of(caches[name])
            assert torch.equal(now[1], was[3])
            assert torch.equal(now[[0, 2, 3, 4]], was[[0, 2, 3, 4]])


def blocks_of(cache: torch.Tensor) -> torch.Tensor:
    """The manager's blocks first, as integers: the content is random."""
    return cache.view(torch.int16).unflatten(0, (BLOCKS, -1))


@pytest.mark.parametrize("layout", [each for each in KVCacheLayout if each.is_block_outermost], ids=lambda x: x.name)
def test_blocks_outermost_are_one_copy_each(layout: KVCacheLayout) -> None:
    config = configured(layout, FULL)
    found = memory.views_of(shared(config, layout, None), config, [GROUP])
    (region,) = memory.export(found, BLOCKS, Place()).groups[0].regions
    assert (region.num_rows, region.row_bytes) == (1, len(LAYERS) * FULL.page_size_bytes)


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
@pytest.mark.parametrize("chunks", [2, 3, 99])
def test_chunks_of_layers_leave_a_slot_as_it_is(layout: KVCacheLayout, chunks: int) -> None:
    config = configured(layout, FULL)
    caches = shared(config, layout, None)
    found = memory.views_of(caches, config, [GROUP])
    (whole,), (cut,) = (memory.export(found, BLOCKS, Place(), count).groups for count in (1, chunks))
    together = layout.is_block_outermost and layout.name.index("L") > layout.name.index("H")
    assert len(cut.slices) == (0 if together else min(chunks, len(LAYERS)))
    buffer = HostBuffer.holding(next(iter(caches.values())).untyped_storage().data_ptr())
    assert buffer is not None
    data = np.frombuffer(buffer.memory, np.uint8)
    data[:] = np.random.default_rng(1).integers(0, 256, data.size, np.uint8)
    assert slot_of(cut, data, 3) == slot_of(whole, data, 3)
    of_layers = found[0].layer_chunks(chunks)
    assert (of_layers.count, of_layers.of.keys()) == (max(1, len(cut.slices)), set(GROUP.layer_names))
    first = 0
    for number, size in enumerate(cut.slices):
        names = [name for name, chunk in of_layers.of.items() if chunk == number]
        part = replace(cut, regions=cut.regions[first : first + size], slices=())
        first += size
        before = {name: blocks_of(caches[name]).clone() for name in GROUP.layer_names}
        copy_slot(part, data, 3, 1)
        changed = [name for name, was in before.items() if not torch.equal(blocks_of(caches[name])[1], was[1])]
        assert changed == names, "a chunk has the bytes of its layers, and of no other"


def slot_of(layout: GroupLayout, data: np.ndarray[Any, Any], block: int) -> bytes:
    return b"".join(
        data[region.offset + row * region.row_stride + block * region.block_stride :][: region.row_bytes].tobytes()
        for region in layout.regions
        for row in range(region.num_rows)
    )


def test_layouts_of_other_orders_within_a_block_have_other_facts() -> None:
    facts = {}
    for layout in KVCacheLayout:
        config = configured(layout, FULL)
        facts[layout.name] = str(memory.facts_of(memory.views_of(shared(config, layout, None), config, [GROUP]), {}))
    assert facts["LBHNC"] == facts["LHBNC"]
    assert len(set(facts.values())) == 5


def test_a_state_is_a_page() -> None:
    spec = kv.MambaSpec(block_size=16, shapes=((4, 8), (2, 6)), dtypes=(torch.float32, torch.float16))
    config = configured(KVCacheLayout.LBHNC, spec)
    caches = shared(config, KVCacheLayout.LBHNC, None)
    found = memory.views_of(caches, config, [GROUP])
    assert sum(each.shard_bytes for each in memory.export(found, BLOCKS, Place()).groups) == 3 * (128 + 24)


GROUP = Group(0, GroupKind.FULL, tuple(f"{layer}0" for layer in LAYERS), 16, 16, 16)
