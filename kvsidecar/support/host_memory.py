"""System calls on host memory that Python has no function for: mapping, huge pages, populate, NUMA binding.

Through ctypes, which releases the GIL: the event loop goes on while another thread is in here for a second.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
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
_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
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


def create_file(nbytes: int, pages: Pages) -> int:
    """A memfd of exactly this size, sealed: whoever gets it can neither cut it off under a copy nor let it grow."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    if pages.kind is PageKind.HUGETLB:
        flags |= os.MFD_HUGETLB | (pages.nbytes.bit_length() - 1) << os.MFD_HUGE_SHIFT
    fd = os.memfd_create("kvsidecar-pool", flags)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError:
        os.close(fd)
        raise
    return fd


def map_file(fd: int, nbytes: int, pages: Pages) -> int:
    """Map all of a file of `create_file` at a multiple of 2 MiB, with the advice that its kind of pages needs."""
    if pages.kind is PageKind.HUGETLB:
        # Without MAP_NORESERVE: the kernel sets the pages aside now, or says at once that there are too few.
        return mmap_at(None, nbytes, _PROT_READ_WRITE, mmap.MAP_SHARED, fd)
    # More address space than needed, not more memory: PROT_NONE pages are never backed and not charged.
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
        # A kernel without transparent huge pages does not know the advice; small pages are what it gives anyway.
        if pages.kind is PageKind.THP:
            unmap(address, nbytes)
            raise
    return address


def populate(address: int, nbytes: int, kind: PageKind) -> int:
    """Fault pages in, writable. Called by several threads at once.

    Args:
        kind: with `PageKind.THP`, whole ranges of 2 MiB become huge pages as far as the kernel has any.

    Returns:
        Bytes that have small pages, though huge ones were asked for.

    Raises:
        OSError: there is no memory.
    """
    small = _collapse(address, nbytes) if kind is PageKind.THP else 0
    try:
        advise(address, nbytes, _MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno == errno.EFAULT:
            raise OSError(error.errno, "no page to be had: too few huge pages, or a cgroup's limit of them") from error
        if error.errno != errno.EINVAL:
            raise
        # Before Linux 5.14. A page that cannot be had now is a SIGBUS or the OOM killer, not an error.
        as_array(address, nbytes)[:: mmap.PAGESIZE] = 0
    return small


def _collapse(address: int, nbytes: int) -> int:
    """Give whole ranges of 2 MiB huge pages. Returns the bytes that stay small.

    Shared memory gets huge pages by faults only where ``shmem_enabled`` says so, and by default it says never.
    MADV_COLLAPSE does not ask it. It wants something to collapse, so one small page of each range is faulted in first;
    the kernel clears the rest of the huge page. (Measured on a busy core: 0.1 s/GiB, against 3.9 where all small pages
    were faulted in before.)
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
        # No huge page is free, a page was in use at that moment, or the kernel does not know the call: small pages do.
        return nbytes
    return nbytes - (end - first)


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
