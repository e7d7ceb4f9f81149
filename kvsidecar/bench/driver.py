"""The part of the CUDA driver that the benchmark uses, through ctypes: streams, pinned memory, asynchronous copies.

`kvsidecar.support.cuda_driver` has the calls; this is what it takes to time them. Every call is checked.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any, Final

from kvsidecar.bench.errors import CudaFailed
from kvsidecar.errors import DriverUnusable
from kvsidecar.support import cuda_driver

_STREAM_NON_BLOCKING: Final = 1
"""CU_STREAM_NON_BLOCKING: no order with the default stream."""


class Cuda(cuda_driver.CudaContext):
    """The primary context of one visible GPU. Its methods may be called from any thread."""

    failure = CudaFailed

    def __init__(self, ordinal: int = 0) -> None:
        if cuda_driver.device_count() == 0:
            raise DriverUnusable("the CUDA driver sees no GPU")
        super().__init__(ordinal)
        self._bound = threading.local()

    def bind(self) -> None:
        """Make the context current in this thread; a thread that has not used CUDA has none."""
        if not getattr(self._bound, "done", False):
            self._call("cuCtxSetCurrent", self._context)
            self._bound.done = True

    def call(self, name: str, *arguments: Any) -> None:
        """Call the driver in this context. Raises CudaFailed."""
        self.bind()
        self._call(name, *arguments)


class Stream:
    """A stream of the GPU."""

    def __init__(self, cuda: Cuda) -> None:
        self._call = cuda.call
        self._handle = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(self._handle), _STREAM_NON_BLOCKING)

    def to_host(self, host: int, device: int, nbytes: int) -> None:
        self._call("cuMemcpyDtoHAsync_v2", host, device, nbytes, self._handle)

    def to_device(self, device: int, host: int, nbytes: int) -> None:
        self._call("cuMemcpyHtoDAsync_v2", device, host, nbytes, self._handle)

    def on_device(self, target: int, source: int, nbytes: int) -> None:
        self._call("cuMemcpyDtoDAsync_v2", target, source, nbytes, self._handle)

    def fill(self, device: int, value: int, nbytes: int) -> None:
        self._call("cuMemsetD8Async", device, value, nbytes, self._handle)

    def synchronize(self) -> None:
        self._call("cuStreamSynchronize", self._handle)

    def close(self) -> None:
        self._call("cuStreamDestroy_v2", self._handle)


class Pinned:
    """Page-locked host memory of this process."""

    def __init__(self, cuda: Cuda, nbytes: int) -> None:
        self._call = cuda.call
        self._pointer = ctypes.c_void_p()
        self._call("cuMemHostAlloc", ctypes.byref(self._pointer), nbytes, 0)
        assert self._pointer.value is not None
        self.address: int = self._pointer.value

    def close(self) -> None:
        self._call("cuMemFreeHost", self._pointer)
