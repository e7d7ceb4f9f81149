"""A registration whose client goes away in the middle of it, and one that names memory twice."""

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
from kvsidecar.core.registration import FdAllocation, RangesAllocation, RankRegistration
from kvsidecar.core.sessions import Instances
from kvsidecar.device.base import DeviceMemory, MemorySource
from kvsidecar.errors import InvalidRequest, UnknownPeer
from kvsidecar.support.peer import Credentials
from kvsidecar.support.tasks import run_all_steps
from kvsidecar.types import GroupLayout, Region
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


async def test_memory_that_is_registered_twice_is_looked_at_as_one() -> None:
    """Two regions at one place would make a load write one over the other."""
    copiers = NoProcessCopiers()
    pid = copiers.by_uuid["host"].pid
    cache = BlockCache(SlotAllocator(1 << 20, 1 << 20))
    instances = Instances(cache, copiers, time.monotonic, lambda *_: None, Access(None, owner=0))
    buffer = HostBuffer(1 << 20)

    def registration(second_offset: int) -> RankRegistration:
        fds = os.dup(buffer.fd), os.dup(buffer.fd)
        peer = instances.add_peer(Credentials(1, 0, 0), "", fds, copiers=frozenset({pid}))
        regions = tuple(Region(number, number * second_offset, 64, 64, 64, 1) for number in range(2))
        allocations = tuple(FdAllocation(number, buffer.nbytes) for number in range(2))
        group = GroupLayout(0, 8, 0, 1, regions)
        return RankRegistration(peer.token, "i", NAMESPACE, 0, 1, "host", allocations, (group,))

    with pytest.raises(InvalidRequest, match="overlap in some block"):
        await instances.register(registration(32))
    await instances.register(registration(8 * 64))
    assert len(instances) == 1


@pytest.mark.parametrize("named", [[(0, 0)], [(0, 1), (1,)]])
def test_physical_memory_that_is_named_twice_is_refused(named: list[tuple[int, ...]]) -> None:
    allocations = tuple(RangesAllocation(each, (4096,) * len(each), 4096 * len(each)) for each in named)
    registration = RankRegistration(b"", "i", NAMESPACE, 0, 1, "host", allocations, (layout(),))
    with pytest.raises(InvalidRequest, match="named twice"):
        run_all_steps(registration.checking())
