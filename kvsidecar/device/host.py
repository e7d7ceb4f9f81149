"""The host as a device: engines without a GPU, and machines without one. Real memory, real pins, real copies.

"Device" memory is a memfd that the engine shares (`memfd_create(2)`), pinning is `mlock(2)`, a copy is a copy.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import re
import struct
import threading
import time
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvsidecar.device.base import (
    CopyCall,
    CopyMark,
    CopyStream,
    Device,
    DeviceEvent,
    DeviceMemory,
    MemfdSource,
    MemorySource,
    PreparedCall,
    RangesSource,
)
from kvsidecar.device.reservation import Reservation
from kvsidecar.errors import CopyFailed, DeviceNotFound, ImportRefused, PinFailed
from kvsidecar.support.host_memory import mmap_at, unmap
from kvsidecar.support.kernel_calls import descriptor_limit
from kvsidecar.support.memory_limits import memlock_limit
from kvsidecar.types import Direction

HOST_UUID: Final = "host"

_F_ADD_SEALS: Final = 1033
_F_GET_SEALS: Final = 1034
_F_SEAL_SHRINK: Final = 0x0002
_F_SEAL_GROW: Final = 0x0004
_STAT_BLOCK: Final = 512
"""Bytes in the unit of ``st_blocks``."""
_READ_WRITE: Final = mmap.PROT_READ | mmap.PROT_WRITE
_PROT_NONE: Final = 0
_MAP_FIXED: Final = 0x10
_RESERVED: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE

# ctypes releases the GIL around each call: mlock of a chunk faults its pages and takes seconds.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.munlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class HostPlatform:
    """One device, ``host``, or several of the same kind. Implements `kvsidecar.device.base.Platform`.

    Args:
        devices: their names; empty for ``host`` alone.

    Raises:
        DeviceNotFound: a name that is neither ``host`` nor ``host-`` and a number.
    """

    name = "host"

    def __init__(self, devices: Sequence[str] = ()) -> None:
        self._devices = {uuid: HostDevice(uuid) for uuid in devices or (HOST_UUID,)}
        for uuid in self._devices:
            if not re.fullmatch(r"host(-\d+)?", uuid):
                raise DeviceNotFound(
                    f"device {uuid} is not visible to the daemon; without a GPU there are host, host-1, ..."
                )

    def device_uuids(self) -> tuple[str, ...]:
        return tuple(self._devices)

    def device(self, uuid: str) -> Device:
        if uuid not in self._devices:
            visible = ", ".join(self._devices)
            raise DeviceNotFound(
                f"device {uuid} is not visible to the daemon; it runs without a GPU and has: {visible}"
            )
        return self._devices[uuid]

    def numa_node(self, uuid: str) -> int | None:
        return None

    def pin_limit(self) -> int | None:
        return memlock_limit()

    def pin(self, address: int, nbytes: int) -> None:
        if _libc.mlock(address, nbytes) == 0:
            return
        problem = os.strerror(ctypes.get_errno())
        # mlock(2) may have locked a part before it failed, and nothing of a refused chunk may stay pinned.
        _libc.munlock(address, nbytes)
        limit = self.pin_limit()
        hint = "" if limit is None else f"; the limit of locked memory is {limit} bytes (ulimit -l, LimitMEMLOCK=)"
        raise PinFailed(f"mlock of {nbytes} bytes: {problem}{hint}")

    def unpin(self, address: int, nbytes: int) -> None:
        _libc.munlock(address, nbytes)

    def close(self) -> None:
        """Does nothing: mappings are released by the sessions that imported them."""


@dataclass(slots=True)
class _HostMapping:
    memory: DeviceMemory
    uses: int
    reservation: Reservation | None = None


def _sealed(fd: int) -> os.stat_result:
    """Status of a memfd that can no longer change its size and has no page beyond it.

    Raises:
        ImportRefused: it is none, or has holes.
    """
    try:
        seals = fcntl.fcntl(fd, _F_GET_SEALS)
    except OSError as error:  # EINVAL: a file system without seals; EBADF
        raise ImportRefused(
            f"the descriptor is not a memfd ({error.strerror}); make it with memfd_create(MFD_ALLOW_SEALING)"
        ) from error
    if not seals & _F_SEAL_SHRINK:
        # If a client truncated a mapped file, the next copy would end in SIGBUS, which kills the daemon.
        raise ImportRefused(
            "the memfd is not sealed against shrinking: create it with MFD_ALLOW_SEALING and, after ftruncate, "
            "set fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK)"
        )
    try:
        # Pages beyond the end would hide holes from `_has_holes`. Afterwards there can be none; now these go.
        fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_GROW)
        os.ftruncate(fd, os.fstat(fd).st_size)
    except OSError as error:
        raise ImportRefused(
            f"the memfd cannot be sealed against growing ({error.strerror}): set F_SEAL_GROW before F_SEAL_SEAL, and "
            "share a descriptor that can be written to"
        ) from error
    stat = os.fstat(fd)
    if stat.st_size == 0:
        raise ImportRefused("the memfd has 0 bytes: ftruncate it to its size before it is sealed and shared")
    if _has_holes(stat):
        raise ImportRefused(
            f"the memfd has memory for {stat.st_blocks * _STAT_BLOCK} of its {stat.st_size} bytes, and the rest would "
            "be taken from the daemon's: posix_fallocate it before it is shared (a kvsidecar-client newer than 0.2.0 "
            "does)"
        )
    return stat


def _has_holes(stat: os.stat_result) -> bool:
    """Whether a `_sealed` memfd lacks pages, which a copy would add at the expense of the copier's memory limit."""
    return stat.st_blocks * _STAT_BLOCK < stat.st_size


def _map_file(address: int | None, nbytes: int, fd: int) -> int:
    """Map a memfd, at this address if one is given. Raises ImportRefused."""
    try:
        return mmap_at(address, nbytes, _READ_WRITE, mmap.MAP_SHARED | (_MAP_FIXED if address else 0), fd)
    except OSError as error:
        raise ImportRefused(
            f"mapping {nbytes} bytes of the memfd read-write: {error.strerror}; F_SEAL_WRITE must not be set"
        ) from error


class _MappedFiles:
    """The engines' memfds that are mapped, by address. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._addresses: list[int] = []
        """Where they begin, sorted."""
        self._files: dict[int, tuple[int, tuple[int, int]]] = {}
        """Where each ends, and its device and inode."""
        self._kept: dict[tuple[int, int], tuple[int, int]] = {}
        """A descriptor of each file and how often it is mapped, by device and inode."""
        self._most = descriptor_limit() // 2

    def add(self, address: int, nbytes: int, fd: int) -> None:
        """Keep a copy of the descriptor of what was mapped here. Raises ImportRefused: there are too many."""
        stat = os.fstat(fd)
        key = stat.st_dev, stat.st_ino
        with self._lock:
            if key not in self._kept:
                if len(self._kept) >= self._most:
                    raise ImportRefused(
                        f"engines on this device share {self._most} memfds, half of what this process may open "
                        "(ulimit -n, LimitNOFILE=): share the memory in fewer"
                    )
                self._kept[key] = os.dup(fd), 0
            ours, count = self._kept[key]
            self._kept[key] = ours, count + 1
            insort(self._addresses, address)
            self._files[address] = address + nbytes, key

    def remove(self, address: int, nbytes: int) -> None:
        """Forget what begins in this range, which is mapped no longer."""
        with self._lock:
            first, end = bisect_left(self._addresses, address), bisect_left(self._addresses, address + nbytes)
            for each in self._addresses[first:end]:
                _, key = self._files.pop(each)
                fd, count = self._kept.pop(key)
                if count > 1:
                    self._kept[key] = fd, count - 1
                else:
                    os.close(fd)
            del self._addresses[first:end]

    def require_memory(self, rows: Iterable[Sequence[int]]) -> None:
        """
        Args:
            rows: of `kvsidecar.device.base.CopyCall`.

        Raises:
            CopyFailed: they lie in a file that has lost pages since it was imported: its owner has punched holes.
        """
        with self._lock:
            used: set[int] = set()
            begin = end = 0
            for address, pitch, _, _, row_bytes, num_rows in rows:
                behind = address + (num_rows - 1) * pitch + row_bytes
                if begin <= address and behind <= end:
                    continue  # in the file of the row before, as most are
                first = max(0, bisect_right(self._addresses, address) - 1)
                for begin in self._addresses[first : bisect_left(self._addresses, behind)]:
                    end, key = self._files[begin]
                    if address < end:
                        used.add(self._kept[key][0])
            if any(_has_holes(os.fstat(fd)) for fd in used):
                raise CopyFailed("the engine has given memory of its memfd back to the kernel (holes)")


class _HostAddresses:
    """Implements `kvsidecar.device.reservation.AddressSpace`."""

    granularity = mmap.PAGESIZE

    def __init__(self, files: _MappedFiles) -> None:
        self._files = files

    def reserve(self, nbytes: int) -> int:
        try:
            return mmap_at(None, nbytes, _PROT_NONE, _RESERVED)
        except OSError as error:
            raise ImportRefused(f"reserving {nbytes} bytes of addresses: {error.strerror}") from error

    def map(self, address: int, fd: int, nbytes: int) -> None:
        size = _sealed(fd).st_size
        if size != nbytes or nbytes % self.granularity:
            raise ImportRefused(
                f"a range was registered with {nbytes} bytes, but its memfd has {size}: register all of it, in whole "
                f"pages of {self.granularity} bytes"
            )
        _map_file(address, nbytes, fd)
        try:
            self._files.add(address, nbytes, fd)
        except ImportRefused:
            self.unmap(address, nbytes)
            raise

    def permit(self, address: int, nbytes: int) -> None:
        """Nothing to do."""

    def unmap(self, address: int, nbytes: int) -> None:
        mmap_at(address, nbytes, _PROT_NONE, _RESERVED | _MAP_FIXED)  # not munmap: the addresses stay reserved
        self._files.remove(address, nbytes)

    def free(self, address: int, nbytes: int) -> None:
        unmap(address, nbytes)


class HostDevice:
    """Implements `kvsidecar.device.base.Device` with memfds. Thread-safe."""

    def __init__(self, uuid: str = HOST_UUID) -> None:
        self.uuid = uuid
        self._lock = threading.Lock()
        self._mappings: dict[bytes, _HostMapping] = {}
        self._files = _MappedFiles()
        self._own = 0

    def import_memory(self, source: MemorySource) -> DeviceMemory:
        if not isinstance(source, MemfdSource):
            raise ImportRefused("this is the device `host`: share a memfd, not a CUDA IPC handle")
        stat = _sealed(source.fd)
        key = struct.pack("=QQ", stat.st_dev, stat.st_ino)  # the mapping keeps the inode, so it is not used again
        with self._lock:
            mapping = self._mappings.get(key)
            if mapping is None:
                address = _map_file(None, stat.st_size, source.fd)
                try:
                    self._files.add(address, stat.st_size, source.fd)
                except ImportRefused:
                    unmap(address, stat.st_size)
                    raise
                mapping = _HostMapping(DeviceMemory(address=address, nbytes=stat.st_size, key=key), uses=0)
                self._mappings[key] = mapping
            mapping.uses += 1
            return mapping.memory

    def import_ranges(self, sources: Sequence[RangesSource]) -> list[DeviceMemory]:
        with self._lock:
            self._own += 1
            reservation = Reservation(_HostAddresses(self._files), sources, self._own)
            for memory in reservation.memories:
                self._mappings[memory.key] = _HostMapping(memory, uses=1, reservation=reservation)
        return reservation.memories

    def release_memory(self, memory: DeviceMemory) -> None:
        with self._lock:
            mapping = self._mappings.get(memory.key)
            if mapping is None:
                raise ValueError("memory is released that is not mapped: released twice, or by another device")
            mapping.uses -= 1
            if mapping.uses == 0:
                del self._mappings[memory.key]
                if mapping.reservation is not None:
                    mapping.reservation.release(mapping.memory)
                else:
                    unmap(mapping.memory.address, mapping.memory.nbytes)
                    self._files.remove(mapping.memory.address, mapping.memory.nbytes)

    def import_event(self, handle: bytes) -> DeviceEvent:
        raise ImportRefused("the device `host` has no events: order stores on the host")

    def allocate(self, nbytes: int) -> DeviceMemory:
        address = mmap_at(None, nbytes, _READ_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with self._lock:
            self._own += 1
            memory = DeviceMemory(address=address, nbytes=nbytes, key=b"own-%d" % self._own)
            self._mappings[memory.key] = _HostMapping(memory, uses=1)
        return memory

    def open_stream(self, direction: Direction) -> CopyStream:
        return HostCopyStream(direction, self._files)


@dataclass(frozen=True, slots=True)
class HostCall:
    call: CopyCall
    pool_address: int


class HostCopyStream:
    """Copies in the calling thread, without the GIL. Implements `kvsidecar.device.base.CopyStream`."""

    def __init__(self, direction: Direction, files: _MappedFiles) -> None:
        self._store = direction is Direction.STORE
        self._files = files

    def prepare(self, call: CopyCall, pool_address: int) -> PreparedCall:
        return HostCall(call, pool_address)

    def issue(self, prepared: PreparedCall, *, alone: bool = False, timed: bool = True) -> CopyMark:
        """Do all copies. Raises CopyFailed: none is done, because they would take memory for what the engine lacks."""
        assert isinstance(prepared, HostCall)
        began = time.perf_counter()
        copies = prepared.call.copies.tolist()
        self._files.require_memory(copies)
        for address, pitch, offset, host_pitch, row_bytes, num_rows in copies:
            host = prepared.pool_address + offset
            if num_rows == 1:
                ctypes.memmove(*((host, address) if self._store else (address, host)), row_bytes)
                continue
            rows = _view(address, num_rows, row_bytes, pitch)
            slot = _view(host, num_rows, row_bytes, host_pitch)
            if self._store:
                np.copyto(slot, rows)
            else:
                np.copyto(rows, slot)
        return HostMark(time.perf_counter() - began)

    def is_done(self) -> bool:
        return True

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True, slots=True)
class HostMark:
    """Everything is over when `HostCopyStream.issue` returns. Implements `kvsidecar.device.base.CopyMark`."""

    took: float

    def is_done(self) -> bool:
        return True

    def seconds(self) -> float:
        return self.took


class _Rows:
    """Memory at an address, for numpy. Only as long-lived as the copy that uses it."""

    def __init__(self, address: int, shape: tuple[int, int], pitch: int) -> None:
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": "|u1",
            "shape": shape,
            "strides": (pitch, 1),
            "data": (address, False),
        }


def _view(address: int, num_rows: int, row_bytes: int, pitch: int) -> npt.NDArray[np.uint8]:
    return np.asarray(_Rows(address, (num_rows, row_bytes), pitch))
