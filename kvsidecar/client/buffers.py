"""The engine's KV buffers, in forms that the daemon can open."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from kvsidecar.errors import NotExportable
from kvsidecar.support import cuda_driver
from kvsidecar.support.kernel_calls import needed
from kvsidecar.support.memory_limits import meminfo, memory_cgroups

Descriptor = int | Callable[[], int]
"""A descriptor to send. A number stays the caller's; a function opens one, which is closed once it is sent."""


@dataclass(frozen=True, slots=True)
class PhysicalRange:
    """The memory of one handle of ``cuMemCreate``, by exactly one of ``address`` and ``fd``."""

    size: int
    """Bytes of the whole handle."""
    address: int | None = None
    """Where it is mapped in this process. It is exported for each connection: an open descriptor would keep the memory
    allocated after the engine has unmapped it."""
    fd: int | None = None
    """On the device ``host``: a memfd without holes, sealed against shrinking; stays the caller's."""

    @property
    def descriptor(self) -> Descriptor:
        if self.fd is not None:
            return self.fd
        assert self.address is not None
        return partial(cuda_driver.exported_fd, self.address)


@dataclass(frozen=True, slots=True)
class Allocation:
    """One allocation to share, by exactly one of ``cuda_ipc_handle``, ``fd`` and ``ranges``."""

    size: int
    """Bytes."""
    cuda_ipc_handle: bytes | None = None
    """64 bytes of ``cuIpcGetMemHandle`` on the allocation's base."""
    fd: int | None = None
    """A memfd without holes, sealed against shrinking; stays the caller's."""
    ranges: tuple[PhysicalRange, ...] = ()
    """Memory of the driver's virtual memory management, range after range as mapped here, without a gap."""

    @property
    def descriptors(self) -> tuple[Descriptor, ...]:
        """What must be sent for it, in this order."""
        return tuple(each.descriptor for each in self.ranges) if self.fd is None else (self.fd,)


@dataclass(frozen=True, slots=True)
class KVBuffers:
    """The memory of one rank. Regions index ``allocations``."""

    device: str
    """``GPU-...`` as NVML prints it, or ``host``."""
    allocations: tuple[Allocation, ...]


class HostBuffer:
    """Host memory that can be shared with the daemon: a sealed memfd, mapped here.

    Args:
        nbytes: size; the memory is zero at first.
        name: shown in /proc/PID/maps.

    Raises:
        NotExportable: the kernel refuses to make such memory, or has no more of it.
    """

    _open: ClassVar[dict[int, HostBuffer]] = {}

    def __init__(self, nbytes: int, name: str = "kvsidecar-kv") -> None:
        if nbytes <= 0:
            raise ValueError(f"a buffer of {nbytes} bytes cannot be shared: its size must be above 0")
        available = meminfo().get("MemAvailable")
        if available is not None and nbytes > available:  # the kernel would kill other processes to have it
            raise NotExportable(f"{nbytes} bytes of memory: {available} are available on this machine")
        for limit in memory_cgroups():  # at which the kernel would kill this one
            if nbytes > limit.room:
                raise NotExportable(f"{nbytes} bytes of memory: {limit}")
        self.nbytes = nbytes
        with needed("memfd_create", NotExportable):
            self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # All of its memory now, and charged to this process: the daemon refuses a file with holes.
            os.posix_fallocate(self.fd, 0, nbytes)
        except OSError as error:
            os.close(self.fd)
            raise NotExportable(f"{nbytes} bytes of memory: {error.strerror}") from error
        # Without the seal a client could truncate the file under the daemon's copy: SIGBUS in the daemon.
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self.memory = mmap.mmap(self.fd, nbytes)
        """The bytes, for ``numpy.frombuffer`` and ``torch.frombuffer``."""
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self._open[self.address] = self

    def kv_buffers(self) -> KVBuffers:
        """This buffer as the only allocation of a rank on the host device."""
        return KVBuffers("host", (Allocation(self.nbytes, fd=self.fd),))

    @classmethod
    def holding(cls, address: int) -> HostBuffer | None:
        """The open buffer that contains this address, or None."""
        for buffer in cls._open.values():
            if buffer.address <= address < buffer.address + buffer.nbytes:
                return buffer
        return None

    def close(self) -> None:
        """Free the memory.

        Raises:
            BufferError: arrays or tensors of `memory` still exist; nothing was freed.
        """
        self.memory.close()
        self._open.pop(self.address, None)
        os.close(self.fd)
