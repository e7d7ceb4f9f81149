"""System calls on host memory for which Python has no function: mapping, huge pages, populate, NUMA binding.

ctypes releases the GIL: the event loop continues while another thread spends a second in here.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import struct
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvsidecar.support import memory_limits
from kvsidecar.support.memory_limits import PageKind, Pages

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

# From asm-generic/mman.h, the same on x86-64 and aarch64; Python's mmap has only some of them.
_PROT_NONE = 0
_PROT_READ_WRITE = 3
_MAP_PRIVATE_ANONYMOUS = 0x22
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
_MPOL_BIND = 2
_SYS_MBIND = {"x86_64": 237, "aarch64": 235}
# From linux/magic.h.
_TMPFS_MAGIC = 0x01021994
_HUGETLBFS_MAGIC = 0x958458F6


def _check(call: str, succeeded: bool) -> None:
    if not succeeded:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def mmap_at(address: int | None, nbytes: int, protection: int, flags: int, fd: int = -1) -> int:
    result = _libc.mmap(address, nbytes, protection, flags, fd, 0)
    _check("mmap", result not in (None, ctypes.c_void_p(-1).value))
    return int(result)


def unmap(address: int, nbytes: int) -> None:
    _check("munmap", _libc.munmap(address, nbytes) == 0)


def advise(address: int, nbytes: int, advice: int) -> None:
    _check("madvise", _libc.madvise(address, nbytes, advice) == 0)


def huge_page_bytes(fd: int) -> int | None:
    """Size of the explicit huge pages of a file or directory in memory; 0 if it has none (tmpfs, a memfd), None if it
    is not in memory."""
    found = ctypes.create_string_buffer(256)  # struct statfs begins with two words: the type and the block size
    _check("fstatfs", _libc.fstatfs(fd, found) == 0)
    kind, block_bytes = struct.unpack_from("@lL", found)
    if kind & 0xFFFFFFFF == _HUGETLBFS_MAGIC:
        return int(block_bytes)
    return 0 if kind == _TMPFS_MAGIC else None


def create_file(nbytes: int, pages: Pages, name: str = "kvsidecar-pool") -> int:
    """Create a memfd of exactly this size. It is sealed: no receiver can truncate it during a copy, or grow it."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    if pages.kind is PageKind.HUGETLB:
        flags |= os.MFD_HUGETLB | (pages.nbytes.bit_length() - 1) << os.MFD_HUGE_SHIFT
    fd = os.memfd_create(name, flags)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError:
        os.close(fd)
        raise
    return fd


def map_file(fd: int, nbytes: int, pages: Pages) -> int:
    """Map a whole file in memory, aligned to 2 MiB, with the madvise for its kind of pages."""
    if pages.kind is PageKind.HUGETLB:
        # Without MAP_NORESERVE: the kernel reserves the pages now, or fails at once if there are too few.
        return mmap_at(None, nbytes, _PROT_READ_WRITE, mmap.MAP_SHARED, fd)
    # Reserves extra address space but no memory: PROT_NONE pages are neither backed nor charged.
    align = memory_limits.THP_BYTES
    start = mmap_at(None, nbytes + align, _PROT_NONE, _MAP_PRIVATE_ANONYMOUS | _MAP_NORESERVE)
    address = -(-start // align) * align
    try:
        mmap_at(address, nbytes, _PROT_READ_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd)
    except OSError:
        unmap(start, nbytes + align)
        raise
    for piece, end in ((start, address), (address + nbytes, start + nbytes + align)):
        if end > piece:
            unmap(piece, end - piece)
    try:
        advise(address, nbytes, mmap.MADV_HUGEPAGE if pages.kind is PageKind.THP else mmap.MADV_NOHUGEPAGE)
    except OSError:
        # A kernel without transparent huge pages rejects the advice, and uses small pages anyway.
        if pages.kind is PageKind.THP:
            unmap(address, nbytes)
            raise
    return address


class FileInMemory(Protocol):
    """What a process must know of a file to map it."""

    @property
    def fd(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def pages(self) -> Pages: ...


def facts_of(file: FileInMemory) -> dict[str, Any]:
    """All but its descriptor, for another process, as JSON: see `map_by_facts`."""
    return {"nbytes": file.nbytes, "page_kind": file.pages.kind.value, "page_bytes": file.pages.nbytes}


def map_by_facts(fd: int, facts: dict[str, Any]) -> npt.NDArray[np.uint8]:
    """Map a file of another process, which no core dump shows."""
    nbytes, pages = facts["nbytes"], Pages(PageKind(facts["page_kind"]), facts["page_bytes"])
    address = map_file(fd, nbytes, pages)
    advise(address, nbytes, mmap.MADV_DONTDUMP)
    return as_array(address, nbytes)


def populate(address: int, nbytes: int, kind: PageKind) -> int:
    """Fault in writable pages. Thread-safe.

    Args:
        kind: with `PageKind.THP`, whole ranges of 2 MiB become huge pages if the kernel has any.

    Returns:
        Bytes that got small pages instead of huge ones.

    Raises:
        OSError: out of memory.
    """
    small = _collapse(address, nbytes) if kind is PageKind.THP else 0
    try:
        advise(address, nbytes, _MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno == errno.EFAULT:
            text = "no page available: too few huge pages, a cgroup limits them, or the directory of the pool is full"
            raise OSError(error.errno, text) from error
        if error.errno != errno.EINVAL:
            raise
        # Before Linux 5.14. If there is no memory, the result is SIGBUS or the OOM killer, not an error.
        # What an earlier daemon has left in the pages must stay.
        as_array(address, nbytes)[:: mmap.PAGESIZE] |= 0
    return small


def _collapse(address: int, nbytes: int) -> int:
    """Collapse whole ranges of 2 MiB into huge pages. Returns the bytes that keep small pages.

    Page faults give shared memory huge pages only if ``shmem_enabled`` allows it, and the default is never.
    MADV_COLLAPSE ignores that setting. It needs at least one page to collapse, so one small page of each range is
    faulted in first; the kernel clears the rest of the huge page. (Measured on a busy core: 0.1 s/GiB; 3.9 s/GiB if all
    small pages are faulted in first.)
    """
    huge = memory_limits.THP_BYTES
    first, end = -(-address // huge) * huge, (address + nbytes) // huge * huge
    if end <= first:
        return nbytes
    try:
        for piece in range(first, end, huge):
            advise(piece, mmap.PAGESIZE, _MADV_POPULATE_WRITE)
        advise(first, end - first, _MADV_COLLAPSE)
    except OSError:
        # No huge page is free, a page was in use at that moment, or the kernel is too old: use small pages.
        return nbytes
    return nbytes - (end - first)


def bind(address: int, nbytes: int, node: int) -> None:
    """Bind pages that are not faulted in yet to one NUMA node. libc has no wrapper of mbind without libnuma."""
    number = _SYS_MBIND.get(os.uname().machine)
    if number is None:
        raise OSError(errno.ENOSYS, f"the number of the system call mbind is unknown on {os.uname().machine}")
    words = (ctypes.c_ulong * (node // 64 + 1))()
    words[node // 64] = 1 << node % 64
    # The kernel reads one bit less than this number (get_nodes in mm/mempolicy.c).
    bits = ctypes.c_ulong(len(words) * 64 + 1)
    arguments = (ctypes.c_void_p(address), ctypes.c_ulong(nbytes), ctypes.c_ulong(_MPOL_BIND), words, bits)
    _check("mbind", _libc.syscall(ctypes.c_long(number), *arguments, ctypes.c_ulong(0)) == 0)


def zero(address: int, nbytes: int) -> None:
    ctypes.memset(address, 0, nbytes)


def as_array(address: int, nbytes: int) -> npt.NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
