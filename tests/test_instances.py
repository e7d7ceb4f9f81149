"""Who may attach what: limits of a registration, and memory that belongs to one user."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.slots import SlotAllocator
from kvsidecar.client import HostBuffer
from kvsidecar.device.host import HostPlatform
from kvsidecar.device.hub import DeviceHub
from kvsidecar.errors import AccessDenied, InvalidRequest
from kvsidecar.instances import Instances, Peer, Session
from kvsidecar.policy import Access
from kvsidecar.registration import FdAllocation, Registration
from kvsidecar.types import MAX_TEXT_BYTES, Direction
from tests.harness import NAMESPACE, layout

POOL_BYTES = 1 << 20
CHUNK = 4096


@pytest.fixture
def buffer() -> Iterator[HostBuffer]:
    buffer = HostBuffer(1 << 20)
    yield buffer
    buffer.close()


class World:
    """Instances over the real host device and an empty cache."""

    def __init__(self) -> None:
        self.cache = BlockCache(SlotAllocator(POOL_BYTES, POOL_BYTES))
        self.hub = DeviceHub(HostPlatform(), lambda *_: None, store_chunk=CHUNK)
        self.instances = Instances(self.cache, self.hub, lambda: 0.0, lambda *_: None, Access(None, owner=0))

    def peer(self, buffer: HostBuffer, *, uid: int) -> Peer:
        return self.instances.add_peer(pid=1, uid=uid, gid=1, client="", fds=(buffer.fd,))

    async def attach(self, peer: Peer, **changes: Any) -> Session:
        registration = Registration(
            token=peer.token,
            instance="i",
            namespace=NAMESPACE,
            rank=0,
            world_size=1,
            device="host",
            allocations=(FdAllocation(0, 1 << 20),),
            groups=(layout(),),
        )
        return await self.instances.register(dataclasses.replace(registration, **changes))


async def test_stores_are_paced_while_an_engine_is_at_work_on_their_device(buffer: HostBuffer) -> None:
    world = World()

    def chunks() -> tuple[int | None, int | None]:
        return world.hub.chunk("host", Direction.STORE), world.hub.chunk("host", Direction.LOAD)

    assert chunks() == (None, None)
    one, two = [await world.attach(world.peer(buffer, uid=1000)) for _ in range(2)]
    assert chunks() == (CHUNK, None)  # copies to the device disturb nobody
    assert world.hub.chunk("another", Direction.STORE) is None
    world.instances.set_idle(one, True)
    assert chunks() == (CHUNK, None)
    world.instances.set_idle(two, True)
    assert chunks() == (None, None)
    world.instances.set_idle(one, False)
    assert chunks() == (CHUNK, None)
    await world.instances.end(one, gone=False)
    assert chunks() == (None, None)


async def test_memory_of_one_user_is_refused_to_another_while_it_is_attached(buffer: HostBuffer) -> None:
    world = World()
    first = await world.attach(world.peer(buffer, uid=1000))
    stranger = world.peer(buffer, uid=1001)
    with pytest.raises(AccessDenied, match="by a process of another user"):
        await world.attach(stranger)
    assert len(world.instances) == 1
    await world.instances.end(first, gone=False)
    assert await world.attach(stranger) is not None


async def test_memory_may_be_shared_by_processes_of_one_user(buffer: HostBuffer) -> None:
    world = World()
    sessions = [await world.attach(world.peer(buffer, uid=1000)) for _ in range(2)]
    assert sessions[0].memories == sessions[1].memories


async def test_a_refused_user_leaves_nothing_behind(buffer: HostBuffer) -> None:
    world = World()
    first = await world.attach(world.peer(buffer, uid=1000))
    with pytest.raises(AccessDenied):
        await world.attach(world.peer(buffer, uid=1001), namespace=dataclasses.replace(NAMESPACE, model="other"))
    await world.instances.end(first, gone=False)
    assert world.instances.imported_bytes() == {}
    device = first.device
    with pytest.raises(ValueError, match="not mapped"):  # the first one's end was the last use
        device.release_memory(first.memories[0])
    assert world.cache.find_space(NAMESPACE, 0) is None
    assert world.cache.find_space(dataclasses.replace(NAMESPACE, model="other"), 0) is None


async def test_of_two_users_who_attach_the_same_memory_at_once_one_is_refused(buffer: HostBuffer) -> None:
    world = World()
    peers = [world.peer(buffer, uid=uid) for uid in (1000, 1001)]
    results = await asyncio.gather(*(world.attach(peer) for peer in peers), return_exceptions=True)
    assert sorted(type(result).__name__ for result in results) == ["AccessDenied", "Session"]


async def test_different_users_may_attach_memory_of_their_own(buffer: HostBuffer) -> None:
    world = World()
    other = HostBuffer(1 << 20)
    await world.attach(world.peer(buffer, uid=1000))
    await world.attach(world.peer(other, uid=1001))
    assert len(world.instances) == 2
    other.close()


LONGEST = "é" * (MAX_TEXT_BYTES // 2)
"""Bytes are counted, not characters."""


@pytest.mark.parametrize("field", ["model", "dtype", "kv_layout", "hash_algorithm", "extra"])
def test_every_text_of_a_namespace_is_bounded(field: str) -> None:
    assert dataclasses.replace(NAMESPACE, **{field: LONGEST}).problem() is None
    problem = dataclasses.replace(NAMESPACE, **{field: LONGEST + "x"}).problem()
    assert problem is not None
    assert problem.startswith(f"namespace.{field} has {MAX_TEXT_BYTES + 1} bytes; it may have {MAX_TEXT_BYTES}")


@pytest.mark.parametrize("field", ["instance", "device"])
async def test_every_text_of_a_registration_is_bounded_and_not_echoed(buffer: HostBuffer, field: str) -> None:
    world = World()
    peer = world.peer(buffer, uid=1)
    with pytest.raises(InvalidRequest, match=f"{field} has {MAX_TEXT_BYTES + 1} bytes") as refused:
        await world.attach(peer, **{field: LONGEST + "x"})
    assert "é" not in str(refused.value)
    if field == "instance":
        await world.attach(peer, instance=LONGEST)


async def test_a_namespace_that_is_too_long_is_refused_at_attach(buffer: HostBuffer) -> None:
    world = World()
    with pytest.raises(InvalidRequest, match=r"namespace\.model has"):
        await world.attach(
            world.peer(buffer, uid=1), namespace=dataclasses.replace(NAMESPACE, model="x" * (MAX_TEXT_BYTES + 1))
        )
