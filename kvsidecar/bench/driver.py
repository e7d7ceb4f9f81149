"""The part of the CUDA driver that the benchmark uses, through ctypes: streams, pinned memory, asynchronous copies.

`kvsidecar.support.cuda_driver` has the calls; this module adds what is needed to time them. Every call is checked. The
context is made current once in each thread that uses it.
"""

from __future__ import annotations

import ctypes
import threading
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from kvsidecar.bench.errors import CudaFailed
from kvsidecar.errors import DriverUnusable
from kvsidecar.support import cuda_driver

_STREAM_NON_BLOCKING: Final = 1
"""CU_STREAM_NON_BLOCKING: no order with the default stream."""

_call = partial(cuda_driver.call, error=CudaFailed)


class Stream:
    """A stream of the GPU. Made by `Cuda.stream`."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._handle = ctypes.c_void_p()
        cuda.bind()
        _call("cuStreamCreate", ctypes.byref(self._handle), _STREAM_NON_BLOCKING)

    def to_host(self, host: int, device: int, nbytes: int) -> None:
        self._cuda.bind()
        _call("cuMemcpyDtoHAsync_v2", host, device, nbytes, self._handle)

    def to_device(self, device: int, host: int, nbytes: int) -> None:
        self._cuda.bind()
        _call("cuMemcpyHtoDAsync_v2", device, host, nbytes, self._handle)

    def on_device(self, target: int, source: int, nbytes: int) -> None:
        self._cuda.bind()
        _call("cuMemcpyDtoDAsync_v2", target, source, nbytes, self._handle)

    def fill(self, device: int, value: int, nbytes: int) -> None:
        self._cuda.bind()
        _call("cuMemsetD8Async", device, value, nbytes, self._handle)

    def synchronize(self) -> None:
        self._cuda.bind()
        _call("cuStreamSynchronize", self._handle)

    def close(self) -> None:
        self._cuda.bind()
        _call("cuStreamDestroy_v2", self._handle)


class Pinned:
    """Page-locked host memory of this process."""

    def __init__(self, cuda: Cuda, nbytes: int) -> None:
        self._cuda = cuda
        self.nbytes = nbytes
        self._pointer = ctypes.c_void_p()
        cuda.bind()
        _call("cuMemHostAlloc", ctypes.byref(self._pointer), nbytes, 0)
        assert self._pointer.value is not None
        self.address: int = self._pointer.value

    def array(self) -> npt.NDArray[np.uint8]:
        """The memory's bytes. Must not be used after `close`."""
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.nbytes).from_address(self.address))

    def close(self) -> None:
        self._cuda.bind()
        _call("cuMemFreeHost", self._pointer)


class Cuda(cuda_driver.CudaContext):
    """The primary context of one visible GPU, with streams. Its methods may be called from any thread."""

    failure = CudaFailed

    def __init__(self, ordinal: int = 0) -> None:
        if cuda_driver.device_count() == 0:
            raise DriverUnusable("the CUDA driver sees no GPU")
        super().__init__(ordinal)
        self._bound = threading.local()

    def bind(self) -> None:
        """Make the context current in this thread; a thread that has not used CUDA has none."""
        if not getattr(self._bound, "done", False):
            _call("cuCtxSetCurrent", self._context)
            self._bound.done = True

    @property
    def name(self) -> str:
        return cuda_driver.device_name(0)

    @property
    def pci_bus_id(self) -> str:
        """The GPU's PCI address in lower case, such as ``0000:18:00.0``."""
        return cuda_driver.device_bus_id(0).lower()

    @property
    def version(self) -> str:
        """The CUDA version of the driver, such as ``13.0``."""
        version = cuda_driver.driver_version()
        return f"{version // 1000}.{version % 1000 // 10}"

    def ipc_handle(self, address: int) -> bytes:
        """The 64 bytes with which the daemon opens the allocation."""
        return cuda_driver.ipc_handle(address)

    def stream(self) -> Stream:
        return Stream(self)

    def pinned(self, nbytes: int) -> Pinned:
        return Pinned(self, nbytes)
