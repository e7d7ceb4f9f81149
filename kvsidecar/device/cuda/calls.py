"""The driver's copy calls, fed with numpy arrays: no Python object and no loop per copy.

``cuda.bindings`` wants a Python object for every copy of a batch, about 10 µs each, which is ten times what the driver
takes. So these few calls go through ctypes, with arrays that have the driver's memory layout;
`kvsidecar.device.cuda.stream` looks the functions up. ctypes lets other threads run during a call.

Sources: CUDA Driver API, "Memory Management": cuMemcpyBatchAsync, cuMemcpy3DBatchAsync (both since CUDA 12.8; a
pointer operand has its pitch in bytes in ``rowLength``), cuMemcpy2DAsync.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvsidecar.errors import DriverUnusable

SUCCESS: Final = 0
NOT_READY: Final = 600
"""``CUDA_ERROR_NOT_READY``: it is not over."""
NOT_SUPPORTED: Final = 801
"""``CUDA_ERROR_NOT_SUPPORTED``: the driver has the call, and this system does not do it."""
SINCE: Final = 12080
"""CUDA 12.8, whose versions of the functions are called: the signature of some changed with CUDA 13."""

_SIZE = ctypes.c_size_t
_POINTER = ctypes.c_void_p
_ADDRESS = ctypes.c_uint64
SIGNATURES: Final = {
    "cuMemcpyDtoHAsync": (_POINTER, _ADDRESS, _SIZE, _POINTER),
    "cuMemcpyHtoDAsync": (_ADDRESS, _POINTER, _SIZE, _POINTER),
    "cuMemcpy2DAsync": (_POINTER, _POINTER),
    # dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs, failIdx, stream
    "cuMemcpyBatchAsync": (_POINTER, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER),
    # numOps, opList, failIdx, flags, stream
    "cuMemcpy3DBatchAsync": (_SIZE, _POINTER, _POINTER, ctypes.c_ulonglong, _POINTER),
    "cuEventRecord": (_POINTER, _POINTER),
    "cuEventQuery": (_POINTER,),
    # milliseconds, start, end
    "cuEventElapsedTime": (_POINTER, _POINTER, _POINTER),
}
KEEP_GIL: Final = frozenset({"cuEventRecord", "cuEventQuery", "cuEventElapsedTime"})
"""They take a microsecond each, between two copies, and keep the GIL: another thread might hold it for milliseconds
while the link idles."""
OPTIONAL: Final = frozenset({"cuMemcpyBatchAsync", "cuMemcpy3DBatchAsync"})
NEEDED: Final = frozenset(
    {
        "cuCtxSetCurrent",
        "cuCtxSetLimit",
        "cuDeviceGet",
        "cuDeviceGetAttribute",
        "cuDeviceGetCount",
        "cuDeviceGetName",
        "cuDeviceGetPCIBusId",
        "cuDeviceGetUuid",
        "cuDevicePrimaryCtxRelease",
        "cuDevicePrimaryCtxRetain",
        "cuDriverGetVersion",
        "cuEventCreate",
        "cuEventDestroy",
        "cuEventQuery",
        "cuEventRecord",
        "cuGetErrorString",
        "cuGetProcAddress",
        "cuInit",
        "cuIpcCloseMemHandle",
        "cuIpcOpenEventHandle",
        "cuIpcOpenMemHandle",
        "cuMemAddressFree",
        "cuMemAddressReserve",
        "cuMemAlloc",
        "cuMemFree",
        "cuMemGetAddressRange",
        "cuMemGetAllocationGranularity",
        "cuMemGetInfo",
        "cuMemHostRegister",
        "cuMemHostUnregister",
        "cuMemImportFromShareableHandle",
        "cuMemMap",
        "cuMemRelease",
        "cuMemSetAccess",
        "cuMemUnmap",
        "cuStreamCreate",
        "cuStreamDestroy",
        "cuStreamQuery",
        "cuStreamSynchronize",
    }
)
"""Functions that this package calls through the bindings; a driver must have them all."""

_LOCATION = [("type", np.int32), ("id", np.int32)]
ATTRIBUTES: Final = np.dtype(
    [("srcAccessOrder", np.int32), ("srcLocHint", _LOCATION), ("dstLocHint", _LOCATION), ("flags", np.uint32)]
)
"""``CUmemcpyAttributes``"""
_OPERAND = [
    ("type", np.int32),
    ("_padding", np.int32),
    ("ptr", np.uint64),
    ("rowLength", np.uint64),
    ("layerHeight", np.uint64),
    ("locHint", _LOCATION),
]
OPERATION: Final = np.dtype(
    [
        ("src", _OPERAND),
        ("dst", _OPERAND),
        ("width", np.uint64),
        ("height", np.uint64),
        ("depth", np.uint64),
        ("srcAccessOrder", np.int32),
        ("flags", np.uint32),
    ]
)
"""``CUDA_MEMCPY3D_BATCH_OP``"""
_OPERATION: Final = struct.Struct("i4xQQQii i4xQQQii QQQiI")
"""One `OPERATION`, to pack without numpy."""
_END = [
    ("XInBytes", np.uint64),
    ("Y", np.uint64),
    ("MemoryType", np.int32),
    ("_padding", np.int32),
    ("Host", np.uint64),
    ("Device", np.uint64),
    ("Array", np.uint64),
    ("Pitch", np.uint64),
]
COPY_2D: Final = np.dtype([("src", _END), ("dst", _END), ("WidthInBytes", np.uint64), ("Height", np.uint64)])
"""``CUDA_MEMCPY2D``"""

_LOCATION_DEVICE, _LOCATION_HOST = 1, 2
_OPERAND_POINTER = 1
_MEMORY_HOST, _MEMORY_DEVICE = 1, 2
# Order: a store's plan is issued only when the compute that wrote its blocks is over, and must read no earlier than
# its place in the stream, since the engine writes those blocks again and again. A load reads pool slots that are
# not written while they are pinned, and they are pinned until the copy is over: the driver may read them at any time.
_ORDER_STREAM, _ORDER_ANY = 1, 3


@dataclass(frozen=True, slots=True)
class DriverCall:
    """A call with its arguments, and the arrays that they point to."""

    count: int
    """Copies in the call."""
    name: str | None
    """The driver's function; None: one by one."""
    arguments: tuple[int, ...]
    """Without the stream, which comes last."""
    source: tuple[npt.NDArray[np.void], npt.NDArray[np.uint64]]
    """The copies and their host addresses."""
    kept: tuple[npt.NDArray[Any], ...] = ()
    """The arrays that the driver reads during the call: they must live until it returns."""


class CopyCalls:
    """Issues arrays of copies (dtype `kvsidecar.device.base.COPY`) in one direction. Used by one thread.

    Args:
        find: address of a driver function by its name and the CUDA version of its signature; 0 if there is none.
        store: from the device to the host.
        ordinal: of the device, for the driver's hints.
        max_pitch: bytes that ``cuMemcpy2DAsync`` takes. (The batched call takes more.)
    """

    def __init__(self, find: Callable[[str, int], int], *, store: bool, ordinal: int, max_pitch: int) -> None:
        self._store = store
        self._max_pitch = max_pitch
        self._functions = _functions(find)
        self._failed_at = np.zeros(1, np.uint64)
        self._milliseconds = np.zeros(1, np.float32)
        self._order = order = _ORDER_STREAM if store else _ORDER_ANY
        self._device_location = device = (_LOCATION_DEVICE, ordinal)
        host = (_LOCATION_HOST, 0)
        source, target = (device, host) if store else (host, device)
        self._attributes = np.array([(order, source, target, 0)], ATTRIBUTES)
        self._attribute_of = np.zeros(1, np.uint64)
        self._template = np.zeros((), OPERATION)
        self._template["src"]["locHint"], self._template["dst"]["locHint"] = source, target
        self._template["src"]["type"] = self._template["dst"]["type"] = _OPERAND_POINTER
        self._template["srcAccessOrder"] = order
        self._template["depth"] = 1

    def prepare(self, copies: npt.NDArray[np.void], pool_address: int, *, batched: bool) -> DriverCall:
        """The arrays of one call.

        Args:
            copies: at least one.
            batched: all of them have one row.
        """
        if len(copies) == 1:
            return self._single(copies, pool_address)
        host = copies["host_offset"] + np.uint64(pool_address)
        if batched and "cuMemcpyBatchAsync" in self._functions:
            return self._batch(copies, host)
        if not batched and "cuMemcpy3DBatchAsync" in self._functions:
            return self._pitched_batch(copies, host)
        return DriverCall(len(copies), None, (), (copies, host))

    def issue(self, call: DriverCall, stream: int) -> int:
        """Start the copies. Returns the driver's status; unless it is `SUCCESS`, any of them may have been started."""
        if call.name is not None and (function := self._functions.get(call.name)) is not None:
            status = int(function(*call.arguments, stream))
            if status != NOT_SUPPORTED or call.name not in OPTIONAL:
                return status
            del self._functions[call.name]  # nothing was started, and it is not asked again
        return self._one_by_one(*call.source, stream)

    def record(self, event: int, stream: int) -> int:
        """Record an event on a stream with nothing in flight but the call just issued; with more, the driver might
        block, with the GIL kept. Returns the driver's status."""
        return int(self._functions["cuEventRecord"](event, stream))

    def reached(self, event: int) -> bool:
        """Whether all work before the event is over, with or without an error."""
        return int(self._functions["cuEventQuery"](event)) != NOT_READY

    def seconds_between(self, start: int, end: int) -> float | None:
        """Seconds of the device's time between two events that are over; None if the driver does not say."""
        status = self._functions["cuEventElapsedTime"](self._milliseconds.ctypes.data, start, end)
        return float(self._milliseconds[0]) / 1e3 if status == SUCCESS else None

    def _single(self, copies: npt.NDArray[np.void], pool_address: int) -> DriverCall:
        """A job of one block, which should start soon: to make arrays takes longer than the driver."""
        ((address, device_pitch, offset, host_pitch, row_bytes, num_rows),) = copies.tolist()
        host = pool_address + offset
        source = copies, np.array([host], np.uint64)
        if num_rows == 1:
            if self._store:
                return DriverCall(1, "cuMemcpyDtoHAsync", (host, address, row_bytes), source)
            return DriverCall(1, "cuMemcpyHtoDAsync", (address, host, row_bytes), source)
        if "cuMemcpy3DBatchAsync" not in self._functions:
            return DriverCall(1, None, (), source)
        device_side = (address, device_pitch, num_rows, *self._device_location)
        host_side = (host, host_pitch, num_rows, _LOCATION_HOST, 0)
        ends = (device_side, host_side) if self._store else (host_side, device_side)
        operation = np.frombuffer(
            _OPERATION.pack(
                _OPERAND_POINTER, *ends[0], _OPERAND_POINTER, *ends[1], row_bytes, num_rows, 1, self._order, 0
            ),
            np.uint8,
        )
        arguments = (1, operation.ctypes.data, self._failed_at.ctypes.data, 0)
        return DriverCall(1, "cuMemcpy3DBatchAsync", arguments, source, (operation,))

    def _batch(self, copies: npt.NDArray[np.void], host: npt.NDArray[np.uint64]) -> DriverCall:
        device = np.ascontiguousarray(copies["device_address"])
        sizes = np.ascontiguousarray(copies["row_bytes"])
        source, target = (device, host) if self._store else (host, device)
        arguments = (
            target.ctypes.data,
            source.ctypes.data,
            sizes.ctypes.data,
            len(copies),
            self._attributes.ctypes.data,
            self._attribute_of.ctypes.data,
            1,
            self._failed_at.ctypes.data,
        )
        return DriverCall(len(copies), "cuMemcpyBatchAsync", arguments, (copies, host), (device, sizes))

    def _pitched_batch(self, copies: npt.NDArray[np.void], host: npt.NDArray[np.uint64]) -> DriverCall:
        operations = np.full(len(copies), self._template)
        device_side, host_side = ("src", "dst") if self._store else ("dst", "src")
        rows, row_bytes = copies["num_rows"], copies["row_bytes"]
        single = rows == 1  # its pitches are not used, and need not be sensible
        for side, address, pitch in (
            (device_side, copies["device_address"], copies["device_pitch"]),
            (host_side, host, copies["host_pitch"]),
        ):
            operand = operations[side]
            operand["ptr"] = address
            operand["rowLength"] = np.where(single, row_bytes, pitch)
            operand["layerHeight"] = rows
        operations["width"] = row_bytes
        operations["height"] = rows
        arguments = (len(copies), operations.ctypes.data, self._failed_at.ctypes.data, 0)
        return DriverCall(len(copies), "cuMemcpy3DBatchAsync", arguments, (copies, host), (operations,))

    def _one_by_one(self, copies: npt.NDArray[np.void], host: npt.NDArray[np.uint64], stream: int) -> int:
        """Issue copies one by one, for drivers without the batched calls."""
        pitched = np.zeros(1, COPY_2D)
        device_side, host_side = ("src", "dst") if self._store else ("dst", "src")
        pitched[device_side]["MemoryType"], pitched[host_side]["MemoryType"] = _MEMORY_DEVICE, _MEMORY_HOST
        for copy, host_address in zip(copies.tolist(), host.tolist(), strict=True):
            address, device_pitch, _, host_pitch, row_bytes, num_rows = copy
            if num_rows > 1 and device_pitch <= self._max_pitch and host_pitch <= self._max_pitch:
                pitched[device_side]["Device"], pitched[device_side]["Pitch"] = address, device_pitch
                pitched[host_side]["Host"], pitched[host_side]["Pitch"] = host_address, host_pitch
                pitched["WidthInBytes"], pitched["Height"] = row_bytes, num_rows
                status = int(self._functions["cuMemcpy2DAsync"](pitched.ctypes.data, stream))
                if status != SUCCESS:
                    return status
                continue
            # A pitch is the distance of two layers, and may exceed CU_DEVICE_ATTRIBUTE_MAX_PITCH (2 GiB less a byte):
            # with 64 GiB in 32 layers, for example.
            for row in range(num_rows):
                status = self._plain(address + row * device_pitch, host_address + row * host_pitch, row_bytes, stream)
                if status != SUCCESS:
                    return status
        return SUCCESS

    def _plain(self, device_address: int, host_address: int, nbytes: int, stream: int) -> int:
        if self._store:
            return int(self._functions["cuMemcpyDtoHAsync"](host_address, device_address, nbytes, stream))
        return int(self._functions["cuMemcpyHtoDAsync"](device_address, host_address, nbytes, stream))


def _functions(find: Callable[[str, int], int]) -> dict[str, Any]:
    """The driver's functions by name; only those that are `OPTIONAL` may be missing."""
    found: dict[str, Any] = {}
    for name, arguments in SIGNATURES.items():
        if address := find(name, SINCE):
            prototype = ctypes.PYFUNCTYPE if name in KEEP_GIL else ctypes.CFUNCTYPE
            found[name] = prototype(ctypes.c_int, *arguments)(address)
        elif name not in OPTIONAL:
            raise DriverUnusable(f"the CUDA driver has no {name}")
    return found
