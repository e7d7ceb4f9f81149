"""A little of the CUDA driver API by ctypes: what the copies of this benchmark need, and no package but the driver.

It works in the GPU's primary context, so it can be used beside torch. Source: CUDA Driver API; the batched copies are
asked for in the form that CUDA 12.8 brought, which every later driver keeps.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.shapes import GIB, Direction

_NON_BLOCKING: Final = 1  # CU_STREAM_NON_BLOCKING: not ordered behind the legacy stream, which torch uses
_NO_TIMING: Final = 2  # CU_EVENT_DISABLE_TIMING

_P, _N, _I, _U = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint
_ADDRESS = ctypes.c_uint64
_SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "cuInit": (_U,),
    "cuGetErrorName": (_I, _P),
    "cuDriverGetVersion": (_P,),
    "cuDeviceGet": (_P, _I),
    "cuDeviceGetName": (_P, _I, _I),
    "cuDevicePrimaryCtxRetain": (_P, _I),
    "cuDevicePrimaryCtxRelease_v2": (_I,),
    "cuCtxSetCurrent": (_P,),
    "cuCtxSynchronize": (),
    "cuMemAlloc_v2": (_P, _N),
    "cuMemFree_v2": (_ADDRESS,),
    "cuMemAllocHost_v2": (_P, _N),
    "cuMemFreeHost": (_P,),
    "cuMemsetD8_v2": (_ADDRESS, ctypes.c_ubyte, _N),
    "cuMemcpyHtoD_v2": (_ADDRESS, _P, _N),
    "cuMemcpyDtoH_v2": (_P, _ADDRESS, _N),
    "cuMemcpyHtoDAsync_v2": (_ADDRESS, _P, _N, _P),
    "cuMemcpyDtoHAsync_v2": (_P, _ADDRESS, _N, _P),
    "cuMemcpy2DAsync_v2": (_P, _P),
    "cuStreamCreate": (_P, _U),
    "cuStreamDestroy_v2": (_P,),
    "cuStreamSynchronize": (_P,),
    "cuEventCreate": (_P, _U),
    "cuEventRecord": (_P, _P),
    "cuEventSynchronize": (_P,),
    "cuEventDestroy_v2": (_P,),
    "cuGetProcAddress_v2": (ctypes.c_char_p, _P, _I, ctypes.c_uint64, _P),
}
_BATCH: Final = ctypes.CFUNCTYPE(_I, _P, _P, _P, _N, _P, _P, _N, _P, _P)
_BATCH_3D: Final = ctypes.CFUNCTYPE(_I, _N, _P, _P, ctypes.c_ulonglong, _P)


class CudaError(RuntimeError):
    """The driver refused a call, or there is no driver."""


class Gpu:
    """The primary context of the first visible GPU, one stream, and memory in it. For one thread."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaError(f"no CUDA driver: {error}") from error
        for name, arguments in _SIGNATURES.items():
            try:
                function = getattr(self._library, name)
            except AttributeError as error:
                raise CudaError(f"the CUDA driver has no {name}: 12.8 or newer is needed") from error
            function.argtypes, function.restype = arguments, _I
        self.call("cuInit", 0)
        device, context, stream = ctypes.c_int(), _P(), _P()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device.value)
        self._device = device.value
        self.call("cuCtxSetCurrent", context)
        self.call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
        self._stream = stream
        self._batch = _BATCH(self._entry("cuMemcpyBatchAsync"))
        self._batch_3d = _BATCH_3D(self._entry("cuMemcpy3DBatchAsync"))
        self._zero, self._failed = _N(0), _N(0)

    def call(self, name: str, *arguments: Any) -> None:
        """One call of the driver.

        Raises:
            CudaError: it did not succeed.
        """
        status = getattr(self._library, name)(*arguments)
        if status:
            raise CudaError(f"{name}: {self._error(status)}")

    @property
    def name(self) -> str:
        text = ctypes.create_string_buffer(128)
        self.call("cuDeviceGetName", text, len(text), self._device)
        return text.value.decode()

    @property
    def driver_cuda(self) -> str:
        """The newest CUDA that the driver knows, e.g. ``13.0``."""
        version = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(version))
        return f"{version.value // 1000}.{version.value % 1000 // 10}"

    # -- memory ------------------------------------------------------------------------------------------------------

    def alloc(self, nbytes: int) -> int:
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), nbytes)
        return address.value

    def free(self, address: int) -> None:
        self.call("cuMemFree_v2", address)

    def alloc_host(self, nbytes: int) -> int:
        """Address of pinned host memory."""
        address = _P()
        self.call("cuMemAllocHost_v2", ctypes.byref(address), nbytes)
        if not address.value:
            raise CudaError("cuMemAllocHost_v2 returned no address")
        return address.value

    def free_host(self, address: int) -> None:
        self.call("cuMemFreeHost", address)

    def fill(self, address: int, value: int, nbytes: int) -> None:
        self.call("cuMemsetD8_v2", address, value, nbytes)
        self.call("cuCtxSynchronize")

    def write(self, address: int, data: NDArray[Any]) -> None:
        """Copy a contiguous array to the GPU; returns when it is over."""
        self.call("cuMemcpyHtoD_v2", address, data.ctypes.data, data.nbytes)
        self.call("cuCtxSynchronize")

    def read(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        out = np.empty(nbytes, np.uint8)
        self.call("cuMemcpyDtoH_v2", out.ctypes.data, address, nbytes)
        return out

    # -- copies on the stream ------------------------------------------------------------------------------------------

    def copy(self, direction: Direction, device: int, host: int, nbytes: int) -> None:
        if direction == "store":
            self.call("cuMemcpyDtoHAsync_v2", host, device, nbytes, self._stream)
        else:
            self.call("cuMemcpyHtoDAsync_v2", device, host, nbytes, self._stream)

    def batch(
        self, targets: NDArray[Any], sources: NDArray[Any], sizes: NDArray[Any], attributes: NDArray[Any]
    ) -> None:
        """One ``cuMemcpyBatchAsync`` of 1D copies; the arrays are of 64-bit words."""
        status = self._batch(
            targets.ctypes.data,
            sources.ctypes.data,
            sizes.ctypes.data,
            len(sizes),
            attributes.ctypes.data,
            ctypes.addressof(self._zero),
            1,
            ctypes.addressof(self._failed),
            self._stream,
        )
        if status:
            raise CudaError(f"cuMemcpyBatchAsync of {len(sizes)}: {self._error(status)}, piece {self._failed.value}")

    def batch_3d(self, copies: NDArray[Any]) -> None:
        """One ``cuMemcpy3DBatchAsync``."""
        status = self._batch_3d(len(copies), copies.ctypes.data, ctypes.addressof(self._failed), 0, self._stream)
        if status:
            raise CudaError(f"cuMemcpy3DBatchAsync of {len(copies)}: {self._error(status)}, copy {self._failed.value}")

    def each_2d(self, copies: NDArray[Any]) -> None:
        """One ``cuMemcpy2DAsync`` per element."""
        function, stream = self._library.cuMemcpy2DAsync_v2, self._stream
        address, step = copies.ctypes.data, copies.itemsize
        for index in range(len(copies)):
            status = function(address + index * step, stream)
            if status:
                raise CudaError(f"cuMemcpy2DAsync {index} of {len(copies)}: {self._error(status)}")

    def event(self) -> Any:
        event = _P()
        self.call("cuEventCreate", ctypes.byref(event), _NO_TIMING)
        return event

    def record(self, event: Any) -> None:
        self.call("cuEventRecord", event, self._stream)

    def wait(self, event: Any) -> None:
        self.call("cuEventSynchronize", event)

    def destroy(self, event: Any) -> None:
        self.call("cuEventDestroy_v2", event)

    def drain(self) -> None:
        self.call("cuStreamSynchronize", self._stream)

    # ------------------------------------------------------------------------------------------------------------------

    def bulk_gbps(self, direction: Direction, nbytes: int = GIB, repeat: int = 7) -> float:
        """The limit: GB/s of one pinned copy, median of ``repeat`` after a warm-up."""
        device, host = self.alloc(nbytes), self.alloc_host(nbytes)
        try:
            times = []
            for _ in range(repeat + 1):
                started = time.perf_counter()
                self.copy(direction, device, host, nbytes)
                self.drain()
                times.append(time.perf_counter() - started)
            return nbytes / statistics.median(times[1:]) / 1e9
        finally:
            self.drain()
            self.free(device)
            self.free_host(host)

    def close(self) -> None:
        self.call("cuStreamDestroy_v2", self._stream)
        self.call("cuDevicePrimaryCtxRelease_v2", self._device)

    def _entry(self, name: str) -> int:
        address, found = _P(), ctypes.c_int()
        self.call("cuGetProcAddress_v2", name.encode(), ctypes.byref(address), 12080, 0, ctypes.byref(found))
        if not address.value:
            raise CudaError(f"the CUDA driver has no {name}: 12.8 or newer is needed")
        return address.value

    def _error(self, status: int) -> str:
        text = ctypes.c_char_p()
        self._library.cuGetErrorName(status, ctypes.byref(text))
        return text.value.decode() if text.value else f"error {status}"


@contextmanager
def opened_gpu() -> Iterator[Gpu]:
    gpu = Gpu()
    try:
        yield gpu
    finally:
        gpu.close()
