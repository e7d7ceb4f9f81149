"""What threads of other processes have done so far, as the kernel counts it: time, instructions, system calls."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

Counter = Callable[[], float]
HARDWARE, TRACEPOINT = 0, 2
INSTRUCTIONS = 1
EXCLUDE_KERNEL = 1 << 5
_PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}
_TRACEPOINT = Path("/sys/kernel/tracing/events/raw_syscalls/sys_enter/id")


def threads_of(pid: int) -> list[int]:
    return [int(each.name) for each in Path(f"/proc/{pid}/task").iterdir()]


def perf_counter(stack: ExitStack, kind: int, event: int, threads: Sequence[int], flags: int = 0) -> Counter | None:
    """A counter of `perf_event_open`, or None where the kernel does not allow or know it."""
    number = _PERF_EVENT_OPEN.get(platform.machine())
    if number is None:
        return None
    attributes = struct.pack("=IIQQQQQIIQ", kind, 64, event, 0, 0, 0, flags, 0, 0, 0)
    call, descriptors = ctypes.CDLL(None, use_errno=True).syscall, []
    for thread in threads:
        descriptor = call(*map(ctypes.c_long, (number,)), attributes, *map(ctypes.c_long, (thread, -1, -1, 8)))
        if descriptor < 0:
            return None
        stack.callback(os.close, descriptor)
        descriptors.append(descriptor)
    return lambda: sum(int.from_bytes(os.read(each, 8), "little") for each in descriptors)


def instructions(stack: ExitStack, threads: Sequence[int]) -> Counter | None:
    """Those of the kernel, too, where that is allowed; in thousands."""
    for flags in (0, EXCLUDE_KERNEL):
        if (counted := perf_counter(stack, HARDWARE, INSTRUCTIONS, threads, flags)) is not None:
            return lambda: counted() / 1000
    return None


def microseconds(threads: Sequence[int]) -> Counter:
    """Time of processors."""
    files = [Path(f"/proc/{each}/task/{each}/schedstat") for each in threads]
    return lambda: sum(int(each.read_text().split()[0]) for each in files) / 1000


def system_calls(stack: ExitStack, thread: int) -> Counter | None:
    """None where only root, or nobody, may count them."""
    try:
        event = int(_TRACEPOINT.read_text())
    except OSError:
        return None
    return perf_counter(stack, TRACEPOINT, event, [thread])


def reads_and_writes(thread: int) -> Counter:
    """The system calls that the kernel counts for everybody: neither those that wait nor send and recv are."""
    file = Path(f"/proc/{thread}/task/{thread}/io")
    return lambda: sum(int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith("sysc"))
