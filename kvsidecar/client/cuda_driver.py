"""A little of the CUDA driver API by ctypes, for the engine's side: no package is needed but the driver itself.

Importing this module needs no driver; the first call loads ``libcuda.so.1``. Symbols with ``_v2`` are named so because
the driver keeps the 32-bit versions of CUDA 2 and 3 under the plain names.

Source: CUDA Driver API, "Memory Management" (cuIpcGetMemHandle, cuMemGetAddressRange), "Unified Addressing"
(cuPointerGetAttribute), "Primary Context Management".
"""

from __future__ import annotations

import ctypes
import functools
import uuid as uuids
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from kvsidecar.errors import DriverUnusable, NotExportable

IPC_HANDLE_BYTES: Final = 64
_DEVICE_ORDINAL: Final = 9
"""CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL"""
_IS_LEGACY_IPC_CAPABLE: Final = 10
"""CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE"""

_HOW_TO_EXPORT: Final = (
    "only memory from cuMemAlloc or cudaMalloc can be shared: unset PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, "
    "turn off the engine's sleep mode, and use neither managed memory nor a memory pool"
)


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * IPC_HANDLE_BYTES),)


_POINTER = ctypes.c_uint64
_OUT = ctypes.c_void_p
_SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "cuInit": (ctypes.c_uint,),
    "cuGetErrorName": (ctypes.c_int, _OUT),
    "cuGetErrorString": (ctypes.c_int, _OUT),
    "cuDeviceGet": (_OUT, ctypes.c_int),
    "cuDeviceGetUuid_v2": (_OUT, ctypes.c_int),
    "cuDeviceGetName": (_OUT, ctypes.c_int, ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (_OUT, ctypes.c_int),
    "cuDevicePrimaryCtxRelease_v2": (ctypes.c_int,),
    "cuCtxPushCurrent_v2": (ctypes.c_void_p,),
    "cuCtxPopCurrent_v2": (_OUT,),
    "cuCtxSynchronize": (),
    "cuMemGetInfo_v2": (_OUT, _OUT),
    "cuMemAlloc_v2": (_OUT, ctypes.c_size_t),
    "cuMemFree_v2": (_POINTER,),
    "cuMemsetD8_v2": (_POINTER, ctypes.c_ubyte, ctypes.c_size_t),
    "cuMemcpyHtoD_v2": (_POINTER, ctypes.c_void_p, ctypes.c_size_t),
    "cuMemcpyDtoH_v2": (ctypes.c_void_p, _POINTER, ctypes.c_size_t),
    "cuMemGetAddressRange_v2": (_OUT, _OUT, _POINTER),
    "cuIpcGetMemHandle": (_OUT, _POINTER),
    "cuPointerGetAttribute": (_OUT, ctypes.c_int, _POINTER),
}


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverUnusable(f"no CUDA driver: {error}") from error
    for name, arguments in _SIGNATURES.items():
        try:
            function = getattr(library, name)
        except AttributeError as error:
            raise DriverUnusable(f"the CUDA driver has no {name}: it is too old, 12.8 is needed") from error
        function.argtypes, function.restype = arguments, ctypes.c_int
    status = library.cuInit(0)
    if status:
        raise DriverUnusable(f"the CUDA driver does not start: {_describe(library, status)}")
    return library


def _describe(library: ctypes.CDLL, status: int) -> str:
    texts = []
    for function in (library.cuGetErrorName, library.cuGetErrorString):
        text = ctypes.c_char_p()
        known = function(status, ctypes.byref(text)) == 0 and text.value is not None
        texts.append(text.value.decode() if known and text.value is not None else f"error {status}")
    return ": ".join(texts)


def error_text(status: int) -> str:
    """Name and sentence of a ``CUresult``, e.g. ``CUDA_ERROR_INVALID_VALUE: invalid argument``."""
    return _describe(_library(), status)


def _call(name: str, *arguments: Any, error: type[Exception] = DriverUnusable, hint: str = "") -> None:
    status = getattr(_library(), name)(*arguments)
    if status:
        raise error(f"{name}: {error_text(status)}{'; ' + hint if hint else ''}")


# -- devices -----------------------------------------------------------------------------------------------------


def device_uuid(ordinal: int) -> str:
    """UUID of a visible GPU as nvidia-smi prints it: ``GPU-...``, or ``MIG-...`` for a MIG device."""
    device = _device(ordinal)
    raw, name = ctypes.create_string_buffer(16), ctypes.create_string_buffer(128)
    _call("cuDeviceGetUuid_v2", raw, device)
    _call("cuDeviceGetName", name, len(name), device)
    return f"{'MIG' if b' MIG ' in name.value else 'GPU'}-{uuids.UUID(bytes=raw.raw)}"


def _device(ordinal: int) -> int:
    device = ctypes.c_int()
    _call("cuDeviceGet", ctypes.byref(device), ordinal)
    return device.value


# -- pointers ----------------------------------------------------------------------------------------------------


def pointer_ordinal(pointer: int) -> int:
    """Ordinal of the GPU that a device pointer belongs to.

    Raises:
        NotExportable: it is no device pointer of this process.
    """
    return _attribute(pointer, _DEVICE_ORDINAL)


def pointer_uuid(pointer: int) -> str:
    """UUID of the GPU that a device pointer belongs to."""
    return device_uuid(pointer_ordinal(pointer))


def is_legacy_ipc_capable(pointer: int) -> bool:
    """Whether `ipc_handle` can share the allocation that this device pointer lies in."""
    return bool(_attribute(pointer, _IS_LEGACY_IPC_CAPABLE))


def address_range(pointer: int) -> tuple[int, int]:
    """Base and size in bytes of the allocation that a device pointer lies in.

    A tensor of PyTorch lies somewhere in a larger allocation, and only the whole of it can be shared.
    """
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    with _context_of(pointer):
        arguments = ctypes.byref(base), ctypes.byref(size), pointer
        _call("cuMemGetAddressRange_v2", *arguments, error=NotExportable, hint="is it memory of this process?")
    return base.value, size.value


def ipc_handle(base: int) -> bytes:
    """The 64 bytes by which another process opens the allocation at ``base``. Treat them as a password.

    Raises:
        NotExportable: the memory is of a kind that cannot be shared; the text says what to change.
    """
    handle = _IpcHandle()
    with _context_of(base):
        _call("cuIpcGetMemHandle", ctypes.byref(handle), base, error=NotExportable, hint=_HOW_TO_EXPORT)
    return bytes(handle)


def _attribute(pointer: int, attribute: int) -> int:
    value = ctypes.c_uint64(0)  # the attributes asked for are of 1 to 4 bytes; little-endian, so this reads them all
    what = "is it a device pointer of this process?"
    _call("cuPointerGetAttribute", ctypes.byref(value), attribute, pointer, error=NotExportable, hint=what)
    return value.value


@contextmanager
def _context_of(pointer: int) -> Iterator[None]:
    """Make the primary context of the pointer's GPU current for a moment, in whatever thread this is.

    A thread that has not used CUDA has no context, and every call would end in CUDA_ERROR_INVALID_CONTEXT.
    """
    device = _device(pointer_ordinal(pointer))
    context, popped = ctypes.c_void_p(), ctypes.c_void_p()
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    try:
        _call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            _library().cuCtxPopCurrent_v2(ctypes.byref(popped))
    finally:
        _library().cuDevicePrimaryCtxRelease_v2(device)


# -- for processes without torch: the demo, tests, benchmarks ----------------------------------------------------


class CudaContext:
    """The primary context of one GPU, and plain memory in it. Its methods may be called from any thread.

    Args:
        ordinal: of the visible GPU, as in ``cuda:0``.
    """

    def __init__(self, ordinal: int = 0) -> None:
        self._device = _device(ordinal)
        self.uuid = device_uuid(ordinal)
        self._context = ctypes.c_void_p()
        _call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)

    def alloc(self, nbytes: int) -> int:
        """Address of fresh device memory; its content is undefined."""
        address = ctypes.c_uint64()
        with self._current():
            _call("cuMemAlloc_v2", ctypes.byref(address), nbytes)
        return address.value

    def free(self, address: int) -> None:
        """Give memory back. Not while another process has it mapped: the driver calls that undefined behaviour."""
        with self._current():
            _call("cuMemFree_v2", address)

    def copy_to_device(self, address: int, buffer: Any) -> None:
        """Copy a whole buffer (anything with the buffer protocol, contiguous) to the device; returns when it is over.

        The copy of pageable memory may return before the device has the last bytes, hence the synchronisation.
        """
        view = memoryview(buffer).cast("B")
        # ctypes gives the address of writable buffers only; a read-only one (bytes) is copied.
        host = (ctypes.c_char * view.nbytes).from_buffer_copy(view) if view.readonly else _address(view)
        with self._current():
            _call("cuMemcpyHtoD_v2", address, host, view.nbytes)
            _call("cuCtxSynchronize")

    def copy_from_device(self, buffer: Any, address: int) -> None:
        """Fill a whole writable buffer from the device; returns when it is over."""
        view = memoryview(buffer).cast("B")
        with self._current():
            _call("cuMemcpyDtoH_v2", _address(view), address, view.nbytes)

    def memset(self, address: int, value: int, nbytes: int) -> None:
        """Set every byte to ``value`` (0 to 255); returns when it is over."""
        with self._current():
            _call("cuMemsetD8_v2", address, value, nbytes)
            _call("cuCtxSynchronize")

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes of the GPU, whoever uses the rest."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        with self._current():
            _call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def synchronize(self) -> None:
        """Wait for everything that this context was given to do."""
        with self._current():
            _call("cuCtxSynchronize")

    def close(self) -> None:
        """Give the context back, and all its memory if this was its last user."""
        _call("cuDevicePrimaryCtxRelease_v2", self._device)

    @contextmanager
    def _current(self) -> Iterator[None]:
        popped = ctypes.c_void_p()
        _call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            _library().cuCtxPopCurrent_v2(ctypes.byref(popped))


def _address(view: memoryview) -> Any:
    return (ctypes.c_char * view.nbytes).from_buffer(view)
