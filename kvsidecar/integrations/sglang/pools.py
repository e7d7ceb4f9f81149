"""Converts SGLang's pools to views of pages; makes CPU pools shareable; reads their slots after the forward.

Plain pools (MHA, MLA, a sliding window, MHA with Mamba), for which SGLang has no ready-made views, are read here; all
others through SGLang's own views for linkers. Other kinds are refused: a guess could copy wrong KV.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvsidecar.client import GroupLayout
from kvsidecar.client.torch import TorchExporter, shared_empty
from kvsidecar.errors import NotExportable
from kvsidecar.integrations.rank_memory import RankMemory
from kvsidecar.integrations.sglang.groups import KV, MAMBA, SWA, Groups


@dataclass(frozen=True, slots=True)
class PagePool:
    """The pages of one component of SGLang's tree."""

    name: str
    layers: Mapping[int, tuple[torch.Tensor, ...]]
    """Tensors ``[pages, ...]`` that hold all bytes of a layer, by layer of the pipeline stage."""
    replicated: bool
    heads: int = 0
    """KV heads of this rank; 0: unknown, or this is no attention with heads."""

    @property
    def num_pages(self) -> int:
        """Pages that every tensor has."""
        return min(len(tensor) for tensors in self.layers.values() for tensor in tensors)


def pools_of(kvcache: Any, params: Any, page_size: int, components: set[Any]) -> tuple[list[PagePool], int]:
    """The pools, and the number of layers that SGLang waits for.

    Args:
        params: SGLang's ``CacheInitParams``.
        components: the components of the tree.

    Raises:
        NotExportable: a pool of this kind cannot be offloaded; the text says why.
    """
    kind = type(kvcache).__name__
    if kind in ("MHATokenToKVPool", "MLATokenToKVPool"):
        pools = [_pool(KV, kvcache, page_size, _own_layers(kvcache))]
    elif kind == "SWAKVPool" and "MAMBA" not in {each.name for each in components}:
        from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import _swa_layer_mappings

        full, window = _swa_layer_mappings(kvcache)
        pools = [
            _pool(KV, kvcache.full_kv_pool, page_size, full),
            _pool(SWA, kvcache.swa_kv_pool, page_size, window),
        ]
    elif kind == "HybridLinearKVPool" and type(kvcache.full_kv_pool).__name__ == "MHATokenToKVPool":
        from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import _stage_local_layer_mapping

        mapping = _stage_local_layer_mapping(kvcache.full_attention_layer_id_mapping, kvcache.start_layer)
        pools = [_pool(KV, kvcache.full_kv_pool, page_size, mapping), _states(kvcache, params)]
    else:
        return _ready_made(kvcache, params, page_size, components)
    pools[0] = _with_drafts(pools[0], params, page_size)
    return pools, 1 + max(layer for pool in pools for layer in pool.layers)


def _pool(name: str, pool: Any, page_size: int, mapping: Mapping[int, int]) -> PagePool:
    heads = 0 if _is_mla(pool) else int(getattr(pool, "head_num", 0))
    return PagePool(name, _attention(pool, page_size, mapping), _is_mla(pool), heads)


def _own_layers(pool: Any) -> dict[int, int]:
    return {layer: layer for layer in range(pool.layer_num)}


def _is_mla(pool: Any) -> bool:
    return type(pool).__name__ == "MLATokenToKVPool"


def _attention(pool: Any, page_size: int, mapping: Mapping[int, int]) -> dict[int, tuple[torch.Tensor, ...]]:
    """The pages of a plain pool, by SGLang's layer.

    Args:
        mapping: each layer's index in the pool.
    """
    kind = type(pool).__name__
    if kind == "MHATokenToKVPool":
        layout = getattr(pool, "kv_cache_layout", "nhd")
        if layout not in ("nhd", "hnd"):
            raise NotExportable(f"the KV cache has the layout {layout}, which is not supported: nhd and hnd are")
        scales = ("k_scale_buffer", "v_scale_buffer", "native_k_scale_buffer", "native_v_scale_buffer")
        if any(getattr(pool, name, None) is not None for name in scales):
            raise NotExportable("a KV cache with separate scales is not supported: choose another --kv-cache-dtype")
        rows = 1 if layout == "hnd" else page_size
        buffers: list[tuple[torch.Tensor, ...]] = list(zip(pool.k_buffer, pool.v_buffer, strict=True))
    elif kind == "MLATokenToKVPool":
        if getattr(pool, "kv_scale_buffer", None) is not None or getattr(pool, "layer_shard_enabled", False):
            raise NotExportable("an MLA cache with scales beside it, or split by layers over ranks, is not supported")
        rows = page_size
        buffers = [(each,) for each in pool.kv_buffer]
    else:
        raise NotExportable(f"a KV cache of the kind {kind} is not supported")
    return {layer: tuple(by_page(each, rows) for each in buffers[index]) for layer, index in mapping.items()}


def by_page(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """A tensor of rows as ``[pages, ...]``, without the rows of an incomplete page at the end."""
    if rows == 1:
        return tensor
    return tensor[: len(tensor) // rows * rows].unflatten(0, (-1, rows))


def _states(kvcache: Any, params: Any) -> PagePool:
    """The states of Mamba layers; SGLang's own view refuses the kinds that need more than these."""
    from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import _mamba_device_pool_entry

    try:
        entry = _mamba_device_pool_entry(params.req_to_token_pool, kvcache.start_layer)
    except ValueError as error:
        raise NotExportable(str(error)) from error
    return PagePool(MAMBA, _entry_layers(entry), False)


def _entry_layers(entry: Any) -> dict[int, tuple[torch.Tensor, ...]]:
    """The pages of one of SGLang's ready-made views, by layer.

    A layer maps to one or more indices. With several components each has a buffer at these; a pool of K and V has both
    in one component, and maps a layer to two indices.
    """
    rows = entry._row_span
    found: dict[int, tuple[torch.Tensor, ...]] = {}
    for layer, mapped in entry.layer_mapping.items():
        indices = [mapped] if isinstance(mapped, int) else list(mapped)
        found[layer] = tuple(by_page(buffers[i], rows) for buffers in entry.components for i in indices)
    return found


def _ready_made(kvcache: Any, params: Any, page_size: int, components: set[Any]) -> tuple[list[PagePool], int]:
    from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import resolve_hybrid_device_pool_group

    try:
        group = resolve_hybrid_device_pool_group(
            kvcache=kvcache, page_size=page_size, params=params, components=components
        )
    except (ValueError, AssertionError) as error:
        raise NotExportable(f"a KV cache of the kind {type(kvcache).__name__} is not supported: {error}") from error
    layers: dict[str, dict[int, tuple[torch.Tensor, ...]]] = {}
    for entry in group.entries:
        if entry._index_mapper is not None:
            raise NotExportable(f"the pool {entry.name} has page numbers of its own, which is not supported")
        mine = layers.setdefault(entry.indices_from_pool.value, {})
        for layer, tensors in _entry_layers(entry).items():
            mine[layer] = (*mine.get(layer, ()), *tensors)
    pools = [PagePool(name, each, group.rank_replicated and name != MAMBA) for name, each in layers.items()]
    return pools, group.num_layers


def _with_drafts(full: PagePool, params: Any, page_size: int) -> PagePool:
    """Add the draft models' KV to the target's last layer. It has the same pages, and is read after the target's
    forward."""
    last = max(full.layers)
    layers = dict(full.layers)
    for draft in (*params.sidecar_draft_device_pools, *params.mtp_draft_device_pools):
        if full.replicated and not _is_mla(draft):
            raise NotExportable(
                "a draft model's KV is split over ranks and the target model's is not, which is not supported"
            )
        for tensors in _attention(draft, page_size, _own_layers(draft)).values():
            layers[last] = (*layers[last], *tensors)
    # After this it is unknown which of the layers are the draft's, with heads of its own.
    return replace(full, layers=layers, heads=full.heads if layers == full.layers else 0)


def facts_of(pools: Sequence[PagePool]) -> list[str]:
    """What determines the bytes of a page: types, shapes and order in memory."""
    return sorted(
        {
            f"{pool.name} {tensor.dtype} {tuple(tensor.shape[1:])} "
            f"{sorted(range(1, tensor.dim()), key=lambda dim: (-tensor.stride(dim), dim))}"
            for pool in pools
            for tensors in pool.layers.values()
            for tensor in tensors
        }
    )


def export(pools: Sequence[PagePool], groups: Groups, rank: int, size: int) -> RankMemory:
    """The memory of one rank.

    Args:
        rank, size: this rank among the tensor-parallel ranks that split a page, and their number.

    Raises:
        NotExportable: the memory cannot be shared.
    """
    exporter = TorchExporter()
    by_name = {pool.name: pool for pool in pools}
    layouts = []
    for group in groups.all:
        pool = by_name[group.pool]
        shard, shards = group.shard(rank, size)
        slices = []
        for layers in group.slices.values():
            tensors = [tensor[: pool.num_pages] for layer in layers for tensor in pool.layers[layer]]
            try:
                slices.append(exporter.regions(tensors))
            except NotExportable as error:
                if tensors[0].is_cuda:
                    raise NotExportable(f"{error} (SGLang: start it without --enable-memory-saver)") from error
                raise
        regions = tuple(region for each in slices for region in each)
        cuts = tuple(map(len, slices)) if len(slices) > 1 else ()
        layouts.append(GroupLayout(group.index, pool.num_pages, shard, shards, regions, cuts))
    return RankMemory(exporter.kv_buffers(), tuple(layouts))


def share_on_cpu(kvcache: Any, params: Any) -> None:
    """Move the tensors of plain pools on the CPU to memory that the daemon can map. Before the first forward: tensors
    made of these before keep the old memory."""
    tensors: list[torch.Tensor] = []
    for pool in (kvcache, getattr(kvcache, "full_kv_pool", None), getattr(kvcache, "swa_kv_pool", None)):
        for name in ("k_buffer", "v_buffer", "kv_buffer"):
            tensors += getattr(pool, name, None) or ()
    states = getattr(getattr(params.req_to_token_pool, "mamba_pool", None), "mamba_cache", None)
    if states is not None:
        tensors += (states.temporal, *states.conv)
    for tensor in tensors:
        if tensor.device.type == "cpu" and tensor.numel():
            shared = shared_empty(tensor.shape, tensor.dtype)
            shared.copy_(tensor)
            tensor.set_(shared)


class SlotReader:
    """Copies slots from the GPU to the host without waiting: SGLang's stream is queued after the running forward, so
    ``.cpu()`` would keep the scheduler from preparing the next one meanwhile.

    A copy runs after all earlier work of two streams: the current one, on which SGLang has chosen the pages, and the
    forward stream, which may still write them. So a job that is sent once the copy has arrived is in order with the
    kernels.

    Args:
        forward_stream: None if the current stream is the only one that writes KV.
    """

    def __init__(self, device: torch.device, forward_stream: Any) -> None:
        self._device, self._forward, self._stream = device, forward_stream, torch.cuda.Stream(device)

    def read(self, slots: torch.Tensor) -> SlotsOnTheirWay:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        if self._forward is not None:
            self._stream.wait_stream(self._forward)
        with torch.cuda.stream(self._stream):
            host = torch.empty(slots.shape, dtype=torch.int64, pin_memory=True)
            host.copy_(slots.contiguous(), non_blocking=True)
            return SlotsOnTheirWay(slots, host, self._stream.record_event())


@dataclass(frozen=True, slots=True)
class SlotsOnTheirWay:
    """Implements `transfers.Slots`."""

    source: torch.Tensor
    """The tensor that is copied. Referenced until then: its allocator does not know the stream that reads it."""
    host: torch.Tensor
    event: torch.cuda.Event

    def arrived(self) -> bool:
        return bool(self.event.query())

    def take(self) -> npt.NDArray[np.int64]:
        self.event.synchronize()
        return np.asarray(self.host)
