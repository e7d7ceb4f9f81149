"""Converts vLLM's KV cache tensors to regions per group; allocates shareable KV memory on the CPU; records CUDA events.

What vLLM registers depends on its version and the attention backend: views of one buffer or a storage per layer, blocks
or layers outermost, K and V in one tensor, in two, or along a dimension, state tensors, raw bytes. For each layer the
blocks are found by shape and strides, and their size is compared with the engine's configuration. Anything else is
refused: a guess could copy wrong KV.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kvsidecar.client.torch import TorchExporter, shared_empty
from kvsidecar.errors import NotExportable
from kvsidecar.integrations.device_order import DeviceOrder
from kvsidecar.integrations.rank_memory import RankMemory
from kvsidecar.integrations.vllm.groups import Group
from kvsidecar.integrations.vllm.ranks import Place
from kvsidecar.integrations.vllm.step_loads import LayerChunks
from kvsidecar.types import GroupLayout

KVCaches = Mapping[str, torch.Tensor | Sequence[torch.Tensor]]
"""The tensor of each layer, or several (K and V, or the states of a Mamba layer)."""


def export(groups: Mapping[int, GroupViews], num_blocks: int, place: Place, chunks: int = 1) -> RankMemory:
    """The memory of one rank.

    Args:
        chunks: number of chunks of layers, which a load may copy one by one; see `GroupViews.chunks`.

    Raises:
        NotExportable: the memory cannot be shared.
    """
    exporter = TorchExporter()
    layouts = []
    for group, found in groups.items():
        shard, num_shards = place.shard(group)
        regions = [exporter.regions(views) for views in found.chunks(chunks)]
        slices = tuple(map(len, regions)) if len(regions) > 1 else ()
        layouts.append(GroupLayout(group, num_blocks, shard, num_shards, tuple(chain(*regions)), slices))
    return RankMemory(exporter.kv_buffers(), tuple(layouts))


@dataclass(frozen=True, slots=True)
class GroupViews:
    """The blocks of one group: views of shape ``[num_blocks, ...]`` that contain each byte of them once."""

    views: tuple[torch.Tensor, ...]
    layers: tuple[torch.Tensor, ...]
    """The bytes of ``views``, by layer. Differs from them if a block is one piece of memory."""
    layer_names: tuple[str, ...]
    """Names of the layers. Each has the same number of ``layers``, unless they differ."""

    @property
    def is_whole(self) -> bool:
        """Whether a block is one piece of memory."""
        return self.views is not self.layers

    def layer_chunks(self, count: int) -> LayerChunks:
        """The chunk of each layer: ``count`` chunks, or one if a chunk's bytes are not together."""
        names = self.layer_names
        count = len(self.chunks(count))
        return LayerChunks({name: at * count // len(names) for at, name in enumerate(names)}, count)

    def chunks(self, count: int) -> list[tuple[torch.Tensor, ...]]:
        """``views`` in ``count`` parts of whole layers, with layers and the bytes of a block in the same order; in
        fewer parts if there are fewer layers, and in one if that is impossible."""
        per_layer, rest = divmod(len(self.layers), len(self.layer_names))
        count = 1 if rest else min(count, len(self.layer_names))
        parts: list[list[torch.Tensor]] = [[] for _ in range(count)]
        for at, view in enumerate(self.layers):
            parts[at // max(1, per_layer) * count // len(self.layer_names)].append(view)
        if count <= 1:
            return [self.views]
        if not self.is_whole:
            return [tuple(part) for part in parts]
        (whole,) = self.views
        ends = [_end_in_block(part, whole) for part in parts]
        starts = [min(view.data_ptr() for view in part) - whole.data_ptr() for part in parts]
        if starts != [0, *ends[:-1]]:
            return [self.views]
        return [(whole[:, start:end],) for start, end in zip(starts, ends, strict=True)]


def views_of(kv_caches: KVCaches, kv_cache_config: Any, groups: Iterable[Group]) -> dict[int, GroupViews]:
    """The views of the groups of which this rank has layers, by group.

    Raises:
        NotExportable: the layout is not supported; the text says why.
    """
    found = {}
    for group in groups:
        if group.layer_names:
            layers = tuple(group_tensors(kv_caches, kv_cache_config, group))
            whole = _whole_blocks(layers)
            found[group.index] = GroupViews(layers if whole is None else (whole,), layers, group.layer_names)
    return found


def _end_in_block(views: Iterable[torch.Tensor], whole: torch.Tensor) -> int:
    """The offset in a block at which the last byte of these views ends."""
    ends: list[int] = []
    for view in views:
        last = sum((n - 1) * view.stride(dim) for dim, n in enumerate(view.shape) if dim)
        ends.append(view.data_ptr() - whole.data_ptr() + (last + 1) * view.element_size())
    return max(ends)


def _whole_blocks(views: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """``[num_blocks, bytes]`` if the views fill every block without a gap (layouts with blocks outermost), else None. A
    block is then one copy, whatever the order of heads and layers in it."""
    base = min(views, key=lambda view: view.data_ptr())
    start, stride = base.data_ptr(), base.stride(0) * base.element_size()
    size = sum(view[0].numel() * view.element_size() for view in views)
    if size != stride or any(view.untyped_storage().data_ptr() != base.untyped_storage().data_ptr() for view in views):
        return None
    covered = torch.zeros(size, dtype=torch.uint8)
    for view in views:
        item, offset = view.element_size(), view.data_ptr() - start
        strides = [view.stride(dim) * item for dim in range(1, view.dim())]
        end = offset + item + sum((n - 1) * step for n, step in zip(view.shape[1:], strides, strict=True))
        if view.stride(0) * item != stride or end > size:
            return None
        covered.as_strided((*view.shape[1:], item), (*strides, 1), offset).add_(1)
    if not bool((covered == 1).all()):
        return None
    raw = torch.empty(0, dtype=torch.int8, device=base.device).set_(base.untyped_storage())
    return raw.as_strided((base.shape[0], size), (stride, 1), start - raw.data_ptr())


def facts_of(groups: Mapping[int, GroupViews], backends: Mapping[int, Iterable[str]]) -> list[str]:
    """What determines the bytes of a shard: the dtypes and layouts of each group's layers, and their backends.

    A shard has the bytes of a view in memory order; the distance between blocks does not matter.
    """
    facts = []
    for group, found in groups.items():
        kinds = set()
        for view in found.layers:
            order = sorted(range(1, view.dim()), key=lambda dim: (-view.stride(dim), dim))
            kinds.add(f"{view.dtype} {[(dim, view.shape[dim]) for dim in order]}")
        if found.is_whole:
            first = min(view.data_ptr() for view in found.layers)
            places = [(view.data_ptr() - first, view.stride()[1:]) for view in found.layers]
            kinds.add(f"whole blocks {places}")
        facts += [f"group {group}: {each}" for each in (*kinds, *backends.get(group, ()))]
    return sorted(facts)


def group_tensors(kv_caches: KVCaches, kv_cache_config: Any, group: Group) -> list[torch.Tensor]:
    """Views of shape ``[num_blocks, ...]`` that together are every byte of the group's blocks.

    Raises:
        NotExportable: a layer is missing, or its tensors contradict the engine's configuration.
    """
    spec = kv_cache_config.kv_cache_groups[group.index].kv_cache_spec
    views: list[torch.Tensor] = []
    for layer in group.layer_names:
        registered = kv_caches.get(layer)
        if registered is None:
            raise NotExportable(f"layer {layer} of KV cache group {group.index} was not registered")
        views += _layer_views(layer, registered, getattr(spec, "kv_cache_specs", {}).get(layer, spec), kv_cache_config)
    return views


def _layer_views(
    layer: str, registered: torch.Tensor | Sequence[torch.Tensor], spec: Any, kv_cache_config: Any
) -> list[torch.Tensor]:
    num_blocks = kv_cache_config.num_blocks
    if isinstance(registered, torch.Tensor):
        if not getattr(spec, "has_layer_views", True) or registered.dim() == 1:
            return [_raw_view(layer, registered, spec, kv_cache_config)]
        registered = [registered]
    views = [_by_block(layer, tensor, num_blocks, spec.block_size) for tensor in registered]
    found = sum(view[0].numel() * view.element_size() for view in views)
    page = spec.page_size_bytes
    # A padded page ends with unused bytes.
    if found > page or (found < page and getattr(spec, "page_size_padded", None) is None):
        raise NotExportable(
            f"layer {layer}: the tensors of shapes {[tuple(tensor.shape) for tensor in registered]} hold {found} bytes "
            f"per block, but its {type(spec).__name__} says {page}"
        )
    return views


def _by_block(layer: str, tensor: torch.Tensor, num_blocks: int, block_size: int) -> torch.Tensor:
    """The tensor with the manager's blocks as its first dimension. They may consist of several kernel blocks."""

    def counts_blocks(dim: int) -> bool:
        parts, rest = divmod(tensor.shape[dim], num_blocks)
        return bool(rest == 0 and parts > 0 and (parts == 1 or block_size % parts == 0))

    dims = [0] if counts_blocks(0) else []
    # K and V outermost: (2, blocks, ...). The strides tell the order in memory.
    if tensor.dim() > 2 and tensor.shape[0] == 2 and counts_blocks(1):
        dims.append(1)
    if len(dims) != 1:
        raise NotExportable(
            f"layer {layer}: a tensor of shape {tuple(tensor.shape)} does not show which of its dimensions counts the "
            f"{num_blocks} blocks"
        )
    return tensor.unflatten(dims[0], (num_blocks, -1)).movedim(dims[0], 0)


def _raw_view(layer: str, buffer: torch.Tensor, spec: Any, kv_cache_config: Any) -> torch.Tensor:
    """A layer's bytes in the engine's raw buffer, at the position in the engine's configuration."""
    page, num_blocks = spec.page_size_bytes, kv_cache_config.num_blocks
    for placed in kv_cache_config.kv_cache_tensors:
        layers = getattr(placed, "layers", None)
        if layers is not None and layer in layers:
            start, stride = placed.offset + layers.index(layer) * placed.layer_stride, placed.block_stride
            break
        if layers is None and layer in placed.shared_by:
            start, stride = placed.offset, placed.block_stride or page
            break
    else:
        raise NotExportable(f"layer {layer}: the engine's configuration does not say where it is in the raw buffer")
    raw = buffer.view(torch.int8)
    end = start + (num_blocks - 1) * stride + page
    if end > raw.numel():
        raise NotExportable(f"layer {layer}: its last block would end at byte {end} of a buffer of {raw.numel()}")
    return torch.as_strided(raw, (num_blocks, page), (stride, 1), raw.storage_offset() + start)


def layers_of_cross_layer(kv_cache: torch.Tensor, backend: Any, kv_cache_config: Any) -> dict[str, torch.Tensor]:
    """Split vLLM 0.26's one tensor of all layers, in which a block is one piece of memory, by layer.

    Args:
        kv_cache: with its dimensions in memory order.
        backend: the attention backend, which defines that order.
    """
    order = backend.get_kv_cache_stride_order(include_num_layers_dimension=True)
    by_layer = kv_cache.permute(*(order.index(dim) for dim in range(len(order))))
    return {
        layer: by_layer[index]
        for index, tensor in enumerate(kv_cache_config.kv_cache_tensors)
        for layer in tensor.shared_by
    }


class SharedKVMemory(TorchFunctionMode):  # type: ignore[misc]
    """While it is active, vLLM's KV cache buffer on the CPU is allocated in memory that the daemon can map.

    vLLM's hook for that memory (`get_mem_pool_context`) expects an allocator, and torch has none for the CPU. So this
    mode replaces the call that allocates it, ``torch.zeros(size, dtype=torch.int8)`` in vLLM's `allocate_kv_cache`.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if (
            func is torch.zeros
            and kwargs.get("dtype") is torch.int8
            and torch.device(kwargs.get("device") or "cpu").type == "cpu"
            and len(args) == 1
        ):
            shape = (args[0],) if isinstance(args[0], int) else tuple(args[0])
            if len(shape) == 1 and shape[0] > 0:
                return shared_empty(shape, torch.int8)
        return func(*args, **kwargs)


def device_order_of(groups: Mapping[int, GroupViews]) -> DeviceOrder | None:
    """The events that order copies; None on the CPU."""
    for found in groups.values():
        device = found.views[0].device
        return DeviceOrder(device) if device.type == "cuda" else None
    return None
