"""The engine's KV memory: on the GPU or on the host, shared with the daemon as an engine shares it."""

from __future__ import annotations

import mmap
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvsidecar.bench.driver import Cuda
from kvsidecar.bench.layouts import Form, Layout
from kvsidecar.client import Allocation, HostBuffer, KVBuffers, PhysicalRange
from kvsidecar.support.units import MiB

PAGE_BYTES = 2 * MiB
"""The largest page of a GPU that the driver gives ordinary allocations."""

Bytes = npt.NDArray[np.uint8]


class EngineMemory(Protocol):
    """The allocations of one rank. The caller writes and reads whole blocks, rows one after another."""

    def kv_buffers(self) -> KVBuffers: ...

    def write(self, block: int, content: Bytes) -> None:
        """Fill a block. The content must not change before `settle`."""

    def read(self, block: int, into: Bytes) -> None:
        """Copy a block, which has arrived after `settle`."""

    def settle(self) -> None:
        """Wait until all writes and reads are complete."""

    def close(self) -> None:
        """Free the memory; the daemon must have unmapped it."""


class HostMemory:
    """A memfd per allocation."""

    def __init__(self, layout: Layout, device: str = "host") -> None:
        self._layout = layout
        self._device = device
        self._physical = layout.form is Form.PHYSICAL
        unit = mmap.PAGESIZE if self._physical else 1
        sizes = [-(-nbytes // unit) * unit for nbytes in layout.allocation_bytes]
        self._buffers = [HostBuffer(nbytes, "kvsidecar-bench") for nbytes in sizes]
        self._arrays: list[Bytes] = [np.frombuffer(buffer.memory, np.uint8) for buffer in self._buffers]
        for array in self._arrays:
            array[::4096] = 0  # no copy may pay for the first touch of a page

    def kv_buffers(self) -> KVBuffers:
        allocations = [_allocation(buffer.nbytes, buffer.fd, self._physical) for buffer in self._buffers]
        return KVBuffers(self._device, tuple(allocations))

    def write(self, block: int, content: Bytes) -> None:
        place = 0
        for allocation, start, nbytes in self._layout.extents(block):
            self._arrays[allocation][start : start + nbytes] = content[place : place + nbytes]
            place += nbytes

    def read(self, block: int, into: Bytes) -> None:
        place = 0
        for allocation, start, nbytes in self._layout.extents(block):
            into[place : place + nbytes] = self._arrays[allocation][start : start + nbytes]
            place += nbytes

    def settle(self) -> None:
        """Do nothing: calls on the host are complete when they return."""

    def close(self) -> None:
        self._arrays.clear()
        for buffer in self._buffers:
            buffer.close()


class CudaMemory:
    """Device allocations: plain ones, exported as CUDA IPC handles, or physical memory.

    They consist of whole pages, as torch allocates: the driver maps others by small pages in the process that imports
    them, and copies of small rows take twice as long (docs/benchmarks.md).
    """

    def __init__(self, cuda: Cuda, layout: Layout) -> None:
        self._cuda = cuda
        self._sizes = [-(-nbytes // PAGE_BYTES) * PAGE_BYTES for nbytes in layout.allocation_bytes]
        self._layout = layout
        self._physical = layout.form is Form.PHYSICAL
        self._stream = cuda.stream()
        self._addresses: list[int] = []
        try:
            for nbytes in self._sizes:
                self._addresses.append(cuda.alloc_ranges([nbytes]) if self._physical else cuda.alloc(nbytes))
                self._stream.fill(self._addresses[-1], 0, nbytes)
            self._stream.synchronize()
        except BaseException:
            self.close()
            raise

    def kv_buffers(self) -> KVBuffers:
        sizes = zip(self._addresses, self._sizes, strict=True)
        allocations = [
            Allocation(nbytes, ranges=(PhysicalRange(nbytes, address=address),))
            if self._physical
            else Allocation(nbytes, cuda_ipc_handle=self._cuda.ipc_handle(address))
            for address, nbytes in sizes
        ]
        return KVBuffers(self._cuda.uuid, tuple(allocations))

    def write(self, block: int, content: Bytes) -> None:
        host = content.ctypes.data
        for allocation, start, nbytes in self._layout.extents(block):
            self._stream.to_device(self._addresses[allocation] + start, host, nbytes)
            host += nbytes

    def read(self, block: int, into: Bytes) -> None:
        host = into.ctypes.data
        for allocation, start, nbytes in self._layout.extents(block):
            self._stream.to_host(host, self._addresses[allocation] + start, nbytes)
            host += nbytes

    def settle(self) -> None:
        self._stream.synchronize()

    def close(self) -> None:
        self._stream.close()
        for address, nbytes in zip(self._addresses, self._sizes, strict=False):  # fewer, if there was no room
            if self._physical:
                self._cuda.free_ranges(address, [nbytes])
            else:
                self._cuda.free(address)


def engine_memory(layout: Layout, cuda: Cuda | None, host: str = "host") -> EngineMemory:
    """Memory of this layout on the GPU, or on this device of the host where there is none."""
    return HostMemory(layout, host) if cuda is None else CudaMemory(cuda, layout)


def _allocation(nbytes: int, fd: int, physical: bool) -> Allocation:
    return Allocation(nbytes, ranges=(PhysicalRange(nbytes, fd=fd),)) if physical else Allocation(nbytes, fd=fd)
