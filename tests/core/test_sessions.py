"""Who may attach what: limits of a registration, and memory that belongs to one user."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.grants import LEAST_ROOM, StoreGrant
from kvsidecar.cache.slots import SlotAllocator
from kvsidecar.client import HostBuffer
from kvsidecar.core.access import Access, Identity, Policy, Rule
from kvsidecar.core.job import Job, JobResult
from kvsidecar.core.layout_checks import MAX_REGIONS, MAX_ROWS
from kvsidecar.core.peer import Peer
from kvsidecar.core.registration import MAX_GROUPS, FdAllocation, RangesAllocation, RankRegistration
from kvsidecar.core.sessions import MAX_RANKS, Instances, RankSession
from kvsidecar.device.base import DeviceMemory
from kvsidecar.errors import (
    AccessDenied,
    DeviceError,
    DeviceLost,
    DeviceNotFound,
    ImportRefused,
    InvalidRequest,
    LimitExceeded,
    Refusal,
    Unavailable,
    UnknownPeer,
)
from kvsidecar.protocol.wire import layout_to_wire, namespace_to_wire
from kvsidecar.server.convert import registration_from
from kvsidecar.support import fence
from kvsidecar.support.host_memory import create_file
from kvsidecar.support.memory_limits import PageKind, Pages
from kvsidecar.support.peer import Credentials
from kvsidecar.types import MAX_TEXT_BYTES, Direction, GroupLayout, LookupMode, Outcome, Region
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.copiers import NoProcessCopiers
from tests.harness import NAMESPACE, SECONDS, layout

POOL_BYTES = 1 << 20
CHUNK = 4096
SMALL_PAGES = Pages(PageKind.SMALL, 4096)


@pytest.fixture
def buffer() -> Iterator[HostBuffer]:
    buffer = HostBuffer(1 << 20)
    yield buffer
    buffer.close()


class World:
    """Instances over copiers of the real host device, in this process, and an empty cache."""

    def __init__(self) -> None:
        self.cache = BlockCache(SlotAllocator(POOL_BYTES, POOL_BYTES))
        self.copiers = NoProcessCopiers(store_chunk=CHUNK)
        self.copier = self.copiers.by_uuid["host"]
        self.instances = Instances(self.cache, self.copiers, lambda: 0.0, lambda *_: None, Access(None, owner=0))

    def peer(self, buffer: HostBuffer, *, uid: int) -> Peer:
        known = frozenset({self.copier.pid})
        return self.instances.add_peer(Credentials(1, uid, 1), "", (buffer.fd,), copiers=known)

    def fenced_peer(self, buffer: HostBuffer) -> Peer:
        peer = self.peer(buffer, uid=1)
        peer.fence = fence.create()
        return peer

    def nothing_is_left(self) -> None:
        assert (len(self.instances), self.instances.imported_bytes(), self.copier.sessions) == (0, {}, set())
        assert self.cache.find_space(NAMESPACE, 0) is None
        assert self.copiers.pacing.busy == frozenset()

    async def attach(self, peer: Peer, **changes: Any) -> RankSession:
        registration = RankRegistration(
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
        return world.copiers.pacing.of("host", Direction.STORE), world.copiers.pacing.of("host", Direction.LOAD)

    assert chunks() == (None, None)
    one, two = [await world.attach(world.peer(buffer, uid=1000)) for _ in range(2)]
    assert chunks() == (CHUNK, None)  # copies to the device disturb nobody
    assert world.copiers.pacing.of("another", Direction.STORE) is None
    world.instances.set_idle(one, True)
    assert chunks() == (CHUNK, None)
    world.instances.set_idle(two, True)
    assert chunks() == (None, None)
    world.instances.set_idle(one, False)
    assert chunks() == (CHUNK, None)
    await world.instances.end(one, gone=False)
    assert chunks() == (None, None)


async def test_a_session_ends_right_after_its_copier_has_died(buffer: HostBuffer) -> None:
    """Before the copier's supervision knows. An error there left the session, and its engine waited for the end."""
    world = World()
    one, two = [await world.attach(world.peer(buffer, uid=1000)) for _ in range(2)]
    world.copier.die(noticed=False)
    world.instances.set_idle(one, True)
    await world.instances.end(two, gone=True)  # the last busy one: the pace changes
    await world.instances.end(one, gone=True)
    world.nothing_is_left()


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
    assert world.copier.sessions == {session.id for session in sessions}


async def test_a_refused_user_leaves_nothing_behind(buffer: HostBuffer) -> None:
    world = World()
    first = await world.attach(world.peer(buffer, uid=1000))
    with pytest.raises(AccessDenied):
        await world.attach(world.peer(buffer, uid=1001), namespace=dataclasses.replace(NAMESPACE, model="other"))
    await world.instances.end(first, gone=False)
    assert world.instances.imported_bytes() == {}
    memory = DeviceMemory(0, first.memories[0].nbytes, first.memories[0].key)
    with pytest.raises(ValueError, match="not mapped"):  # the first one's end was the last use
        world.copier.device.release_memory(memory)
    assert world.copier.sessions == set()
    assert world.cache.find_space(NAMESPACE, 0) is None
    assert world.cache.find_space(dataclasses.replace(NAMESPACE, model="other"), 0) is None


async def test_of_two_users_who_attach_the_same_memory_at_once_one_is_refused(buffer: HostBuffer) -> None:
    world = World()
    peers = [world.peer(buffer, uid=uid) for uid in (1000, 1001)]
    results = await asyncio.gather(*(world.attach(peer) for peer in peers), return_exceptions=True)
    assert sorted(type(result).__name__ for result in results) == ["AccessDenied", "RankSession"]


async def test_different_users_may_attach_memory_of_their_own(buffer: HostBuffer) -> None:
    world = World()
    other = HostBuffer(1 << 20)
    await world.attach(world.peer(buffer, uid=1000))
    await world.attach(world.peer(other, uid=1001))
    assert len(world.instances) == 2
    other.close()


async def test_memory_is_unmapped_when_the_jobs_are_over_and_not_before(buffer: HostBuffer) -> None:
    """Under a running copy it would be a fault of the copier's context."""
    world, seen = World(), []
    session = await world.attach(world.peer(buffer, uid=1000))
    world.copier.on_request = seen.append
    job = running(session)
    ending = [asyncio.create_task(world.instances.end(session, gone=False)) for _ in range(2)]
    await asyncio.sleep(0)
    await world.attach(world.peer(buffer, uid=1000))  # what the copier is asked, it does in order
    assert seen == ["open"]
    assert not any(task.done() for task in ending), "the second one waits for the end as well"
    session.remove(job)
    job.end(JobResult(Outcome.DONE), 0.0)
    await asyncio.gather(*ending)
    assert seen == ["open", "close"]


async def test_jobs_of_a_process_that_has_gone_are_cancelled_and_those_of_others_are_finished(
    buffer: HostBuffer,
) -> None:
    world = World()
    for gone in (True, False):
        session = await world.attach(world.peer(buffer, uid=1000))
        job = running(session)
        ending = asyncio.create_task(world.instances.end(session, gone=gone))
        await asyncio.sleep(0)
        assert job.stopped is (Refusal.CANCELLED if gone else None)
        session.remove(job)
        job.end(JobResult(Outcome.DONE), 0.0)
        await ending


def running(session: RankSession) -> Job:
    """A job of this session, which the test ends."""
    job = Job(1, Direction.STORE, [])
    session.add(job)
    return job


async def test_a_process_that_has_gone_leaves_no_lease(buffer: HostBuffer) -> None:
    world = World()
    space = world.cache.open_space(NAMESPACE, 0, 1, 0, 4096)
    hashes = [bytes([each]) * 32 for each in range(2)]
    grant = world.cache.begin_store([(space, 0, hashes)])
    assert isinstance(grant, StoreGrant)
    world.cache.seal_all(grant)
    one, other = (world.peer(buffer, uid=1000) for _ in range(2))
    for peer in (one, other):
        world.cache.lookup_and_lease([(space, hashes)], LookupMode.PREFIX, 0.0, 9.0, peer.token)
    one.fds = ()  # the fixture's
    world.instances.remove_peer(one)
    assert (world.cache.held(one.token), world.cache.held(other.token)) == ((0, 0), (1, LEAST_ROOM))


async def test_a_rank_whose_process_goes_while_its_memory_is_imported_is_not_attached(buffer: HostBuffer) -> None:
    """Nothing would end its session."""
    world = World()
    loop, peer = asyncio.get_running_loop(), world.peer(buffer, uid=1000)
    peer.fds = (os.dup(buffer.fd),)

    async def go() -> None:
        world.instances.remove_peer(peer)

    def goes(request: str) -> None:
        if request == "open":
            asyncio.run_coroutine_threadsafe(go(), loop).result(SECONDS)

    world.copier.after_request = goes
    with pytest.raises(UnknownPeer):
        await world.attach(peer)
    world.nothing_is_left()
    assert peer.fds == (), "its descriptors are closed when nothing uses them any more"


async def test_refused_ranks_do_not_count_against_their_user(buffer: HostBuffer) -> None:
    world = World()
    peer = world.peer(buffer, uid=1000)
    for _ in range(MAX_RANKS):
        with pytest.raises(DeviceNotFound):
            await world.attach(peer, device="no such device")
    assert await world.attach(peer) is not None


async def test_the_groups_of_all_ranks_of_a_user_have_a_limit(
    buffer: HostBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may have a space of its own, in the daemon's memory."""
    monkeypatch.setattr("kvsidecar.core.sessions.MAX_RANK_GROUPS", 5)
    world = World()
    groups = tuple(dataclasses.replace(layout(), group=group) for group in range(3))
    first = await world.attach(world.peer(buffer, uid=1000), groups=groups)
    for _ in range(2 * MAX_RANKS):  # nor does it count as a rank
        with pytest.raises(LimitExceeded, match="5 KV cache groups"):
            await world.attach(world.peer(buffer, uid=1000), groups=groups)
    await world.attach(world.peer(buffer, uid=1000), groups=groups[:2])
    await world.instances.end(first, gone=False)
    await world.attach(world.peer(buffer, uid=1000), groups=groups)


async def test_the_namespaces_that_a_user_leaves_with_blocks_are_that_users(
    buffer: HostBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsidecar.cache.left_spaces.MOST_LEFT", 2)
    world = World()
    for number, uid in enumerate((1000, 1001, 1001, 1001, 1001)):
        namespace = dataclasses.replace(NAMESPACE, model=f"{number}")
        session = await world.attach(world.peer(buffer, uid=uid), namespace=namespace)
        grant = world.cache.begin_store([(session.groups[0].space, 0, [bytes(32)])])
        assert isinstance(grant, StoreGrant)
        world.cache.seal_all(grant)
        await world.instances.end(session, gone=False)
    while world.cache.sweep():
        pass
    assert [each.model for each in world.cache.namespaces] == ["0", "3", "4"]


async def test_a_new_policy_concerns_the_ranks_that_are_attached(buffer: HostBuffer) -> None:
    world = World()
    one, other = [await world.attach(world.peer(buffer, uid=1000)), await world.attach(world.peer(buffer, uid=1000))]
    other.peer.caller = dataclasses.replace(other.peer.caller, identity=Identity(1001))
    rules = Policy((Rule(uids=frozenset({1000}), namespaces=("*",)),))
    world.instances.access = Access(rules, owner=0)
    assert (one.denied, other.denied) == (False, True)
    world.instances.access = Access(None, owner=0)
    assert (one.denied, other.denied) == (False, False)


async def test_a_process_that_the_client_cannot_watch_is_not_used(buffer: HostBuffer) -> None:
    """If the daemon died, that client could not tell when its copies are over."""
    world = World()
    old = world.peer(buffer, uid=1000)
    world.copier.die()
    world.copier.start_again()
    with pytest.raises(Unavailable, match="connect again") as refused:
        await world.attach(old)
    assert refused.value.refusal is Refusal.DEVICE_LOST
    world.nothing_is_left()
    session = await world.attach(world.peer(buffer, uid=1000))
    assert (session.process, session.lost) == (world.copier.pid, "")


async def test_nothing_is_attached_while_the_copier_is_down(buffer: HostBuffer) -> None:
    world = World()
    peer = world.peer(buffer, uid=1000)
    world.copier.die()
    with pytest.raises(DeviceLost, match="SIGKILL"):
        await world.attach(peer)
    world.nothing_is_left()


@pytest.mark.parametrize("when", ["before it has imported", "after it has imported", "before the session is listed"])
@pytest.mark.parametrize("replaced", [False, True])
async def test_a_copier_that_dies_during_a_registration_leaves_nothing_behind(
    buffer: HostBuffer, when: str, replaced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    loop = asyncio.get_running_loop()

    def die() -> None:
        world.copier.die()
        if replaced:
            world.copier.start_again()

    async def in_the_loop() -> None:
        die()

    def now(_name: str) -> None:
        asyncio.run_coroutine_threadsafe(in_the_loop(), loop).result(SECONDS)

    match when:
        case "before it has imported":
            world.copier.on_request = now
        case "after it has imported":
            world.copier.after_request = now
        case _:
            monkeypatch.setattr(
                "kvsidecar.core.sessions.failpoints.hit",
                lambda name: now(name) if name == "attach.after_import" else None,
            )
    with pytest.raises(DeviceError):
        await world.attach(world.peer(buffer, uid=1000))
    world.nothing_is_left()
    assert not list(world.instances)


async def test_a_session_whose_copier_has_been_replaced_ends_and_leaves_the_next_process_alone(
    buffer: HostBuffer,
) -> None:
    world = World()
    first = await world.attach(world.peer(buffer, uid=1000))
    world.copier.die()
    assert first.lost == world.copier.down != ""
    world.copier.start_again()
    second = await world.attach(world.peer(buffer, uid=1000))
    assert (first.lost, second.lost) == ("the copier has been replaced", "")
    await world.instances.end(first, gone=False)
    assert world.copier.sessions == {second.id}
    await world.instances.end(second, gone=False)
    world.nothing_is_left()


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


async def test_a_block_may_have_64_shards(buffer: HostBuffer) -> None:
    """Its list of them, and each step with it, is as long as a client says."""
    world, one = World(), split_into(1, 1)
    with pytest.raises(InvalidRequest, match="num_shards 65 is more than 64"):
        await world.attach(world.peer(buffer, uid=1000), groups=(dataclasses.replace(one, num_shards=65),))


async def test_the_rows_of_all_groups_together_are_limited(buffer: HostBuffer) -> None:
    world = World()
    half = split_into(1, MAX_ROWS // 2 + 1)
    groups = (half, dataclasses.replace(half, group=1))
    with pytest.raises(InvalidRequest, match=f"of all groups have more than {MAX_ROWS} rows"):
        await world.attach(world.peer(buffer, uid=1000), groups=groups)
    session = await world.attach(world.peer(buffer, uid=1000), groups=(half,))
    await world.instances.end(session, gone=False)


def at_the_limits(what: str) -> tuple[GroupLayout, ...]:
    """As large a registration as is allowed, in one way or another."""
    match what:
        case "regions":
            return (split_into(MAX_REGIONS, 1),)
        case "rows":
            return (split_into(2, MAX_ROWS // 2),)
        case "regions and rows":
            return (split_into(MAX_REGIONS, MAX_ROWS // MAX_REGIONS),)
        case _:
            per_group = MAX_REGIONS // MAX_GROUPS
            rows = MAX_ROWS // MAX_GROUPS // per_group
            return tuple(
                dataclasses.replace(split_into(per_group, rows), group=group, num_blocks=3)
                for group in range(MAX_GROUPS)
            )


def split_into(regions: int, rows: int) -> GroupLayout:
    """Rows outermost, and in each row the regions side by side in every block: all spans interleave."""
    stride = 2 * regions
    return GroupLayout(0, 4, 0, 1, tuple(Region(0, 2 * i, 4 * stride, stride, 1, rows) for i in range(regions)))


@pytest.mark.parametrize("what", ["regions", "rows", "regions and rows", "groups"])
@pytest.mark.alone
async def test_the_largest_registration_holds_up_the_event_loop_hardly_longer_than_a_small_one(
    buffer: HostBuffer, what: str
) -> None:
    """Measured in seconds of the processor that the loop's thread takes without a pause, so that what else the machine
    does is not counted."""
    world = World()
    peer = world.peer(buffer, uid=1000)

    async def longest_step(groups: tuple[GroupLayout, ...]) -> float:
        message = pb.Register(
            token=peer.token,
            instance="i",
            namespace=namespace_to_wire(NAMESPACE),
            world_size=1,
            device="host",
            allocations=[pb.Allocation(fd_index=0, size=1 << 20)],
            groups=[layout_to_wire(each) for each in groups],
        )

        async def attach() -> None:
            registration = await world.instances._time.run(registration_from(message))
            await world.instances.end(await world.instances.register(registration), gone=False)

        attaching = asyncio.create_task(attach())
        longest, before = 0.0, time.thread_time()
        while not attaching.done():
            await asyncio.sleep(0)
            now = time.thread_time()
            longest, before = max(longest, now - before), now
        await attaching
        return longest

    small, large = [], []
    for _ in range(7):
        small.append(await longest_step((split_into(64, 1),)))
        large.append(await longest_step(at_the_limits(what)))
    assert min(large) < 16 * min(small)


@pytest.mark.parametrize("steps", range(0, 400, 20))
async def test_a_registration_of_many_groups_that_is_cut_off_leaves_no_space_open(
    buffer: HostBuffer, steps: int
) -> None:
    world = World()
    groups = tuple(dataclasses.replace(layout(), group=group) for group in range(MAX_GROUPS))
    attaching = asyncio.create_task(world.attach(world.peer(buffer, uid=1000), groups=groups))
    for _ in range(steps):
        await asyncio.sleep(0)
    attaching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await world.instances.end(await attaching, gone=False)
    assert [group for group in range(MAX_GROUPS) if world.cache.find_space(NAMESPACE, group) is not None] == []


async def test_a_connection_with_a_fence_takes_one_rank_at_a_time(buffer: HostBuffer) -> None:
    """The next rank's copier would write its numbers over those of the last one."""
    world = World()
    peer = world.fenced_peer(buffer)
    first, second = await asyncio.gather(world.attach(peer), world.attach(peer), return_exceptions=True)
    assert isinstance(first, RankSession)
    assert isinstance(second, InvalidRequest)
    with pytest.raises(InvalidRequest, match="one rank"):
        await world.attach(peer)
    await world.instances.end(first, gone=False)
    await world.instances.end(await world.attach(peer), gone=False)
    peer.fds = ()  # the fixture's
    world.instances.remove_peer(peer)
    assert peer.fence is None


def shares_physical_memory(world: World) -> tuple[Peer, list[int], list[int]]:
    """A process that has sent two memfds as ranges; its descriptors, and what is said of those that are closed."""
    fds = [create_file(1 << 19, SMALL_PAGES) for _ in range(2)]
    for fd in fds:
        os.posix_fallocate(fd, 0, 1 << 19)  # the device imports none whose memory would be the daemon's to pay
    closed: list[int] = []
    known = frozenset({world.copier.pid})
    peer = world.instances.add_peer(Credentials(1, 1, 1), "", tuple(fds), copiers=known, on_closed=closed.append)
    return peer, fds, closed


def is_open(fd: int) -> bool:
    with contextlib.suppress(OSError):
        os.fstat(fd)
        return True
    return False


RANGES = RangesAllocation((0, 1), (1 << 19, 1 << 19), 1 << 20)


@pytest.mark.parametrize("sizes", [(1 << 19, 1 << 19), (1 << 19, 1 << 18)], ids=["accepted", "refused"])
async def test_descriptors_of_physical_memory_are_closed_with_the_answer(sizes: tuple[int, ...]) -> None:
    """One that stayed open would keep the memory allocated when the engine has unmapped it."""
    world = World()
    peer, fds, closed = shares_physical_memory(world)
    allocation = dataclasses.replace(RANGES, sizes=sizes)
    if sizes == RANGES.sizes:
        session = await world.attach(peer, allocations=(allocation,))
        assert session.imported_bytes == 1 << 20
    else:
        with pytest.raises(ImportRefused, match="all of it"):
            await world.attach(peer, allocations=(allocation,))
    assert not any(map(is_open, fds))
    assert closed == [2]
    with pytest.raises(InvalidRequest, match="that a registration has already used: connect again"):
        await world.attach(peer, allocations=(RANGES,))
    assert closed == [2], "once"
    for session in world.instances.remove_peer(peer):
        await world.instances.end(session, gone=True)
    world.nothing_is_left()


async def test_a_process_that_goes_while_its_ranges_are_mapped_leaves_nothing_behind() -> None:
    world = World()
    peer, fds, _ = shares_physical_memory(world)
    session = await world.attach(peer, allocations=(RANGES,))
    assert world.instances.remove_peer(peer) == (session,)
    await world.instances.end(session, gone=True)
    assert not any(map(is_open, fds))
    world.nothing_is_left()


@pytest.mark.parametrize(
    ("indexes", "sizes", "text"),
    [
        ((0, 1), (4096,), "2 descriptors but 1 sizes"),
        ((), (), "at least one range"),
        ((0,), (0,), "each has 1 to"),
        ((0,), (1 << 63,), "each has 1 to"),
    ],
)
async def test_ranges_that_cannot_be_right_are_refused_in_words(
    indexes: tuple[int, ...], sizes: tuple[int, ...], text: str
) -> None:
    world = World()
    peer, fds, _ = shares_physical_memory(world)
    with pytest.raises(InvalidRequest, match=f"allocation 0: .*{text}"):
        await world.attach(peer, allocations=(RangesAllocation(indexes, sizes, 1 << 20),))
    assert [is_open(fd) for fd in fds] == [index not in indexes for index in (0, 1)]
    world.instances.remove_peer(peer)
    world.nothing_is_left()


def test_the_ranges_of_all_allocations_together_are_limited() -> None:
    ranges = pb.Ranges(fd_indexes=[0] * 2049, sizes=[4096] * 2049)
    message = pb.Register(allocations=[pb.Allocation(ranges=ranges, size=4096)] * 2)
    with pytest.raises(InvalidRequest, match="4098 ranges of physical memory is over the limit of 4096"):
        list(registration_from(message))


async def test_descriptors_that_another_registration_may_still_use_stay_open_until_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another client's descriptor could get the number, and its memory be mapped for this one."""
    world = World()
    peer, fds, closed = shares_physical_memory(world)
    opening, go_on = asyncio.Event(), asyncio.Event()
    really = world.copier.open

    async def slow(*arguments: Any) -> Any:
        opening.set()
        await go_on.wait()
        return await really(*arguments)

    monkeypatch.setattr(world.copier, "open", slow)
    slow_one = asyncio.create_task(world.attach(peer, allocations=(RANGES,)))
    await opening.wait()
    with pytest.raises(InvalidRequest, match="2 descriptors but 1 sizes"):
        await world.attach(peer, allocations=(RangesAllocation((0, 1), (4096,), 4096),))
    assert all(map(is_open, fds))
    go_on.set()
    session = await slow_one
    assert not any(map(is_open, fds))
    assert closed == [2]
    world.instances.remove_peer(peer)
    await world.instances.end(session, gone=True)
    world.nothing_is_left()
