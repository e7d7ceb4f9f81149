"""The bulk limit: one large copy of pinned memory each way, and both at once. Every bandwidth is compared with it."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median

from kvsidecar.bench.driver import Cuda
from kvsidecar.bench.report import Measurement
from kvsidecar.bench.setting import Setting
from kvsidecar.support.units import GiB, MiB

CUDA_BYTES = GiB
ROUNDS = 7
HOST_BYTES, HOST_BYTES_QUICK = 256 * MiB, 32 * MiB


def measure(setting: Setting, out: Measurement) -> None:
    with ExitStack() as stack:
        if setting.cuda is not None:
            nbytes = CUDA_BYTES
            store, load, both = _cuda(setting.cuda, nbytes, stack)
        else:
            nbytes = HOST_BYTES_QUICK if setting.options.quick else HOST_BYTES
            store, load, both = _host(nbytes)
        for direction, copy, moved in (("store", store, nbytes), ("load", load, nbytes), ("both", both, 2 * nbytes)):
            copy()
            seconds = []
            for _ in range(max(ROUNDS, setting.repeat)):
                started = time.perf_counter()
                copy()
                seconds.append(time.perf_counter() - started)
            out.add(
                direction=direction,
                gbps=round(moved / median(seconds) / 1e9, 3),
                best_gbps=round(moved / min(seconds) / 1e9, 3),
                nbytes=nbytes,
            )


Copy = Callable[[], None]


def both_ways(cuda: Cuda | None, nbytes: int, stack: ExitStack) -> Copy:
    """A function that copies ``nbytes`` each way at once, and waits for both."""
    return (_host(nbytes) if cuda is None else _cuda(cuda, nbytes, stack))[2]


def _cuda(cuda: Cuda, nbytes: int, stack: ExitStack) -> tuple[Copy, Copy, Copy]:
    hosts, devices, streams = [], [], []
    for _ in range(2):
        host = cuda.pinned(nbytes)
        stack.callback(host.close)
        device = cuda.alloc(nbytes)
        stack.callback(cuda.free, device)
        stream = cuda.stream()
        stack.callback(stream.close)
        hosts.append(host.address)
        devices.append(device)
        streams.append(stream)

    def store() -> None:
        streams[0].to_host(hosts[0], devices[0], nbytes)
        streams[0].synchronize()

    def load() -> None:
        streams[1].to_device(devices[1], hosts[1], nbytes)
        streams[1].synchronize()

    def both() -> None:
        streams[0].to_host(hosts[0], devices[0], nbytes)
        streams[1].to_device(devices[1], hosts[1], nbytes)
        streams[0].synchronize()
        streams[1].synchronize()

    return store, load, both


def _host(nbytes: int) -> tuple[Copy, Copy, Copy]:
    buffers = [ctypes.create_string_buffer(nbytes) for _ in range(4)]
    for buffer in buffers:
        ctypes.memset(buffer, 1, nbytes)

    def one() -> None:
        ctypes.memmove(buffers[1], buffers[0], nbytes)

    def other() -> None:
        ctypes.memmove(buffers[3], buffers[2], nbytes)

    def both() -> None:
        thread = threading.Thread(target=other)
        thread.start()
        one()
        thread.join()

    return one, one, both
