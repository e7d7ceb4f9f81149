"""A copy to the device and back, before a copier takes the first one."""

from __future__ import annotations

import mmap
import os
import time
from typing import Final

import numpy as np

from kvsidecar.device.base import COPY, CopyCall, Device, Platform
from kvsidecar.errors import DeviceError
from kvsidecar.support import failpoints, host_memory
from kvsidecar.types import Direction

NBYTES: Final = 64 * 1024
POLL_SECONDS: Final = 50e-6


def self_test(platform: Platform, device: Device) -> None:
    """Copy a random pattern to the device and back. From and to memory of its own: where a copier takes the place of
    another one, the pool is in use.

    Raises:
        DeviceError: it failed or came back different. A copy may still run; the process is to end.
    """
    host = host_memory.mmap_at(
        None, 2 * NBYTES, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    sent, back = host_memory.as_array(host, 2 * NBYTES).reshape(2, NBYTES)
    sent[:] = np.frombuffer(os.urandom(NBYTES), np.uint8)
    platform.pin(host, 2 * NBYTES)
    memory = device.allocate(NBYTES)
    for direction, offset in ((Direction.LOAD, 0), (Direction.STORE, NBYTES)):
        stream = device.open_stream(direction)
        copies = np.array([(memory.address, NBYTES, offset, NBYTES, NBYTES, 1)], COPY)
        mark = stream.issue(
            stream.prepare(CopyCall(copies, batched=False, nbytes=NBYTES), host), alone=True, timed=False
        )
        while not mark.is_done():
            time.sleep(POLL_SECONDS)
        stream.close()
    failpoints.hit("copier.self_test")
    if not np.array_equal(sent, back):
        raise DeviceError(f"the self-test copy to {device.uuid} and back returned different bytes")
    device.release_memory(memory)
    platform.unpin(host, 2 * NBYTES)
    host_memory.unmap(host, 2 * NBYTES)
