"""NVIDIA GPUs through the CUDA driver API. Import it only where a GPU is wanted: it imports cuda.

Sources: CUDA Driver API, "Initialization", "Primary Context Management", "Memory Management" (cuIpcOpenMemHandle,
cuMemHostRegister); CUDA C++ Programming Guide, "Interprocess Communication".
No kernel is ever launched here: it would be time-sliced against the engine's.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
import uuid as uuids
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cuda.bindings import driver

from kvsidecar.device.base import (
    CopyStream,
    CudaIpcSource,
    Device,
    DeviceEvent,
    DeviceMemory,
    MemorySource,
    RangesSource,
)
from kvsidecar.device.cuda import status as cuda_status
from kvsidecar.device.cuda.status import OK, STICKY, check, describe
from kvsidecar.device.cuda.stream import CudaCopyStream, CudaEvent
from kvsidecar.device.reservation import Reservation
from kvsidecar.device.system import mps_runs, pci_numa_node
from kvsidecar.errors import DeviceError, DeviceNotFound, DriverUnusable, ImportRefused, PinFailed
from kvsidecar.support.cuda_driver import FABRIC_HANDLE_BYTES, IPC_HANDLE_BYTES, fabric_handle
from kvsidecar.types import Direction


class CudaPlatform:
    """All GPUs that the driver shows. Implements `kvsidecar.device.base.Platform`. Thread-safe.

    Args:
        devices: UUIDs or indices of those to use; empty for all.

    Raises:
        DriverUnusable: the driver sees no GPU.
        DeviceNotFound: it does not see one of ``devices``; or that is a MIG device.
    """

    name = "cuda"

    def __init__(self, devices: Sequence[str] = ()) -> None:
        count = cuda_status.initialize()
        if count == 0:
            raise DriverUnusable(
                "the CUDA driver sees no GPU; check nvidia-smi, CUDA_VISIBLE_DEVICES and the container's GPU request"
            )
        self._lock = threading.Lock()
        self._devices: dict[str, CudaDevice] = {}
        self._handles: dict[str, Any] = {}
        for ordinal in range(count):
            handle = check(driver.cuDeviceGet(ordinal), f"opening GPU {ordinal}", DriverUnusable)
            self._handles[_uuid(handle)] = handle
        visible = list(self._handles)
        wanted = [visible[int(each)] if each.isdecimal() and int(each) < count else each for each in devices]
        if wanted:
            self._handles = {uuid: self._find(uuid) for uuid in wanted}

    def device_uuids(self) -> tuple[str, ...]:
        return tuple(self._handles)

    def device(self, uuid: str) -> Device:
        return self._device(uuid)

    def numa_node(self, uuid: str) -> int | None:
        return _numa_node(self._find(uuid))

    def pin_limit(self) -> int | None:
        """No limit of the platform's own: NVIDIA's kernel module does not count RLIMIT_MEMLOCK; cgroups do count."""
        return None

    def pin(self, address: int, nbytes: int) -> None:
        """Register one chunk for the device that was opened. Prefault it and keep chunks small (1 GiB): the call holds
        this process's mmap lock."""
        self._make_current()
        # PORTABLE: pinned for the contexts of all GPUs, also of later ones. With unified addressing (all 64-bit Linux)
        # the device uses the same address, so there is no need for cuMemHostGetDevicePointer.
        (status,) = driver.cuMemHostRegister(address, nbytes, driver.CU_MEMHOSTREGISTER_PORTABLE)
        if status != OK:
            # In confidential computing the GPU may not read the host's memory, in WSL2 not much of it.
            refused = status.name in ("CUDA_ERROR_NOT_SUPPORTED", "CUDA_ERROR_NOT_PERMITTED")
            why = "; this driver cannot register host memory here: see kvsidecar doctor" if refused else ""
            raise PinFailed(f"cuMemHostRegister of {nbytes} bytes: {describe(status)}{why}")

    def unpin(self, address: int, nbytes: int) -> None:
        self._make_current()
        (status,) = driver.cuMemHostUnregister(address)
        # In a lost context every call fails, and the pages are released when the process ends. An error would only
        # keep the caller from releasing the rest.
        if status.name not in STICKY:
            check((status,), f"cuMemHostUnregister of {nbytes} bytes")

    def _make_current(self) -> None:
        """Pinned memory works for every GPU, so any context that there is will do; without one the first is made."""
        try:
            self._device(next(iter(self._devices or self._handles))).make_current()
        except DeviceError as error:
            raise PinFailed(f"no context to pin with: {error}") from error

    def close(self) -> None:
        with self._lock:
            for device in self._devices.values():
                device.close()
            self._devices.clear()

    def _find(self, uuid: str) -> Any:
        handle = self._handles.get(uuid)
        if handle is None:
            visible = ", ".join(self._handles)
            raise DeviceNotFound(f"device {uuid} is not visible to the daemon; visible: {visible}")
        if uuid.startswith("MIG-"):
            raise DeviceNotFound(f"device {uuid} is a MIG device, which the daemon does not support: use whole GPUs")
        return handle

    def _device(self, uuid: str) -> CudaDevice:
        with self._lock:
            device = self._devices.get(uuid)
            if device is None:
                device = self._devices[uuid] = CudaDevice(uuid, self._find(uuid))
            return device


@dataclass(slots=True)
class _CudaMapping:
    memory: DeviceMemory
    imported: bool
    uses: int
    reservation: Reservation | None = None


class CudaDevice:
    """One GPU and its primary context. Implements `kvsidecar.device.base.Device`. Thread-safe.

    A thread that calls a method gets this context as its current one: cuDevicePrimaryCtxRetain does not push it, and
    without it every call ends in CUDA_ERROR_INVALID_CONTEXT.
    """

    def __init__(self, uuid: str, handle: Any) -> None:
        self.uuid = uuid
        self._handle = handle
        self._context = _open_context(uuid, handle)
        self._lock = threading.Lock()
        self._mappings: dict[bytes, _CudaMapping] = {}
        self._own = 0
        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_PITCH
        self.max_pitch = int(check(driver.cuDeviceGetAttribute(attribute, handle), "asking for the maximum pitch"))
        self.ordinal = int(handle)

    def make_current(self) -> None:
        check(driver.cuCtxSetCurrent(self._context), f"using the context of {self.uuid}")

    def import_memory(self, source: MemorySource) -> DeviceMemory:
        if not isinstance(source, CudaIpcSource):
            raise ImportRefused(f"device {self.uuid} takes a CUDA IPC handle, not a memfd")
        if len(source.handle) != IPC_HANDLE_BYTES:
            raise ImportRefused(f"a CUDA IPC handle has {IPC_HANDLE_BYTES} bytes; this one has {len(source.handle)}")
        # The handle is a bearer secret and keys end up in logs, so the key is its digest. Memory that is freed and
        # allocated again gets another handle, so no two allocations share a key.
        key = hashlib.sha256(source.handle).digest()[:16]
        self.make_current()
        with self._lock:
            mapping = self._mappings.get(key)
            if mapping is None:
                address, nbytes = self._open(source.handle)
                mapping = _CudaMapping(DeviceMemory(address, nbytes, key), imported=True, uses=0)
                self._mappings[key] = mapping
            mapping.uses += 1
            return mapping.memory

    def import_ranges(self, sources: Sequence[RangesSource]) -> list[DeviceMemory]:
        self.make_current()
        with self._lock:
            self._own += 1
            reservation = Reservation(_CudaAddresses(self), sources, self._own)
            for memory in reservation.memories:
                self._mappings[memory.key] = _CudaMapping(memory, imported=True, uses=1, reservation=reservation)
        return reservation.memories

    def release_memory(self, memory: DeviceMemory) -> None:
        self.make_current()
        with self._lock:
            mapping = self._mappings.get(memory.key)
            if mapping is None:
                raise ValueError("memory is released that is not mapped: released twice, or by another device")
            mapping.uses -= 1
            if mapping.uses:
                return
            del self._mappings[memory.key]
            # Until this close the memory of a dead engine stays allocated (measured): the next engine has no room.
            if mapping.reservation is not None:
                mapping.reservation.release(mapping.memory)
            elif mapping.imported:
                check(driver.cuIpcCloseMemHandle(mapping.memory.address), "cuIpcCloseMemHandle")
            else:
                check(driver.cuMemFree(mapping.memory.address), "cuMemFree")

    def import_event(self, handle: bytes) -> DeviceEvent:
        if len(handle) != IPC_HANDLE_BYTES:
            raise ImportRefused(f"a CUDA IPC event handle has {IPC_HANDLE_BYTES} bytes; this one has {len(handle)}")
        self.make_current()
        opened = driver.CUipcEventHandle()
        ctypes.memmove(opened.getPtr(), handle, IPC_HANDLE_BYTES)
        status, event = driver.cuIpcOpenEventHandle(opened)
        if status != OK:
            check(driver.cuMemGetInfo()[:1], f"after a refused event, {self.uuid} does not answer")
            raise ImportRefused(
                f"the interprocess event does not open on {self.uuid} ({describe(status)}): events need a /dev/shm "
                "that engine and daemon share, and the same user; without them stores are ordered on the host"
            )
        return CudaEvent(self, event)

    def allocate(self, nbytes: int) -> DeviceMemory:
        self.make_current()
        address = int(check(driver.cuMemAlloc(nbytes), f"allocating {nbytes} bytes on {self.uuid}"))
        with self._lock:
            self._own += 1
            memory = DeviceMemory(address=address, nbytes=nbytes, key=b"own-%d" % self._own)
            self._mappings[memory.key] = _CudaMapping(memory, imported=False, uses=1)
        return memory

    def open_stream(self, direction: Direction) -> CopyStream:
        return CudaCopyStream(self, direction)

    def close(self) -> None:
        """Release the context. Errors do not matter: the process ends."""
        driver.cuDevicePrimaryCtxRelease(self._handle)

    def _open(self, raw: bytes) -> tuple[int, int]:
        """Map the allocation behind a handle: its address here and its true size in bytes."""
        handle = driver.CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), raw, IPC_HANDLE_BYTES)
        lazy = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS  # the only flag there is, and required
        status, pointer = driver.cuIpcOpenMemHandle(handle, int(lazy))
        if status != OK:
            # A bad handle is the client's fault, whatever the driver's status; only a context that does not answer is
            # ours. cuMemGetInfo fails in every context that a sticky error has ended.
            check(driver.cuMemGetInfo()[:1], f"after a refused handle, {self.uuid} does not answer")
            raise ImportRefused(
                f"the CUDA IPC handle does not open on {self.uuid} ({describe(status)}). Likely causes: the memory is "
                "not from cuMemAlloc (that of cuMemCreate is shared by descriptors); it was freed; it lies on another "
                "GPU; engine and daemon have the same PID value in different PID namespaces (share the PID "
                "namespace); their CUDA drivers differ"
            )
        address = int(pointer)
        try:
            return address, self._true_size(address)
        except DeviceError:
            driver.cuIpcCloseMemHandle(address)
            raise

    def _true_size(self, address: int) -> int:
        """Bytes of an opened allocation.

        It may lie on another GPU than the client says: the driver opens it all the same, through peer access, and
        reports it as memory of this GPU (measured: CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL is that of the context that
        opened it). Its copies go through the other GPU, and are right.
        """
        base, nbytes = check(driver.cuMemGetAddressRange(address), "asking for an allocation's size", ImportRefused)
        return int(base) + int(nbytes) - address


class _CudaAddresses:
    """Implements `kvsidecar.device.reservation.AddressSpace`, in the context that is current."""

    def __init__(self, device: CudaDevice) -> None:
        self._uuid = device.uuid
        location = driver.CUmemLocation()
        location.type, location.id = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, device.ordinal
        self._access = driver.CUmemAccessDesc()
        self._access.location = location
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location = location
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        found = driver.cuMemGetAllocationGranularity(properties, least)
        self.granularity = int(check(found, "asking for the granularity of physical memory"))

    def reserve(self, nbytes: int) -> int:
        status, address = driver.cuMemAddressReserve(nbytes, 0, 0, 0)
        self._check(status, f"reserving {nbytes} bytes of addresses")
        return int(address)

    def map(self, address: int, fd: int, nbytes: int) -> None:
        kinds, shared = driver.CUmemAllocationHandleType, fabric_handle(fd)
        if shared is None:
            what = "a descriptor of physical memory, which must be from cuMemExportToShareableHandle and of a GPU that "
            what += "the daemon sees"
            status, handle = driver.cuMemImportFromShareableHandle(fd, kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        elif len(shared) == FABRIC_HANDLE_BYTES:
            what = "a fabric handle, for which the daemon needs the same channel of the IMEX service as the engine"
            fabric = driver.CUmemFabricHandle()
            ctypes.memmove(fabric.getPtr(), shared, FABRIC_HANDLE_BYTES)
            status, handle = driver.cuMemImportFromShareableHandle(fabric.getPtr(), kinds.CU_MEM_HANDLE_TYPE_FABRIC)
        else:
            raise ImportRefused(
                "a memfd of physical memory holds a fabric handle of cuMemExportToShareableHandle: "
                f"{FABRIC_HANDLE_BYTES} bytes"
            )
        self._check(status, f"importing {what}")
        try:
            # With another size than the handle's the driver refuses (measured), so none reaches beyond its memory.
            (status,) = driver.cuMemMap(address, nbytes, 0, handle, 0)
            self._check(status, f"mapping a range that was registered with {nbytes} bytes, which must be all of it")
        finally:
            driver.cuMemRelease(handle)  # the mapping keeps the memory

    def permit(self, address: int, nbytes: int) -> None:
        (status,) = driver.cuMemSetAccess(address, nbytes, [self._access], 1)
        self._check(status, "giving copies access to mapped memory")

    def unmap(self, address: int, nbytes: int) -> None:
        check(driver.cuMemUnmap(address, nbytes), "cuMemUnmap")

    def free(self, address: int, nbytes: int) -> None:
        check(driver.cuMemAddressFree(address, nbytes), "cuMemAddressFree")

    def _check(self, status: Any, what: str) -> None:
        """Raises ImportRefused; DeviceLost if the fault is the context's."""
        if status != OK:
            check(driver.cuMemGetInfo()[:1], f"after refused memory, {self._uuid} does not answer")
            raise ImportRefused(f"{what}: {describe(status)}")


def _open_context(uuid: str, handle: Any) -> Any:
    """The primary context of a GPU: one context per GPU and process may open IPC handles."""
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_MODE
    mode = check(driver.cuDeviceGetAttribute(attribute, handle), "asking for the compute mode", DriverUnusable)
    modes = driver.CUcomputemode
    exclusive = mode == modes.CU_COMPUTEMODE_EXCLUSIVE_PROCESS and not mps_runs()
    if exclusive or mode == modes.CU_COMPUTEMODE_PROHIBITED:
        # Refuse before the context exists: with it, no engine could start.
        name = "EXCLUSIVE_PROCESS" if exclusive else "PROHIBITED"
        raise DriverUnusable(
            f"{uuid} has compute mode {name}, so daemon and engine cannot both use it; "
            f"set it with: nvidia-smi -i {uuid} -c DEFAULT (or run MPS)"
        )
    status, context = driver.cuDevicePrimaryCtxRetain(handle)
    if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        raise DriverUnusable(
            f"{uuid} has no memory left for the daemon's context (about 300 MiB): leave room, for example with a lower "
            "gpu_memory_utilization, or start the daemon first"
        )
    if status != OK:
        raise DriverUnusable(f"no context on {uuid}: {describe(status)}")
    check(driver.cuCtxSetCurrent(context), f"using the context of {uuid}", DriverUnusable)
    # The driver reserves memory for kernels that this process never launches: 527 MiB by default, 267 MiB with these
    # limits (H200). It raises values below its minimum; a refused limit costs memory and nothing else.
    limits = driver.CUlimit
    driver.cuCtxSetLimit(limits.CU_LIMIT_STACK_SIZE, 0)
    driver.cuCtxSetLimit(limits.CU_LIMIT_MALLOC_HEAP_SIZE, 1 << 20)
    driver.cuCtxSetLimit(limits.CU_LIMIT_PRINTF_FIFO_SIZE, 64 << 10)
    return context


def _uuid(handle: Any) -> str:
    """The UUID as nvidia-smi prints it. A MIG device has MIG in its name ("NVIDIA H200 MIG 1g.18gb")."""
    name = check(driver.cuDeviceGetName(128, handle), "asking for a GPU's name", DriverUnusable)
    raw = check(driver.cuDeviceGetUuid(handle), "asking for a GPU's UUID", DriverUnusable)
    return f"{'MIG' if b' MIG ' in name else 'GPU'}-{uuids.UUID(bytes=bytes(raw.bytes))}"


def _numa_node(handle: Any) -> int | None:
    status, bus = driver.cuDeviceGetPCIBusId(32, handle)
    return pci_numa_node(bus.split(b"\0")[0].decode()) if status == OK else None
