"""What only the host device has: memfds that could hurt the daemon, and the limit of locked memory."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvsidecar.device import host
from kvsidecar.device.base import COPY, CopyCall, DeviceMemory, MemfdSource, RangesSource
from kvsidecar.device.host import HostDevice, HostPlatform
from kvsidecar.errors import CopyFailed, ImportRefused, PinFailed
from kvsidecar.types import Direction
from tests.device.exporter import F_ADD_SEALS, F_SEAL_SHRINK
from tests.marks import processes

F_SEAL_WRITE = 8
FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2
PAGE = mmap.PAGESIZE


@contextmanager
def memfd(nbytes: int, seals: int) -> Iterator[int]:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        if nbytes:
            os.posix_fallocate(fd, 0, nbytes)
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


def test_a_client_cannot_change_the_size_of_what_is_mapped() -> None:
    device = HostDevice()
    with memfd(2 * PAGE, F_SEAL_SHRINK) as fd:
        memory = device.import_memory(MemfdSource(fd))
        for size in (PAGE, 8 * PAGE):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
        assert device.import_memory(MemfdSource(fd)) == memory
        assert memory.nbytes == 2 * PAGE
        device.release_memory(memory)
        device.release_memory(memory)


def allocate(fd: int, mode: int, offset: int, nbytes: int) -> None:
    """fallocate(2), which Python does not have."""
    call = ctypes.CDLL(None, use_errno=True).fallocate
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if call(fd, mode, offset, nbytes):
        raise OSError(ctypes.get_errno(), "fallocate")


def punch(fd: int, offset: int, nbytes: int) -> None:
    """Give memory of a file back to the kernel."""
    allocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, nbytes)


def test_a_memfd_with_holes_would_take_the_daemons_memory_and_is_refused() -> None:
    with memfd(8 * PAGE, F_SEAL_SHRINK) as fd:
        punch(fd, 3 * PAGE, PAGE)
        with pytest.raises(ImportRefused, match=f"memory for {7 * PAGE} of its {8 * PAGE} bytes.*posix_fallocate"):
            HostDevice().import_memory(MemfdSource(fd))


def test_pages_beyond_the_end_of_a_memfd_hide_no_hole() -> None:
    device = HostDevice()
    with memfd(8 * PAGE, F_SEAL_SHRINK) as fd:
        allocate(fd, FALLOC_FL_KEEP_SIZE, 8 * PAGE, PAGE)
        punch(fd, 3 * PAGE, PAGE)
        with pytest.raises(ImportRefused, match="posix_fallocate"):
            device.import_memory(MemfdSource(fd))
        allocate(fd, 0, 0, 8 * PAGE)
        device.release_memory(device.import_memory(MemfdSource(fd)))
        with pytest.raises(PermissionError):
            allocate(fd, FALLOC_FL_KEEP_SIZE, 8 * PAGE, PAGE)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("ranges", [False, True])
def test_a_copy_takes_no_memory_for_what_an_engine_has_given_back(direction: Direction, ranges: bool) -> None:
    device = HostDevice()
    stream = device.open_stream(direction)
    pool = np.zeros(8 * PAGE, np.uint8)

    def copy(memory: DeviceMemory, offset: int, num_rows: int = 2) -> None:
        copies = np.array([(memory.address + offset, 2 * PAGE, 0, PAGE, PAGE, num_rows)], COPY)
        stream.issue(stream.prepare(CopyCall(copies, False, PAGE * num_rows), pool.ctypes.data))

    with memfd(8 * PAGE, F_SEAL_SHRINK) as fd, memfd(8 * PAGE, F_SEAL_SHRINK) as other:
        if ranges:
            mine, neighbour = device.import_ranges([RangesSource(((each, 8 * PAGE),)) for each in (fd, other)])
        else:
            mine, neighbour = (device.import_memory(MemfdSource(each)) for each in (fd, other))
        copy(mine, 0)
        punch(fd, 5 * PAGE, PAGE)
        for offset in (0, 4 * PAGE):
            with pytest.raises(CopyFailed, match="holes"):
                copy(mine, offset)
        assert os.fstat(fd).st_blocks * 512 == 7 * PAGE
        copy(neighbour, 4 * PAGE)
        scratch = device.allocate(8 * PAGE)
        copy(scratch, 0)
        for memory in (mine, neighbour, scratch):
            device.release_memory(memory)


@pytest.mark.parametrize("ranges", [False, True])
def test_more_files_than_the_process_may_keep_are_refused_and_nothing_stays(
    ranges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "descriptor_limit", lambda: 4)
    device, descriptors = HostDevice(), len(os.listdir("/proc/self/fd"))
    with ExitStack() as stack:
        fds = [stack.enter_context(memfd(PAGE, F_SEAL_SHRINK)) for _ in range(3)]
        kept = [device.import_memory(MemfdSource(fd)) for fd in (*fds[:2], fds[0])]

        def take_one_more() -> object:
            if ranges:
                return device.import_ranges([RangesSource(((fds[0], PAGE), (fds[2], PAGE)))])
            return device.import_memory(MemfdSource(fds[2]))

        with pytest.raises(ImportRefused, match="share 2 memfds, half of what this process may open"):
            take_one_more()
        device.release_memory(kept[1])
        kept[1] = device.import_memory(MemfdSource(fds[2]))
        for memory in kept:
            device.release_memory(memory)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_the_descriptor_stays_the_callers() -> None:
    device = HostDevice()
    descriptors = len(os.listdir("/proc/self/fd"))
    with memfd(PAGE, F_SEAL_SHRINK) as fd:
        memory = device.import_memory(MemfdSource(fd))
        assert os.fstat(fd).st_size == PAGE
    ctypes.memset(memory.address, 1, PAGE)  # the mapping lives without it
    device.release_memory(memory)
    assert len(os.listdir("/proc/self/fd")) == descriptors


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
