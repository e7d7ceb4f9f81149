"""A small part of the CUDA driver API through ctypes. It needs no package, only the driver.

For code that must work without the CUDA bindings: clients in engines, the doctor, benchmarks, and the choice of a
platform. The daemon's copies use `kvsidecar.device.cuda`. Importing this module needs no driver; the first call loads
it, and `call` initialises it. Symbols with ``_v2`` are the current versions; the plain names are those of CUDA 2 and 3.

Source: CUDA Driver API, "Memory Management" (cuIpcGetMemHandle, cuMemGetAddressRange), "Unified Addressing"
(cuPointerGetAttribute), "Primary Context Management".
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import struct
import uuid as uuids
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, Final

from kvsidecar.errors import DriverUnusable, NotExportable
from kvsidecar.support.kernel_calls import needed

IPC_HANDLE_BYTES: Final = 64
"""``CU_IPC_HANDLE_SIZE``"""
_DEVICE_ORDINAL: Final = 9
"""CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL"""
_IS_LEGACY_IPC_CAPABLE: Final = 10
"""CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE"""
_ALLOWED_HANDLE_TYPES: Final = 14
"""CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES"""
RANGE_BYTES: Final = 2 << 20
"""Granularity of physical memory on every GPU so far."""
POSIX_DESCRIPTOR: Final = 1
"""CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"""
FABRIC: Final = 8
"""CU_MEM_HANDLE_TYPE_FABRIC"""
FABRIC_HANDLE_BYTES: Final = 64
"""``CU_IPC_HANDLE_SIZE``, of which a ``CUmemFabricHandle`` is made."""

_HOW_TO_EXPORT: Final = (
    "memory of cuMemAlloc, cudaMalloc and cuMemCreate can be shared, managed memory and that of a memory pool cannot"
)


LIBRARY: Final = "libcuda.so.1"
_ADDRESS = ctypes.c_uint64
_OUT = ctypes.c_void_p
_HANDLE = ctypes.c_void_p
_SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDriverGetVersion": (_OUT,),
    "cuGetErrorName": (ctypes.c_int, _OUT),
    "cuGetErrorString": (ctypes.c_int, _OUT),
    # symbol, address, version, flags, status
    "cuGetProcAddress_v2": (ctypes.c_char_p, _OUT, ctypes.c_int, ctypes.c_uint64, _OUT),
    "cuDeviceGet": (_OUT, ctypes.c_int),
    "cuDeviceGetCount": (_OUT,),
    "cuDeviceGetUuid_v2": (_OUT, ctypes.c_int),
    "cuDeviceGetName": (_OUT, ctypes.c_int, ctypes.c_int),
    "cuDeviceGetPCIBusId": (_OUT, ctypes.c_int, ctypes.c_int),
    "cuDeviceGetAttribute": (_OUT, ctypes.c_int, ctypes.c_int),
    "cuDeviceTotalMem_v2": (_OUT, ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (_OUT, ctypes.c_int),
    "cuDevicePrimaryCtxRelease_v2": (ctypes.c_int,),
    "cuCtxPushCurrent_v2": (_HANDLE,),
    "cuCtxPopCurrent_v2": (_OUT,),
    "cuCtxSetCurrent": (_HANDLE,),
    "cuCtxSynchronize": (),
    "cuMemGetInfo_v2": (_OUT, _OUT),
    "cuMemAlloc_v2": (_OUT, ctypes.c_size_t),
    "cuMemFree_v2": (_ADDRESS,),
    "cuMemsetD8_v2": (_ADDRESS, ctypes.c_ubyte, ctypes.c_size_t),
    "cuMemcpyHtoD_v2": (_ADDRESS, ctypes.c_void_p, ctypes.c_size_t),
    "cuMemcpyDtoH_v2": (ctypes.c_void_p, _ADDRESS, ctypes.c_size_t),
    "cuMemGetAddressRange_v2": (_OUT, _OUT, _ADDRESS),
    "cuMemHostAlloc": (_OUT, ctypes.c_size_t, ctypes.c_uint),
    "cuMemFreeHost": (ctypes.c_void_p,),
    "cuIpcGetMemHandle": (_OUT, _ADDRESS),
    "cuMemRetainAllocationHandle": (_OUT, _ADDRESS),
    # out, handle, type, flags
    "cuMemExportToShareableHandle": (_OUT, ctypes.c_uint64, ctypes.c_int, ctypes.c_uint64),
    "cuMemRelease": (ctypes.c_uint64,),
    # out, size, properties, flags
    "cuMemCreate": (_OUT, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_uint64),
    # out, size, alignment, address, flags
    "cuMemAddressReserve": (_OUT, ctypes.c_size_t, ctypes.c_size_t, _ADDRESS, ctypes.c_uint64),
    "cuMemAddressFree": (_ADDRESS, ctypes.c_size_t),
    # address, size, offset, handle, flags
    "cuMemMap": (_ADDRESS, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_uint64),
    "cuMemUnmap": (_ADDRESS, ctypes.c_size_t),
    # address, size, access descriptions, count
    "cuMemSetAccess": (_ADDRESS, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t),
    "cuPointerGetAttribute": (_OUT, ctypes.c_int, _ADDRESS),
    "cuStreamCreate": (_OUT, ctypes.c_uint),
    "cuStreamDestroy_v2": (_HANDLE,),
    "cuStreamSynchronize": (_HANDLE,),
    "cuMemcpyHtoDAsync_v2": (_ADDRESS, ctypes.c_void_p, ctypes.c_size_t, _HANDLE),
    "cuMemcpyDtoHAsync_v2": (ctypes.c_void_p, _ADDRESS, ctypes.c_size_t, _HANDLE),
    "cuMemcpyDtoDAsync_v2": (_ADDRESS, _ADDRESS, ctypes.c_size_t, _HANDLE),
    "cuMemsetD8Async": (_ADDRESS, ctypes.c_ubyte, ctypes.c_size_t, _HANDLE),
}


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise DriverUnusable(f"no CUDA driver: {error}") from error


def is_installed() -> bool:
    """Whether a driver is installed, usable or not. Raises DriverUnusable if it is installed but does not load."""
    try:
        _library()
    except DriverUnusable as error:
        # The loader names the missing file: the library itself, or one that it depends on.
        if str(error.__cause__).startswith(f"{LIBRARY}: cannot open shared object file"):
            return False
        raise
    return True


def has_symbol(name: str) -> bool:
    """Whether the library exports a function with exactly this name."""
    return hasattr(_library(), name)


@functools.cache
def _function(name: str) -> Any:
    try:
        function = getattr(_library(), name)
    except AttributeError as error:
        raise DriverUnusable(f"the CUDA driver has no {name}: it is too old, 12.8 is needed") from error
    function.argtypes, function.restype = _SIGNATURES[name], ctypes.c_int
    return function


def status_of(name: str, *arguments: Any) -> int:
    """Call a driver function without initialising the driver. Returns its ``CUresult``.

    Raises:
        DriverUnusable: there is no driver, or it has no such function.
    """
    return int(_function(name)(*arguments))


@functools.cache
def _start() -> None:
    status = status_of("cuInit", 0)
    if status:
        raise DriverUnusable(f"the CUDA driver does not start: {error_text(status)}")


def call(name: str, *arguments: Any, error: type[Exception] = DriverUnusable, hint: str = "") -> None:
    """Call a driver function, after initialising the driver if necessary. Raises ``error`` if it fails."""
    _start()
    status = status_of(name, *arguments)
    if status:
        raise error(f"{name}: {error_text(status)}{'; ' + hint if hint else ''}")


def error_text(status: int) -> str:
    """Name and description of a ``CUresult``, e.g. ``CUDA_ERROR_INVALID_VALUE: invalid argument``."""
    texts = []
    for name in ("cuGetErrorName", "cuGetErrorString"):
        text = ctypes.c_char_p()
        known = status_of(name, status, ctypes.byref(text)) == 0
        texts.append(text.value.decode() if known and text.value is not None else f"error {status}")
    return ": ".join(texts)


# -- devices -----------------------------------------------------------------------------------------------------


def _value(kind: type[Any], name: str, *arguments: Any) -> int:
    """Call a driver function and return the value that it writes to its first argument."""
    value = kind()
    call(name, ctypes.byref(value), *arguments)
    return int(value.value)


def driver_version() -> int:
    """CUDA version of the driver, such as 12080."""
    return _value(ctypes.c_int, "cuDriverGetVersion")


def device_count() -> int:
    """Number of visible GPUs. Raises DriverUnusable if there is no driver or no visible GPU."""
    return _value(ctypes.c_int, "cuDeviceGetCount")


def device_uuid(ordinal: int) -> str:
    """UUID of a visible GPU as nvidia-smi prints it: ``GPU-...``, or ``MIG-...`` for a MIG device."""
    raw = ctypes.create_string_buffer(16)
    call("cuDeviceGetUuid_v2", raw, _device(ordinal))
    return f"{'MIG' if ' MIG ' in device_name(ordinal) else 'GPU'}-{uuids.UUID(bytes=raw.raw)}"


def device_name(ordinal: int) -> str:
    return _text("cuDeviceGetName", ordinal)


def device_bus_id(ordinal: int) -> str:
    """PCI bus id as the driver writes it, such as ``0000:18:00.0``."""
    return _text("cuDeviceGetPCIBusId", ordinal)


def _text(name: str, ordinal: int) -> str:
    buffer = ctypes.create_string_buffer(128)
    call(name, buffer, len(buffer), _device(ordinal))
    return buffer.value.decode(errors="replace")


def device_memory(ordinal: int) -> int:
    return _value(ctypes.c_size_t, "cuDeviceTotalMem_v2", _device(ordinal))


def device_attribute(ordinal: int, attribute: int) -> int:
    return _value(ctypes.c_int, "cuDeviceGetAttribute", attribute, _device(ordinal))


def _device(ordinal: int) -> int:
    return _value(ctypes.c_int, "cuDeviceGet", ordinal)


# -- pointers ----------------------------------------------------------------------------------------------------


def pointer_ordinal(pointer: int) -> int:
    """Ordinal of the GPU of a device pointer. Raises NotExportable if it is not a device pointer of this process."""
    return _attribute(pointer, _DEVICE_ORDINAL)


def pointer_uuid(pointer: int) -> str:
    return device_uuid(pointer_ordinal(pointer))


def is_legacy_ipc_capable(pointer: int) -> bool:
    """Whether `ipc_handle` can share the allocation that contains this device pointer."""
    return bool(_attribute(pointer, _IS_LEGACY_IPC_CAPABLE))


def address_range(pointer: int) -> tuple[int, int]:
    """Base and size in bytes of the allocation that contains a device pointer: only whole allocations can be shared."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    with _context_of(pointer):
        arguments = ctypes.byref(base), ctypes.byref(size), pointer
        call("cuMemGetAddressRange_v2", *arguments, error=NotExportable, hint="is it memory of this process?")
    return base.value, size.value


def ipc_handle(base: int) -> bytes:
    """The 64-byte handle with which another process opens the allocation at ``base``. Treat it like a password.

    Raises:
        NotExportable: this kind of memory cannot be shared; the text says what to change.
    """
    handle = ctypes.create_string_buffer(IPC_HANDLE_BYTES)
    with _context_of(base):
        call("cuIpcGetMemHandle", handle, base, error=NotExportable, hint=_HOW_TO_EXPORT)
    return handle.raw


def physical_ranges(pointer: int, nbytes: int) -> list[tuple[int, int]]:
    """Base and size of each handle of ``cuMemCreate`` that is mapped in ``nbytes`` bytes from a device pointer on.

    Raises:
        NotExportable: this memory has no such handles, or none that can become a descriptor; the text says what to
            change.
    """
    ranges: list[tuple[int, int]] = []
    with _context_of(pointer):
        end, at = pointer + nbytes, pointer
        while at < end:
            base, size = ctypes.c_uint64(), ctypes.c_size_t()
            arguments = ctypes.byref(base), ctypes.byref(size), at
            call("cuMemGetAddressRange_v2", *arguments, error=NotExportable, hint="is it memory of this process?")
            _check_exportable(base.value)
            ranges.append((base.value, size.value))
            at = base.value + size.value
    return ranges


def exported_fd(address: int) -> int:
    """A new descriptor of the handle of ``cuMemCreate`` that is mapped at this address.

    It is the driver's own, which keeps the memory allocated; or, of memory that can be exported as a fabric handle
    alone, a memfd with that handle (`fabric_handle`).

    Raises:
        NotExportable: nothing is mapped there, or it cannot be shared; the text says what to change.
    """
    handle, fd = ctypes.c_uint64(), ctypes.c_int(-1)
    call("cuMemRetainAllocationHandle", ctypes.byref(handle), address, error=NotExportable, hint="is it still mapped?")
    try:
        if not _handle_types(address) & POSIX_DESCRIPTOR:
            return _fabric_fd(handle)
        arguments = ctypes.byref(fd), handle, POSIX_DESCRIPTOR, 0
        call("cuMemExportToShareableHandle", *arguments, error=NotExportable, hint="is a descriptor free (ulimit -n)?")
    finally:
        status_of("cuMemRelease", handle)
    return fd.value


def _fabric_fd(handle: ctypes.c_uint64) -> int:
    exported = ctypes.create_string_buffer(FABRIC_HANDLE_BYTES)
    hint = "has this process a channel of the IMEX service (/dev/nvidia-caps-imex-channels)?"
    call("cuMemExportToShareableHandle", exported, handle, FABRIC, 0, error=NotExportable, hint=hint)
    with needed("memfd_create", NotExportable):
        fd = os.memfd_create("kvsidecar-fabric-handle", os.MFD_CLOEXEC)
    os.write(fd, exported.raw)
    return fd


def fabric_handle(fd: int) -> bytes | None:
    """The content of a memfd of `exported_fd`: not 64 bytes if somebody else made it. None: it cannot be read as a
    memfd, so it must be a descriptor of the driver."""
    try:
        # Not by fstat: of a file whose file system is a program of another user it may never return.
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        return os.pread(fd, FABRIC_HANDLE_BYTES + 1, 0)  # refused if it was opened for writing alone
    except OSError:
        return None


def _handle_types(pointer: int) -> int:
    """The forms in which the memory at a device pointer can be exported, as bits of ``CUmemAllocationHandleType``."""
    return _attribute(pointer, _ALLOWED_HANDLE_TYPES)


def _check_exportable(pointer: int) -> None:
    if _handle_types(pointer) & (POSIX_DESCRIPTOR | FABRIC):
        return
    handle = ctypes.c_uint64()
    if status_of("cuMemRetainAllocationHandle", ctypes.byref(handle), pointer):
        raise NotExportable(f"the KV cache is in memory that cannot be shared: {_HOW_TO_EXPORT}")
    status_of("cuMemRelease", handle)
    raise NotExportable(
        "the KV cache is in memory of cuMemCreate that cannot be exported: its allocator must ask for "
        "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR (requestedHandleTypes), or be turned off: torch's is set by "
        "PYTORCH_CUDA_ALLOC_CONF, those of vLLM and SGLang by their options for sleep mode and memory saving"
    )


def _attribute(pointer: int, attribute: int) -> int:
    value = ctypes.c_uint64(0)  # the attributes have 1 to 4 bytes, little endian
    what = "is it a device pointer of this process?"
    call("cuPointerGetAttribute", ctypes.byref(value), attribute, pointer, error=NotExportable, hint=what)
    return value.value


@contextmanager
def _context_of(pointer: int) -> Iterator[None]:
    """Make the primary context of the pointer's GPU current in the block: a thread that has not used CUDA has none."""
    device = _device(pointer_ordinal(pointer))
    context = ctypes.c_void_p()
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    try:
        with _current(context):
            yield
    finally:
        status_of("cuDevicePrimaryCtxRelease_v2", device)


@contextmanager
def _current(context: ctypes.c_void_p, error: type[Exception] = DriverUnusable) -> Iterator[None]:
    call("cuCtxPushCurrent_v2", context, error=error)
    try:
        yield
    finally:
        status_of("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


# -- for processes without torch: the demo, tests, benchmarks ----------------------------------------------------


class CudaContext:
    """The primary context of one visible GPU, and plain memory in it. Methods may be called from any thread."""

    failure: ClassVar[type[Exception]] = DriverUnusable
    """Raised when a driver call fails."""

    def __init__(self, ordinal: int = 0) -> None:
        self._device = _device(ordinal)
        self.uuid = device_uuid(ordinal)
        self._context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)

    def alloc(self, nbytes: int) -> int:
        """Allocate device memory with undefined content. Returns its address."""
        address = ctypes.c_uint64()
        with self._current():
            self._call("cuMemAlloc_v2", ctypes.byref(address), nbytes)
        return address.value

    def free(self, address: int) -> None:
        """Free device memory. Undefined behaviour while another process has it mapped."""
        with self._current():
            self._call("cuMemFree_v2", address)

    def alloc_ranges(self, sizes: Sequence[int], *, handle_types: int = POSIX_DESCRIPTOR) -> int:
        """Allocate physical memory of these sizes, multiples of `RANGE_BYTES`, mapped back to back.

        Args:
            handle_types: in what forms it can be exported, as ``CUmemAllocationHandleType``; 0: in none.
        """
        total, address = sum(sizes), ctypes.c_uint64()
        with self._current():
            self._call("cuMemAddressReserve", ctypes.byref(address), total, 0, 0, 0)
            self._map(address.value, sizes, handle_types)
        return address.value

    def map_ranges(self, address: int, sizes: Sequence[int]) -> None:
        """Give addresses new physical memory after `unmap_ranges`, as an engine does that wakes up."""
        with self._current():
            self._map(address, sizes, POSIX_DESCRIPTOR)

    def unmap_ranges(self, address: int, sizes: Sequence[int]) -> None:
        """Free the physical memory, and keep the addresses, as an engine does that goes to sleep."""
        with self._current():
            self._call("cuMemUnmap", address, sum(sizes))

    def free_ranges(self, address: int, sizes: Sequence[int]) -> None:
        """Undo `alloc_ranges`."""
        self.unmap_ranges(address, sizes)
        with self._current():
            self._call("cuMemAddressFree", address, sum(sizes))

    def _map(self, address: int, sizes: Sequence[int], handle_types: int) -> None:
        # CUmemAllocationProp: pinned memory on this device; CUmemAccessDesc: which may read and write it.
        properties = struct.pack("=iiiiQ8x", 1, handle_types, 1, self._device, 0)
        access = struct.pack("=iii", 1, self._device, 3)
        handle, at = ctypes.c_uint64(), address
        for size in sizes:
            self._call("cuMemCreate", ctypes.byref(handle), size, properties, 0)
            try:
                self._call("cuMemMap", at, size, 0, handle, 0)
            finally:
                self._call("cuMemRelease", handle)
            at += size
        self._call("cuMemSetAccess", address, at - address, access, 1)

    def copy_to_device(self, address: int, buffer: Any) -> None:
        """Copy a contiguous buffer to the device. Returns when the copy is complete.

        A copy from pageable memory may return before the device has the last bytes, hence the synchronisation.
        """
        view = memoryview(buffer).cast("B")
        # ctypes gives the address of writable buffers only; a read-only one (bytes) is copied.
        host = (ctypes.c_char * view.nbytes).from_buffer_copy(view) if view.readonly else _address(view)
        with self._current():
            self._call("cuMemcpyHtoD_v2", address, host, view.nbytes)
            self._call("cuCtxSynchronize")

    def copy_from_device(self, buffer: Any, address: int) -> None:
        """Fill a writable buffer from the device. Returns when the copy is complete."""
        view = memoryview(buffer).cast("B")
        with self._current():
            self._call("cuMemcpyDtoH_v2", _address(view), address, view.nbytes)

    def memset(self, address: int, value: int, nbytes: int) -> None:
        """Set every byte to ``value`` (0 to 255). Returns when all are set."""
        with self._current():
            self._call("cuMemsetD8_v2", address, value, nbytes)
            self._call("cuCtxSynchronize")

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes of the GPU."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        with self._current():
            self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def synchronize(self) -> None:
        with self._current():
            self._call("cuCtxSynchronize")

    def close(self) -> None:
        """Release the context, and all of its memory if this was its last user."""
        self._call("cuDevicePrimaryCtxRelease_v2", self._device)

    def _call(self, name: str, *arguments: Any) -> None:
        call(name, *arguments, error=self.failure)

    def _current(self) -> AbstractContextManager[None]:
        return _current(self._context, self.failure)


def _address(view: memoryview) -> Any:
    return (ctypes.c_char * view.nbytes).from_buffer(view)
