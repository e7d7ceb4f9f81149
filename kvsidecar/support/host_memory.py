"""System calls on host memory that Python has no function for: huge pages, populate, NUMA binding.

Through ctypes, which releases the GIL: the event loop goes on while another thread is in here for a second.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

import numpy as np
import numpy.typing as npt

from kvsidecar.support import memory_limits
from kvsidecar.support.memory_limits import PageKind, Pages

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

# Values of asm-generic/mman.h, the same on x86-64 and aarch64; Python's mmap has only some of them.
_PROT_NONE = 0
_PROT_READ_WRITE = 3
_MAP_PRIVATE_ANONYMOUS = 0x22
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MAP_HUGETLB = 0x40000
_MAP_HUGE_SHIFT = 26
_MADV_POPULATE_WRITE = 23
_MPOL_BIND = 2
_SYS_MBIND = {"x86_64": 237, "aarch64": 235}


def _checked(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def mmap_at(address: int | None, nbytes: int, protection: int, flags: int, fd: int = -1) -> int:
    result = _libc.mmap(address, nbytes, protection, flags, fd, 0)
    if result is None or result == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(result)


def unmap(address: int, nbytes: int) -> None:
    _checked(_libc.munmap(address, nbytes))


def advise(address: int, nbytes: int, advice: int) -> None:
    _checked(_libc.madvise(address, nbytes, advice))


def map_pages(nbytes: int, pages: Pages) -> int:
    """Anonymous memory of exactly this size at a multiple of 2 MiB, with the advice that its kind of pages needs."""
    if pages.kind is PageKind.HUGETLB:
        # Without MAP_NORESERVE: the kernel sets the pages aside now, or says at once that there are too few.
        size = pages.nbytes.bit_length() - 1
        return mmap_at(None, nbytes, _PROT_READ_WRITE, _MAP_PRIVATE_ANONYMOUS | _MAP_HUGETLB | size << _MAP_HUGE_SHIFT)
    # More address space than needed, not more memory: PROT_NONE pages are never backed and not charged.
    align = memory_limits.THP_BYTES
    start = mmap_at(None, nbytes + align, _PROT_NONE, _MAP_PRIVATE_ANONYMOUS | _MAP_NORESERVE)
    address = -(-start // align) * align
    try:
        mmap_at(address, nbytes, _PROT_READ_WRITE, _MAP_PRIVATE_ANONYMOUS | _MAP_FIXED)
    except OSError:
        unmap(start, nbytes + align)
        raise
    for piece, end in ((start, address), (address + nbytes, start + nbytes + align)):
        if end > piece:
            unmap(piece, end - piece)
    try:
        advise(address, nbytes, mmap.MADV_HUGEPAGE if pages.kind is PageKind.THP else mmap.MADV_NOHUGEPAGE)
    except OSError:
        # A kernel without transparent huge pages does not know the advice; small pages are what it gives anyway.
        if pages.kind is PageKind.THP:
            unmap(address, nbytes)
            raise
    return address


def populate(address: int, nbytes: int) -> None:
    """Fault pages in, writable. Called by several threads at once.

    Raises:
        OSError: there is no memory.
    """
    try:
        advise(address, nbytes, _MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno == errno.EFAULT:
            raise OSError(error.errno, "no page to be had: too few huge pages, or a cgroup's limit of them") from error
        if error.errno != errno.EINVAL:
            raise
        # Before Linux 5.14. A page that cannot be had now is a SIGBUS or the OOM killer, not an error.
        as_array(address, nbytes)[:: mmap.PAGESIZE] = 0


def bind(address: int, nbytes: int, node: int) -> None:
    """Bind pages that are not faulted in yet to one node. There is no libc wrapper without libnuma."""
    number = _SYS_MBIND.get(os.uname().machine)
    if number is None:
        raise OSError(errno.ENOSYS, f"mbind is not known on {os.uname().machine}")
    words = (ctypes.c_ulong * (node // 64 + 1))()
    words[node // 64] = 1 << node % 64
    # The kernel reads one bit less than it is told (get_nodes in mm/mempolicy.c).
    bits = ctypes.c_ulong(len(words) * 64 + 1)
    arguments = (ctypes.c_void_p(address), ctypes.c_ulong(nbytes), ctypes.c_ulong(_MPOL_BIND), words, bits)
    _checked(_libc.syscall(ctypes.c_long(number), *arguments, ctypes.c_ulong(0)))


def as_array(address: int, nbytes: int) -> npt.NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
