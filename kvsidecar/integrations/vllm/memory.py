"""vLLM's KV cache tensors -> regions per group; KV memory on the CPU platform that can be shared; CUDA's events.

What vLLM registers depends on its version and the attention backend: views of one buffer or a storage per layer, blocks
outermost or layers, K and V in one tensor, in two, or along a dimension of it, state tensors, raw bytes. For each layer
the manager's blocks are found in shape and strides, and compared with the bytes that the engine says a block has.
Whatever does not fit is refused: copied from a guess it would be wrong KV.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kvsidecar.client.torch import TorchEventRing, TorchExporter, shared_empty
from kvsidecar.errors import NotExportable
from kvsidecar.integrations.vllm.groups import Group
from kvsidecar.integrations.vllm.ranks import Place, RankMemory
from kvsidecar.types import GroupLayout

_log = logging.getLogger("kvsidecar.vllm")

KVCaches = Mapping[str, torch.Tensor | Sequence[torch.Tensor]]
"""By layer: a tensor, or several (K and V apart, or the states of a Mamba layer)."""


def export(groups: Mapping[int, GroupViews], num_blocks: int, place: Place) -> RankMemory:
    """The memory of one rank.

    Raises:
        NotExportable: the memory cannot be shared.
    """
    exporter = TorchExporter()
    layouts = []
    for group, found in groups.items():
        shard, num_shards = place.shard(group)
        layouts.append(GroupLayout(group, num_blocks, shard, num_shards, exporter.regions(found.views)))
    return RankMemory(exporter.kv_buffers(), tuple(layouts))


@dataclass(frozen=True, slots=True)
class GroupViews:
    """The blocks of one group: views of shape ``[num_blocks, ...]`` that hold every byte of them once."""

    views: tuple[torch.Tensor, ...]
    layers: tuple[torch.Tensor, ...]
    """The same bytes by layer. Not ``views`` itself where a block is one piece of memory."""


def views_of(kv_caches: KVCaches, kv_cache_config: Any, groups: Iterable[Group]) -> dict[int, GroupViews]:
    """By group of which this rank has layers.

    Raises:
        NotExportable: the layout is not understood; one sentence that says why.
    """
    found = {}
    for group in groups:
        if group.layer_names:
            layers = tuple(group_tensors(kv_caches, kv_cache_config, group))
            whole = _whole_blocks(layers)
            found[group.index] = GroupViews(layers if whole is None else (whole,), layers)
    return found


def _whole_blocks(views: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """``[num_blocks, bytes]`` if the views fill every block without a gap (layouts with blocks outermost), else None.

    Then a block is one copy, in whatever order heads and layers lie in it.
    """
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
    """What the bytes of a shard follow from: of each group the kinds of its layers' views, and what else is known.

    A shard has the bytes of a view in the order in which they lie in memory; where the next block is does not matter.
    """
    facts = []
    for group, found in groups.items():
        kinds = set()
        for view in found.layers:
            order = sorted(range(1, view.dim()), key=lambda dim: (-view.stride(dim), dim))
            kinds.add(f"{view.dtype} {[(dim, view.shape[dim]) for dim in order]}")
        if found.views is not found.layers:
            first = min(view.data_ptr() for view in found.layers)
            places = [(view.data_ptr() - first, view.stride()[1:]) for view in found.layers]
            kinds.add(f"whole blocks {places}")
        facts += [f"group {group}: {each}" for each in (*kinds, *backends.get(group, ()))]
    return sorted(facts)


def group_tensors(kv_caches: KVCaches, kv_cache_config: Any, group: Group) -> list[torch.Tensor]:
    """Views of shape ``[num_blocks, ...]`` that together are every byte of the group's blocks.

    Raises:
        NotExportable: a layer is missing, or its tensors are not what the engine's configuration says.
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
    # A padded page has bytes behind the layer's own that nobody reads.
    if found > page or (found < page and getattr(spec, "page_size_padded", None) is None):
        raise NotExportable(
            f"layer {layer}: the tensors of shapes {[tuple(tensor.shape) for tensor in registered]} hold {found} bytes "
            f"per block, but its {type(spec).__name__} says {page}"
        )
    return views


def _by_block(layer: str, tensor: torch.Tensor, num_blocks: int, block_size: int) -> torch.Tensor:
    """The tensor with the manager's blocks as its first dimension. A kernel's block may be a part of one."""

    def counts_blocks(dim: int) -> bool:
        parts, rest = divmod(tensor.shape[dim], num_blocks)
        return bool(rest == 0 and parts > 0 and (parts == 1 or block_size % parts == 0))

    dims = [0] if counts_blocks(0) else []
    # K and V outermost: (2, blocks, ...). The strides say where they really are.
    if tensor.dim() > 2 and tensor.shape[0] == 2 and counts_blocks(1):
        dims.append(1)
    if len(dims) != 1:
        raise NotExportable(
            f"layer {layer}: a tensor of shape {tuple(tensor.shape)} does not show which of its dimensions counts the "
            f"{num_blocks} blocks"
        )
    return tensor.unflatten(dims[0], (num_blocks, -1)).movedim(dims[0], 0)


def _raw_view(layer: str, buffer: torch.Tensor, spec: Any, kv_cache_config: Any) -> torch.Tensor:
    """The bytes of a layer in the engine's whole buffer, where the configuration places them."""
    for placed in kv_cache_config.kv_cache_tensors:
        layers = getattr(placed, "layers", None)
        if layers is not None and layer in layers:
            start = placed.offset + layers.index(layer) * placed.layer_stride
            return _bytes_of(
                buffer, start, placed.block_stride, kv_cache_config.num_blocks, spec.page_size_bytes, layer
            )
        if layers is None and layer in placed.shared_by:
            stride = placed.block_stride or spec.page_size_bytes
            return _bytes_of(buffer, placed.offset, stride, kv_cache_config.num_blocks, spec.page_size_bytes, layer)
    raise NotExportable(
        f"layer {layer} has a raw buffer, and the engine's configuration does not say where it is there"
    )


def _bytes_of(buffer: torch.Tensor, start: int, stride: int, num_blocks: int, page: int, layer: str) -> torch.Tensor:
    raw = buffer.view(torch.int8)
    end = start + (num_blocks - 1) * stride + page
    if end > raw.numel():
        raise NotExportable(f"layer {layer}: its last block would end at byte {end} of a buffer of {raw.numel()}")
    return torch.as_strided(raw, (num_blocks, page), (stride, 1), raw.storage_offset() + start)


def layers_of_cross_layer(kv_cache: torch.Tensor, backend: Any, kv_cache_config: Any) -> dict[str, torch.Tensor]:
    """By layer, vLLM 0.26's one tensor of all layers, in which a block is one piece of memory.

    Args:
        kv_cache: its dimensions in the order of the memory.
        backend: the attention backend, which knows that order.
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

    vLLM has a hook for the memory of the KV cache (`get_mem_pool_context`), made for CUDA's allocators; torch has none
    on the CPU. The buffer is made by one ``torch.zeros(size, dtype=torch.int8)`` (vLLM's `allocate_kv_cache`).
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


class DeviceOrder:
    """How a CUDA rank orders its copies. A rank on the CPU needs none: its kernels have completed when they return.

    Args:
        device: of the KV cache.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.ring: TorchEventRing | None = None
        """None where the driver cannot share events: stores wait for `mark` on the host."""
        try:
            # Here and not in a thread: while the engine captures a CUDA graph, such calls of another thread spoil it.
            self.ring = TorchEventRing(device=device)
        except RuntimeError as error:
            _log.warning("kvsidecar: stores wait for the GPU on the host, not on the device: %s", error)

    def mark(self) -> torch.cuda.Event:
        """An event behind everything that the engine's current stream was given so far."""
        event = torch.cuda.Event(enable_timing=False)
        event.record(torch.cuda.current_stream(self._device))
        return event


def device_order_of(groups: Mapping[int, GroupViews]) -> DeviceOrder | None:
    """None on the CPU."""
    for found in groups.values():
        device = found.views[0].device
        return DeviceOrder(device) if device.type == "cuda" else None
    return None
