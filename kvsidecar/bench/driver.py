"""The part of the CUDA driver that the benchmark uses, through ctypes: streams, pinned memory, asynchronous copies.

`kvsidecar.client.cuda_driver` has what an engine needs to share memory; this is what it takes to time it. Every call is
checked. The context is made current in each thread that comes, once.

Source: CUDA Driver API. Symbols with ``_v2`` are named so because the driver keeps older versions under plain names.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvsidecar.bench.errors import CudaFailed
from kvsidecar.client.cuda_driver import device_uuid, error_text, ipc_handle
from kvsidecar.errors import DriverUnusable

_OUT = ctypes.c_void_p
_DEVICE_POINTER = ctypes.c_uint64
_STREAM = ctypes.c_void_p
_SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "cuDriverGetVersion": (_OUT,),
    "cuDeviceGetCount": (_OUT,),
    "cuDeviceGet": (_OUT, ctypes.c_int),
    "cuDeviceGetName": (ctypes.c_char_p, ctypes.c_int, ctypes.c_int),
    "cuDeviceGetPCIBusId": (ctypes.c_char_p, ctypes.c_int, ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (_OUT, ctypes.c_int),
    "cuDevicePrimaryCtxRelease_v2": (ctypes.c_int,),
    "cuCtxSetCurrent": (ctypes.c_void_p,),
    "cuMemGetInfo_v2": (_OUT, _OUT),
    "cuMemAlloc_v2": (_OUT, ctypes.c_size_t),
    "cuMemFree_v2": (_DEVICE_POINTER,),
    "cuMemHostAlloc": (_OUT, ctypes.c_size_t, ctypes.c_uint),
    "cuMemFreeHost": (ctypes.c_void_p,),
    "cuStreamCreate": (_OUT, ctypes.c_uint),
    "cuStreamDestroy_v2": (_STREAM,),
    "cuStreamSynchronize": (_STREAM,),
    "cuMemcpyHtoDAsync_v2": (_DEVICE_POINTER, ctypes.c_void_p, ctypes.c_size_t, _STREAM),
    "cuMemcpyDtoHAsync_v2": (ctypes.c_void_p, _DEVICE_POINTER, ctypes.c_size_t, _STREAM),
    "cuMemcpyDtoDAsync_v2": (_DEVICE_POINTER, _DEVICE_POINTER, ctypes.c_size_t, _STREAM),
    "cuMemsetD8Async": (_DEVICE_POINTER, ctypes.c_ubyte, ctypes.c_size_t, _STREAM),
}
_STREAM_NON_BLOCKING: Final = 1
"""CU_STREAM_NON_BLOCKING: no order with the default stream."""


@functools.cache
def _library() -> ctypes.CDLL:
    gpu_count()
    # An object of its own: the signatures of the client's shim stay its own.
    library = ctypes.CDLL("libcuda.so.1")
    for name, arguments in _SIGNATURES.items():
        try:
            function = getattr(library, name)
        except AttributeError as error:
            raise DriverUnusable(f"the CUDA driver lacks {name}: CUDA 12.8 or newer is required") from error
        function.argtypes, function.restype = arguments, ctypes.c_int
    return library


def _call(name: str, *arguments: Any) -> None:
    status = getattr(_library(), name)(*arguments)
    if status:
        raise CudaFailed(f"{name}: {error_text(status)}")


def gpu_count() -> int:
    """GPUs that this process sees. Raises DriverUnusable if there is no driver."""
    error_text(0)  # loads and starts the driver
    library = ctypes.CDLL("libcuda.so.1")
    count = ctypes.c_int()
    library.cuDeviceGetCount.argtypes, library.cuDeviceGetCount.restype = (_OUT,), ctypes.c_int
    status = library.cuDeviceGetCount(ctypes.byref(count))
    if status:
        raise DriverUnusable(f"cuDeviceGetCount: {error_text(status)}")
    return count.value


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
        """Its bytes. Not to be used after `close`."""
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.nbytes).from_address(self.address))

    def close(self) -> None:
        self._cuda.bind()
        _call("cuMemFreeHost", self._pointer)


class Cuda:
    """The primary context of the first visible GPU. Its methods may be called from any thread."""

    def __init__(self) -> None:
        if gpu_count() == 0:
            raise DriverUnusable("the CUDA driver sees no GPU")
        device = ctypes.c_int()
        _call("cuDeviceGet", ctypes.byref(device), 0)
        self._device = device.value
        self.uuid = device_uuid(0)
        self._context = ctypes.c_void_p()
        _call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
        self._bound = threading.local()

    def bind(self) -> None:
        """Make the context current in this thread; a thread that has not used CUDA has none."""
        if not getattr(self._bound, "done", False):
            _call("cuCtxSetCurrent", self._context)
            self._bound.done = True

    @property
    def name(self) -> str:
        text = ctypes.create_string_buffer(128)
        _call("cuDeviceGetName", text, len(text), self._device)
        return text.value.decode()

    @property
    def pci_bus_id(self) -> str:
        """Such as ``0000:18:00.0``."""
        text = ctypes.create_string_buffer(32)
        _call("cuDeviceGetPCIBusId", text, len(text), self._device)
        return text.value.decode().lower()

    @property
    def version(self) -> str:
        """The CUDA version of the driver, such as ``13.0``."""
        number = ctypes.c_int()
        _call("cuDriverGetVersion", ctypes.byref(number))
        return f"{number.value // 1000}.{number.value % 1000 // 10}"

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes of the GPU, whoever uses the rest."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.bind()
        _call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def alloc(self, nbytes: int) -> int:
        address = ctypes.c_uint64()
        self.bind()
        _call("cuMemAlloc_v2", ctypes.byref(address), nbytes)
        return address.value

    def free(self, address: int) -> None:
        """Not while another process has it mapped: the driver calls that undefined behaviour."""
        self.bind()
        _call("cuMemFree_v2", address)

    def ipc_handle(self, address: int) -> bytes:
        """64 bytes by which the daemon opens the allocation."""
        return ipc_handle(address)

    def stream(self) -> Stream:
        return Stream(self)

    def pinned(self, nbytes: int) -> Pinned:
        return Pinned(self, nbytes)

    def close(self) -> None:
        """Give the context back, and all its memory if this was its last user."""
        _call("cuDevicePrimaryCtxRelease_v2", self._device)
