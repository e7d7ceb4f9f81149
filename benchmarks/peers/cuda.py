"""The copies of the driver that are compared here, on `kvsidecar.bench.driver`. It needs no package but the driver.

It works in the GPU's primary context, so it can be used beside torch. The batched copies are asked for in the form that
CUDA 12.8 brought, which every later driver keeps.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.shapes import GIB, Direction
from kvsidecar.bench.driver import Cuda
from kvsidecar.bench.errors import CudaFailed
from kvsidecar.errors import DriverUnusable
from kvsidecar.support import cuda_driver

_NO_TIMING: Final = 2  # CU_EVENT_DISABLE_TIMING

_P, _N, _I, _U = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint
_CALLS: Final[dict[str, tuple[Any, ...]]] = {
    "cuMemcpy2DAsync": (_P, _P),
    "cuMemcpyBatchAsync": (_P, _P, _P, _N, _P, _P, _N, _P, _P),
    "cuMemcpy3DBatchAsync": (_N, _P, _P, ctypes.c_ulonglong, _P),
    "cuEventCreate": (_P, _U),
    "cuEventRecord": (_P, _P),
    "cuEventSynchronize": (_P,),
    "cuEventDestroy": (_P,),
}
CUDA_ERRORS: Final = (CudaFailed, DriverUnusable)
"""The driver refused a call, or there is no driver."""


class Gpu(Cuda):
    """The first visible GPU, and one stream. For one thread, in which its context stays current."""

    def __init__(self) -> None:
        super().__init__()
        self.bind()
        self.work = self.stream()
        self._stream = self.work._handle
        self._functions = {name: ctypes.CFUNCTYPE(_I, *kinds)(_entry(name)) for name, kinds in _CALLS.items()}
        self._zero, self._failed = _N(0), _N(0)

    def _do(self, name: str, *arguments: Any, what: str = "") -> None:
        if status := self._functions[name](*arguments):
            raise CudaFailed(f"{name}{what}: {cuda_driver.error_text(status)}")

    def read(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        out = np.empty(nbytes, np.uint8)
        self.copy_from_device(out, address)
        return out

    # -- copies on the stream ------------------------------------------------------------------------------------------

    def copy(self, direction: Direction, device: int, host: int, nbytes: int) -> None:
        if direction == "store":
            self.work.to_host(host, device, nbytes)
        else:
            self.work.to_device(device, host, nbytes)

    def batch(
        self, targets: NDArray[Any], sources: NDArray[Any], sizes: NDArray[Any], attributes: NDArray[Any]
    ) -> None:
        """One ``cuMemcpyBatchAsync`` of 1D copies; the arrays are of 64-bit words."""
        self._do(
            "cuMemcpyBatchAsync",
            targets.ctypes.data,
            sources.ctypes.data,
            sizes.ctypes.data,
            len(sizes),
            attributes.ctypes.data,
            ctypes.addressof(self._zero),
            1,
            ctypes.addressof(self._failed),
            self._stream,
            what=f" of {len(sizes)}",
        )

    def batch_3d(self, copies: NDArray[Any]) -> None:
        """One ``cuMemcpy3DBatchAsync``."""
        arguments = len(copies), copies.ctypes.data, ctypes.addressof(self._failed), 0, self._stream
        self._do("cuMemcpy3DBatchAsync", *arguments, what=f" of {len(copies)}")

    def each_2d(self, copies: NDArray[Any]) -> None:
        """One ``cuMemcpy2DAsync`` per element."""
        function, stream = self._functions["cuMemcpy2DAsync"], self._stream
        address, step = copies.ctypes.data, copies.itemsize
        for index in range(len(copies)):
            status = function(address + index * step, stream)
            if status:
                raise CudaFailed(f"cuMemcpy2DAsync {index} of {len(copies)}: {cuda_driver.error_text(status)}")

    def event(self) -> Any:
        event = _P()
        self._do("cuEventCreate", ctypes.byref(event), _NO_TIMING)
        return event

    def record(self, event: Any) -> None:
        self._do("cuEventRecord", event, self._stream)

    def wait(self, event: Any) -> None:
        self._do("cuEventSynchronize", event)

    def destroy(self, event: Any) -> None:
        self._do("cuEventDestroy", event)

    # ------------------------------------------------------------------------------------------------------------------

    def bulk_gbps(self, direction: Direction, nbytes: int = GIB, repeat: int = 7) -> float:
        """The limit: GB/s of one pinned copy, median of ``repeat`` after a warm-up."""
        device, host = self.alloc(nbytes), self.pinned(nbytes)
        try:
            times = []
            for _ in range(repeat + 1):
                started = time.perf_counter()
                self.copy(direction, device, host.address, nbytes)
                self.work.synchronize()
                times.append(time.perf_counter() - started)
            return nbytes / statistics.median(times[1:]) / 1e9
        finally:
            self.work.synchronize()
            self.free(device)
            host.close()

    def close(self) -> None:
        self.work.close()
        super().close()


def _entry(name: str) -> int:
    """Address of a function in the form of CUDA 12.8."""
    address, found = _P(), ctypes.c_int()
    cuda_driver.call(
        "cuGetProcAddress_v2", name.encode(), ctypes.byref(address), 12080, 0, ctypes.byref(found), error=CudaFailed
    )
    if not address.value:
        raise CudaFailed(f"the CUDA driver has no {name}: 12.8 or newer is needed")
    return address.value


@contextmanager
def opened_gpu() -> Iterator[Gpu]:
    with closing(Gpu()) as gpu:
        yield gpu
