"""Converts KV caches of torch tensors to allocations and regions. Needs the engine's torch.

In an engine:

    exporter = TorchExporter()
    regions = exporter.regions(layer_tensors)           # [num_blocks, ...] each
    groups = [GroupLayout(group=0, num_blocks=n, shard=rank, num_shards=tp_size, regions=regions)]
    client.attach(buffers=exporter.kv_buffers(), groups=groups, events=TorchEventRing(), ...)
    client.store(blocks, after=DEVICE)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kvsidecar.client.buffers import Allocation, HostBuffer, KVBuffers, PhysicalRange
from kvsidecar.client.regions import StridedView, regions_of
from kvsidecar.errors import NotExportable
from kvsidecar.support import cuda_driver
from kvsidecar.types import MAX_DESCRIPTORS, Region


def shared_empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A CPU tensor of zeros that the daemon can map. Ordinary CPU memory belongs to one process and cannot be shared.

    The memory lives as long as the process.
    """
    buffer = HostBuffer(math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(buffer.memory, dtype=dtype).view(*shape)


class TorchExporter:
    """Collects the tensors of one rank. An allocation is exported once, however many tensors it holds."""

    def __init__(self) -> None:
        self._device: str | None = None
        self._allocations: list[Allocation] = []
        self._bases: list[int] = []

    def regions(self, tensors: Sequence[torch.Tensor], *, block_dim: int = 0) -> tuple[Region, ...]:
        """The regions of one KV cache group.

        Args:
            tensors: one per layer, in the order of the layers; views, interior pointers and gaps are fine.
            block_dim: the dimension that counts blocks, the same for all.

        Raises:
            NotExportable: the memory cannot be shared, or is on another device than that of earlier tensors.
        """
        return regions_of([self._view(tensor, block_dim) for tensor in tensors])

    def kv_buffers(self) -> KVBuffers:
        """All allocations of the tensors that were passed to `regions`.

        Raises:
            NotExportable: there are none, or they have more descriptors than one rank may share.
        """
        if self._device is None:
            raise NotExportable("no tensor was exported: call regions() first")
        if (count := sum(len(each.descriptors) for each in self._allocations)) > MAX_DESCRIPTORS:
            raise NotExportable(
                f"the KV cache lies in {count} ranges of physical memory, and a rank may share {MAX_DESCRIPTORS}: "
                "allocate it with cudaMalloc (expandable_segments:False in PYTORCH_CUDA_ALLOC_CONF), or with an "
                "allocator whose ranges are larger than torch's 20 MiB, such as vLLM's cumem"
            )
        return KVBuffers(self._device, tuple(self._allocations))

    def _view(self, tensor: torch.Tensor, block_dim: int) -> StridedView:
        if not -tensor.dim() <= block_dim < tensor.dim():
            raise NotExportable(f"block_dim {block_dim} is not a dimension of a tensor of shape {tuple(tensor.shape)}")
        if tensor.numel() == 0:
            raise NotExportable(f"a tensor of shape {tuple(tensor.shape)} is empty")
        allocation = self._allocation(tensor)
        base = self._bases[allocation]
        itemsize = tensor.element_size()
        return StridedView(
            allocation=allocation,
            offset=tensor.data_ptr() - base,
            shape=tuple(tensor.shape),
            strides=tuple(stride * itemsize for stride in tensor.stride()),
            itemsize=itemsize,
            block_dim=block_dim % tensor.dim(),
        )

    def _allocation(self, tensor: torch.Tensor) -> int:
        """Index of a tensor's allocation."""
        pointer, end = tensor.data_ptr(), tensor.data_ptr() + _extent(tensor)
        for index, base in enumerate(self._bases):
            if base <= pointer and end <= base + self._allocations[index].size:
                return index
        if tensor.is_cuda:
            device = cuda_driver.pointer_uuid(pointer)
            if not cuda_driver.is_legacy_ipc_capable(pointer):
                return self._physical(device, cuda_driver.physical_ranges(pointer, end - pointer))
            base, size = cuda_driver.address_range(pointer)
            allocation = Allocation(size, cuda_ipc_handle=cuda_driver.ipc_handle(base))
        else:
            buffer = HostBuffer.holding(pointer)
            if buffer is None:
                raise NotExportable(
                    "a CPU tensor is in this process's private memory: allocate it with "
                    "kvsidecar.client.torch.shared_empty"
                )
            device, base = "host", buffer.address
            allocation = Allocation(buffer.nbytes, fd=buffer.fd)
        return self._add(device, base, allocation)

    def _physical(self, device: str, ranges: Sequence[tuple[int, int]]) -> int:
        """Index of an allocation with these ranges, which may extend an existing one.

        With torch's expandable segments a tensor begins in the range in which the one before it ends: both are in one
        allocation then, and layers at a constant distance stay rows of one region.
        """
        base, found = ranges[0][0], [PhysicalRange(size, address=address) for address, size in ranges]
        for index, allocation in enumerate(self._allocations):
            if allocation.ranges and self._bases[index] <= base <= self._bases[index] + allocation.size:
                found = [*allocation.ranges, *(each for each in found if each not in allocation.ranges)]
                break
        else:
            index = self._add(device, base, Allocation(0))
        self._allocations[index] = Allocation(sum(each.size for each in found), ranges=tuple(found))
        return index

    def _add(self, device: str, base: int, allocation: Allocation) -> int:
        if self._device not in (None, device):
            raise NotExportable(f"the tensors of one rank are on two devices, {self._device} and {device}")
        self._device = device
        self._allocations.append(allocation)
        self._bases.append(base)
        return len(self._bases) - 1


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last one."""
    reach: int = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * int(tensor.element_size())


class TorchEventRing:
    """Interprocess events of one GPU, for stores with ``after=DEVICE``. Implements `kvsidecar.client.EventRing`.

    To open them, the daemon must share the engine's ``/dev/shm`` and user: the driver keeps their state in files there.
    Otherwise stores wait on the host (`Client.device_order_refused`).

    Args:
        size: number of events: of stores that may wait on the device. More stores wait on the host.
        device: the KV cache's device; by default the current one.

    Raises:
        RuntimeError: the driver cannot create or share them.
    """

    def __init__(self, size: int = 64, device: torch.device | int | None = None) -> None:
        # Events live as long as this ring: to wait for a destroyed event is undefined.
        with torch.cuda.device(device):
            self._events = [torch.cuda.Event(enable_timing=False, interprocess=True) for _ in range(size)]
            self.handles = tuple(bytes(event.ipc_handle()) for event in self._events)

    def record(self, index: int) -> None:
        """Record event ``index`` on the current stream of the current device, which must be the ring's."""
        self._events[index].record()

    def mark(self) -> torch.cuda.Event:
        """Record a new event on the current stream, for this process alone."""
        event = torch.cuda.Event(enable_timing=False)
        event.record()
        return event
