"""A registration whose client goes away in the middle of it."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from typing import Any

import pytest

from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.slots import SlotAllocator
from kvsidecar.client import HostBuffer
from kvsidecar.core.access import Access
from kvsidecar.core.registration import FdAllocation, RankRegistration
from kvsidecar.core.sessions import Instances
from kvsidecar.device.base import DeviceMemory, MemorySource
from kvsidecar.errors import UnknownPeer
from kvsidecar.support.peer import Credentials
from tests.copiers import NoProcessCopiers
from tests.harness import NAMESPACE, SECONDS, layout


async def test_descriptors_stay_open_while_a_driver_has_them_in_its_hands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed under it, their numbers could name another client's memory by then."""
    copiers = NoProcessCopiers()
    copier = copiers.by_uuid["host"]
    device: Any = copier.device
    importing, go_on = threading.Event(), threading.Event()
    seen: list[int] = []
    import_memory = device.import_memory

    def slow(source: MemorySource) -> DeviceMemory:
        importing.set()
        assert go_on.wait(SECONDS)
        seen.append(os.fstat(source.fd).st_ino)  # type: ignore[union-attr]
        memory: DeviceMemory = import_memory(source)
        return memory

    monkeypatch.setattr(device, "import_memory", slow)
    errors: list[BaseException] = []
    instances = Instances(
        BlockCache(SlotAllocator(1 << 20, 1 << 20)),
        copiers,
        time.monotonic,
        lambda _, error: errors.append(error),
        Access(None, owner=0),
    )
    buffer = HostBuffer(1 << 20)
    fd = os.dup(buffer.fd)
    peer = instances.add_peer(Credentials(1, 0, 0), "", (fd,), copiers=frozenset({copier.pid}))
    allocations = (FdAllocation(0, buffer.nbytes),)
    registration = RankRegistration(peer.token, "i", NAMESPACE, 0, 1, "host", allocations, (layout(),))
    registering = asyncio.create_task(instances.register(registration))
    assert await asyncio.to_thread(importing.wait, SECONDS)
    instances.remove_peer(peer)
    go_on.set()
    with pytest.raises(UnknownPeer):
        await registering
    assert seen == [os.fstat(buffer.fd).st_ino]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert (len(instances), copier.sessions) == (0, set())
    buffer.close()
