"""What only the host device has: memfds that could hurt the daemon, and the limit of locked memory."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvsidecar.device.base import MemfdSource
from kvsidecar.device.host import HostDevice, HostPlatform
from kvsidecar.errors import ImportRefused, PinFailed
from tests.device.exporter import F_ADD_SEALS, F_SEAL_SHRINK
from tests.marks import processes

F_SEAL_WRITE = 8
PAGE = mmap.PAGESIZE


@contextmanager
def memfd(nbytes: int, seals: int) -> Iterator[int]:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, F_ADD_SEALS, seals)
        yield fd
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("nbytes", "seals", "text"),
    [
        (PAGE, 0, "not sealed against shrinking.*F_ADD_SEALS, F_SEAL_SHRINK"),
        (0, F_SEAL_SHRINK, "0 bytes"),
        (PAGE, F_SEAL_SHRINK | F_SEAL_WRITE, "F_SEAL_WRITE must not be set"),
    ],
)
def test_a_memfd_that_could_hurt_is_refused(nbytes: int, seals: int, text: str) -> None:
    with memfd(nbytes, seals) as fd, pytest.raises(ImportRefused, match=text):
        HostDevice().import_memory(MemfdSource(fd))


def test_a_client_cannot_truncate_what_is_mapped() -> None:
    device = HostDevice()
    with memfd(2 * PAGE, F_SEAL_SHRINK) as fd:
        memory = device.import_memory(MemfdSource(fd))
        with pytest.raises(PermissionError):
            os.ftruncate(fd, PAGE)
        os.ftruncate(fd, 8 * PAGE)  # growing harms nobody, and what is mapped stays what it was
        assert device.import_memory(MemfdSource(fd)) == memory
        assert memory.nbytes == 2 * PAGE
        device.release_memory(memory)
        device.release_memory(memory)


def test_the_descriptor_stays_the_callers() -> None:
    device = HostDevice()
    descriptors = len(os.listdir("/proc/self/fd"))
    with memfd(PAGE, F_SEAL_SHRINK) as fd:
        memory = device.import_memory(MemfdSource(fd))
        assert os.fstat(fd).st_size == PAGE
    assert len(os.listdir("/proc/self/fd")) == descriptors
    ctypes.memset(memory.address, 1, PAGE)  # the mapping lives without it
    device.release_memory(memory)


def test_a_refused_pin_leaves_nothing_pinned() -> None:
    def locked() -> str:
        return next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmLck:"))

    pages = mmap.mmap(-1, 4 * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    before = locked()
    libc = ctypes.CDLL(None)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    assert libc.munmap(address + 2 * PAGE, PAGE) == 0  # a hole: mlock locks what lies before it, then fails
    with pytest.raises(PinFailed, match=f"mlock of {4 * PAGE} bytes: Cannot allocate memory"):
        HostPlatform().pin(address, 4 * PAGE)
    assert locked() == before


@processes
def test_the_pin_limit_is_what_mlock_enforces() -> None:
    script = (
        "import os, resource, mmap, ctypes\n"
        "from kvsidecar.device.host import HostPlatform\n"
        "from kvsidecar.errors import PinFailed\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))\n"
        "if os.geteuid() == 0: os.setuid(65534)\n"
        "platform = HostPlatform()\n"
        "print(platform.pin_limit())\n"
        "memory = mmap.mmap(-1, 131072)\n"
        "address = ctypes.addressof(ctypes.c_char.from_buffer(memory))\n"
        "platform.pin(address, 65536)\n"
        "platform.unpin(address, 65536)\n"
        "try: platform.pin(address, 131072)\n"
        "except PinFailed as error: print(error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30)
    limit, refusal = ran.stdout.splitlines()
    assert limit == "65536"
    assert "the limit of locked memory is 65536 bytes (ulimit -l, LimitMEMLOCK=)" in refusal
