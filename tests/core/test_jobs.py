"""What a job does to the cache when its copy succeeds, fails, or ends with its copier."""

from __future__ import annotations

import asyncio
import gc
import hashlib
from collections.abc import AsyncIterator, Callable
from typing import cast

import numpy as np
import pytest

from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.grants import StoreGrant
from kvsidecar.cache.slots import SlotAllocator
from kvsidecar.copier.link import Copying, Imported
from kvsidecar.copier.messages import Done, Ended
from kvsidecar.core.access import Caller, Grant
from kvsidecar.core.checksums import SAMPLE, Checksums
from kvsidecar.core.job import Job, JobBlocks, JobResult
from kvsidecar.core.jobs import MANY_JOBS, UNEXPECTED, JobRunner
from kvsidecar.core.metrics import Metrics
from kvsidecar.core.peer import Peer
from kvsidecar.core.readiness import DaemonReadiness
from kvsidecar.core.registration import RankRegistration
from kvsidecar.core.sessions import RankSession, SessionGroup
from kvsidecar.core.zeroing import Zeroing
from kvsidecar.errors import Refusal
from kvsidecar.support.cpu_sleep import SleepGuard
from kvsidecar.support.loop_time import LoopTime
from kvsidecar.support.steps import Steps
from kvsidecar.support.tasks import TaskSet
from kvsidecar.types import Direction, Eviction, GroupLayout, LookupMode, Namespace, Outcome, Region, Verify
from tests.cache.integrity import check_integrity
from tests.copiers import HeldCopies, NoProcessCopiers
from tests.failpoints import active
from tests.harness import SECONDS, eventually_in_loop

NAMESPACE = Namespace("m", "bf16", "LBNHC", 16, 1, 1, "sha256")
SLOT = 4096
SLOTS = 4


class Guard(SleepGuard):
    """Counts how often it was told to keep awake."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.times = 0

    def keep_awake(self) -> None:
        self.times += 1


class World:
    """A cache of four slots, one session with one group, and a copier in the test's hands."""

    def __init__(
        self, verify: Verify = Verify.ALWAYS, zeroing: object = None, eviction: Eviction = Eviction.LRU
    ) -> None:
        self.cache = BlockCache(SlotAllocator(SLOTS * SLOT, SLOTS * SLOT), eviction=eviction)
        self.copiers = NoProcessCopiers()
        self.copier = self.copiers.by_uuid["host"]
        self.pool = np.zeros(SLOTS * SLOT, np.uint8)
        self.copier.pool = self.pool
        self.copier.start_again()
        self.metrics = Metrics("host")
        self.readiness = DaemonReadiness(SLOTS * SLOT)
        self.readiness.pinning()
        self.readiness.become_ready()
        self.guard = Guard()
        self.numbers = 0
        self.answers: list[JobResult] = []
        self.runner = JobRunner(
            self.cache, self.copiers, self.readiness, self.metrics, lambda: 0.0,
            later=Steps(LoopTime(seconds=0.0)).later, checksums=Checksums(verify, self.cache), guard=self.guard,
            zeroing=cast("Zeroing | None", zeroing),
        )  # fmt: skip
        self.space = self.cache.open_space(NAMESPACE, 0, 1, 0, SLOT)
        layout = GroupLayout(0, 8, 0, 1, (Region(0, 0, SLOT, SLOT, SLOT, 1),))
        registration = RankRegistration(b"t", "i", NAMESPACE, 0, 1, "host", (), (layout,))
        peer = Peer(b"t", 1, 0, 0, "", (), Caller(None, Grant()))
        self.session = RankSession(
            1, peer, registration, self.copier, self.copier.pid, (Imported(b"k", 8 * SLOT),),
            {0: SessionGroup(layout, self.space)}, 0.0, TaskSet(lambda *_: None),
        )  # fmt: skip

    def start(self, direction: Direction, *names: str, at: list[int] | None = None, lease: int | None = None) -> Job:
        hashes = [hashlib.sha256(name.encode()).digest() for name in names]
        parts = [JobBlocks(0, hashes, np.array(at or range(len(names)), np.int64))]
        self.numbers += 1
        job = Job(self.numbers, direction, parts, lease=lease, on_done=self.answers.append)
        self.runner.start(self.session, job)
        return job

    def job(self, direction: Direction, *names: str, at: list[int] | None = None) -> asyncio.Task[JobResult]:
        """What the job's client is answered, or what the job raises."""
        job = self.start(direction, *names, at=at)

        async def result() -> JobResult:
            await job.over()
            assert job.result is not None
            assert job.result in self.answers
            return job.result

        return asyncio.create_task(result())

    async def started(self, direction: Direction, count: int = 1) -> HeldCopies:
        held = self.copier.held[direction]
        await eventually_in_loop(lambda: len(held.copies) >= count)
        return held

    async def ends(self, direction: Direction, count: int = 1) -> None:
        held = await self.started(direction, count)
        held.end(held.nbytes(SLOT))

    def next_process(self) -> None:
        """The copier works again, and the rank has attached again."""
        self.copier.start_again()
        self.session.process = self.copier.pid

    def readable(self, *names: str) -> list[bool]:
        hashes = [hashlib.sha256(name.encode()).digest() for name in names]
        return self.cache.lookup(self.space, hashes, LookupMode.BITMAP)

    async def stored(self, *names: str) -> None:
        before = len(self.copier.held[Direction.STORE].copies)
        job = self.job(Direction.STORE, *names)
        await self.ends(Direction.STORE, before + 1)
        assert (await job).outcome is Outcome.DONE


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    yield world
    check_integrity(world.cache)
    assert (world.session.jobs, world.session.outstanding_blocks, world.runner.num_running) == ({}, 0, 0)
    assert not world.cache._stores, "the cache still waits for the end of a store"
    assert world.cache.stats().loads == 0, "a load still has references"


async def test_a_block_is_readable_only_after_its_copy_is_over(world: World) -> None:
    job = world.job(Direction.STORE, "a")
    worker = await world.started(Direction.STORE)
    assert world.readable("a") == [False]
    worker.end(worker.nbytes(SLOT))
    result = await job
    assert (result.outcome, result.copied_blocks, result.nbytes) == (Outcome.DONE, 1, SLOT)
    assert world.readable("a") == [True]


async def test_a_store_of_what_is_there_copies_nothing_and_of_the_rest_only_the_rest(world: World) -> None:
    await world.stored("a")
    again = await world.job(Direction.STORE, "a")
    assert (again.outcome, again.copied_blocks, again.skipped_blocks, again.nbytes) == (Outcome.DONE, 0, 1, 0)
    job = world.job(Direction.STORE, "a", "b", at=[6, 7])
    worker = await world.started(Direction.STORE, 2)
    (part,) = worker.copies[-1].parts
    assert (part.group, part.block_ids.tolist(), len(part.slots)) == (0, [7], 1)
    worker.end(worker.nbytes(SLOT))
    assert (await job).skipped_blocks == 1


async def test_a_store_whose_end_was_told_before_its_copier_died_is_done(world: World) -> None:
    job = world.job(Direction.STORE, "a")
    worker = await world.started(Direction.STORE)
    done = Done(worker.copies[-1].number, Ended.COPIED, SLOT, 0.001, 0.0, 1.0, worker.checked().values)
    world.copier.link.from_process[Direction.STORE].send(done.pack())
    world.copier.die()
    assert (await job).outcome is Outcome.DONE
    assert world.readable("a") == [True]


@pytest.mark.parametrize("direction", list(Direction))
async def test_a_copier_that_has_ended_harms_nobody(world: World, direction: Direction) -> None:
    """Neither a copy that it had, nor one that it is given before anybody has noticed, nor one that comes after."""
    await world.stored("a")
    job = world.job(direction, "a" if direction is Direction.LOAD else "b")
    await world.started(direction, 1 if direction is Direction.LOAD else 2)
    world.copier.die(noticed=False)
    other = "a" if direction is Direction.LOAD else "c"
    for result in (await job, await world.job(direction, other)):
        assert (result.outcome, result.reason) == (Outcome.FAILED, Refusal.DEVICE_LOST)
    world.copier.down = "the copier has ended"
    after = await world.job(direction, other)
    assert (after.outcome, after.reason) == (Outcome.DECLINED, Refusal.DEVICE_LOST)
    assert world.metrics.refusal_counts() == {"device_lost": 3}
    stats = world.cache.stats()
    assert (stats.free_bytes, stats.leased_bytes, stats.quarantined_bytes) == ((SLOTS - 1) * SLOT, 0, 0)


@pytest.mark.parametrize("direction", list(Direction))
async def test_a_job_of_a_rank_that_the_next_copier_does_not_know_is_declined(
    world: World, direction: Direction
) -> None:
    await world.stored("a")
    world.copier.die()
    world.copier.start_again()
    result = await world.job(direction, "a" if direction is Direction.LOAD else "b")
    assert (result.outcome, result.reason) == (Outcome.DECLINED, Refusal.DEVICE_LOST)
    assert world.copier.held[direction].copies == []


async def test_a_load_has_its_references_when_it_is_taken_whatever_comes_behind_it(world: World) -> None:
    """The end of its lease, and a store that wants the room, before the loop has run once."""
    await world.stored("a", "b", "c", "d")
    hashes = [hashlib.sha256(name.encode()).digest() for name in "abcd"]
    lease, _ = world.cache.lookup_and_lease([(world.space, hashes)], LookupMode.PREFIX, 0.0, 9.0, "o")
    assert lease is not None
    load = world.start(Direction.LOAD, *"abcd", lease=lease.id)
    assert world.cache.release(lease.id)
    assert (await world.job(Direction.STORE, "e")).reason is Refusal.POOL_FULL
    await world.ends(Direction.LOAD)
    await load.over()
    assert load.result is not None
    assert load.result.copied_blocks == 4
    await world.stored("e")


@pytest.mark.parametrize("direction", list(Direction))
async def test_a_job_that_names_a_group_twice_is_declined(world: World, direction: Direction) -> None:
    """Its two parts might name one block of the engine."""
    await world.stored("a", "b")
    parts = [JobBlocks(0, [hashlib.sha256(name.encode()).digest()], np.array([3])) for name in "ab"]
    job = Job(100, direction, parts)
    world.runner.start(world.session, job)
    await job.over()
    assert job.result is not None
    assert job.result.reason is Refusal.INVALID_REQUEST
    assert "twice" in job.result.error


async def test_a_load_of_what_is_not_there_copies_nothing(world: World) -> None:
    await world.stored("a")
    result = await world.job(Direction.LOAD, "a", "b")
    assert (result.outcome, result.reason) == (Outcome.DECLINED, Refusal.NOT_FOUND)
    assert world.copier.held[Direction.LOAD].copies == []


async def test_work_is_declined_unless_ready_and_each_refusal_is_counted(world: World) -> None:
    world.readiness.drain("bye")
    for direction in Direction:
        result = await world.job(direction, "a")
        assert (result.outcome, result.reason) == (Outcome.DECLINED, Refusal.DRAINING)
    assert world.metrics.refusal_counts() == {"draining": 2}
    assert world.metrics.value("kvsidecar_jobs_total", direction="load", outcome="declined") == 1


async def test_a_store_that_would_evict_what_is_used_before_it_is_declined_and_counted() -> None:
    world = World(eviction=Eviction.RHYTHM)
    for turn in range(16):  # prompts that an order by the last use would not hit
        hashes = [hashlib.sha256(b"%d %d" % (turn % 2, number)).digest() for number in range(100)]
        world.cache.lookup_and_lease([(world.space, hashes)], LookupMode.PREFIX, 0.0, 9.0, "o")
        world.cache.touch([(world.space, hashes)])
    for name in "abcd":
        world.cache.expire(0.0)
        await world.stored(name)
    hashes = [hashlib.sha256(name.encode()).digest() for name in "abcd"]
    for now in range(4, 24, 4):
        world.cache.expire(float(now))
        lease, _ = world.cache.lookup_and_lease([(world.space, hashes)], LookupMode.BITMAP, float(now), 9.0, "o")
        assert lease is not None
        world.cache.release(lease.id)
    copies = len(world.copier.held[Direction.STORE].copies)
    result = await world.job(Direction.STORE, "new")
    assert (result.outcome, result.reason) == (Outcome.DECLINED, Refusal.NOT_ADMITTED)
    assert world.metrics.refusal_counts() == {"not_admitted": 1}
    assert len(world.copier.held[Direction.STORE].copies) == copies
    assert all(world.readable(*"abcd"))


async def test_the_age_of_the_oldest_job_is_known_while_it_runs(world: World) -> None:
    now = 0.0
    world.runner.clock = lambda: now
    job = world.job(Direction.STORE, "a")
    worker = await world.started(Direction.STORE)
    now = 7.0
    assert world.runner.oldest_seconds(Direction.STORE) == 7.0
    assert world.runner.oldest_seconds(Direction.LOAD) == 0.0
    worker.end(worker.nbytes(SLOT))
    await job
    assert world.runner.oldest_seconds(Direction.STORE) == 0.0


async def test_the_loop_is_kept_awake_for_jobs_whose_end_somebody_waits_for(world: World) -> None:
    await world.stored("a")
    assert world.guard.times == 2  # at the begin and at the end
    world.copiers.pacing.set_chunk(4096)
    world.copiers.pacing.set_busy(frozenset({"host"}))
    await world.stored("b")
    assert world.guard.times == 2
    loads = [world.job(Direction.LOAD, "a") for _ in range(MANY_JOBS + 3)]
    worker = await world.started(Direction.LOAD, len(loads))
    assert world.guard.times == 2 + MANY_JOBS
    for index in range(len(loads)):
        worker.end(SLOT, index)
    await asyncio.gather(*loads)
    assert world.guard.times == 2 + 2 * MANY_JOBS


@pytest.mark.parametrize("point", ["store.after_reserve", "store.before_copy", "store.before_seal"])
async def test_a_fault_of_a_store_gives_everything_back_and_leaves_nothing_readable(world: World, point: str) -> None:
    with active(f"{point}=raise(planted)"):
        job = world.job(Direction.STORE, "a")
        if point == "store.before_seal":
            await world.ends(Direction.STORE)
        assert (await job).outcome is Outcome.FAILED
    assert world.readable("a") == [False]
    assert world.cache.stats().free_bytes == SLOTS * SLOT


async def test_metrics_count_bytes_and_dma_time_of_copies_that_succeeded(world: World) -> None:
    await world.stored("a", "b")
    value = world.metrics.value
    assert value("kvsidecar_copied_bytes_total", direction="store") == 2 * SLOT
    assert value("kvsidecar_copy_seconds_sum", direction="store") == 0.001
    assert value("kvsidecar_copy_size_bytes_count", direction="store") == 1


async def test_a_shard_whose_bytes_changed_in_the_pool_is_a_miss_and_its_slot_is_never_used_again(world: World) -> None:
    await world.stored("a", "b")
    load = world.job(Direction.LOAD, "a", "b")
    await world.ends(Direction.LOAD)
    assert (await load).outcome is Outcome.DONE
    world.pool[7] ^= 1  # in the slot of "a", the first one
    load = world.job(Direction.LOAD, "a", "b")
    (await world.started(Direction.LOAD, 2)).refuse()
    wrong = await load
    assert (wrong.outcome, wrong.reason) == (Outcome.DECLINED, Refusal.CHECKSUM)
    assert world.readable("a", "b") == [False, True]
    assert world.cache.stats().quarantined_bytes == SLOT
    assert world.metrics.refusal_counts() == {"checksum": 1}
    await world.stored("c", "d")
    await world.stored("e")
    assert world.cache.stats().quarantined_bytes == SLOT


async def test_a_wrong_shard_that_a_load_names_twice_is_withdrawn_once(world: World) -> None:
    await world.stored("a", "b")
    world.pool[7] ^= 1
    load = world.job(Direction.LOAD, "a", "b", "a", at=[1, 2, 3])
    (await world.started(Direction.LOAD)).refuse()
    assert (await load).reason is Refusal.CHECKSUM
    assert world.readable("a", "b") == [False, True]
    assert world.cache.stats().quarantined_bytes == SLOT


async def test_without_verify_a_job_asks_for_no_checksums() -> None:
    world = World(Verify.OFF)
    await world.stored("a")
    load = world.job(Direction.LOAD, "a")
    await world.ends(Direction.LOAD)
    await load
    for direction in Direction:
        (copy,) = world.copier.held[direction].copies
        assert copy.checks is None


async def test_a_sample_is_of_the_same_blocks_in_stores_and_loads() -> None:
    world = World(Verify.SAMPLE)
    names = [str(number) for number in range(100)]
    chosen = next(name for name in names if hashlib.sha256(name.encode()).digest()[-1] % SAMPLE == 0)
    other = next(name for name in names if hashlib.sha256(name.encode()).digest()[-1] % SAMPLE)
    await world.stored(chosen, other)
    load = world.job(Direction.LOAD, other, chosen)
    await world.ends(Direction.LOAD)
    await load
    (store,), (load_) = world.copier.held[Direction.STORE].copies, world.copier.held[Direction.LOAD].copies
    assert store.checks is not None
    assert load_[0].checks is not None
    assert store.checks["slot"].tolist() == [store.parts[0].slots[0]] == load_[0].checks["slot"].tolist()
    assert load_[0].checks["expected"].tolist() == world.copier.held[Direction.STORE].checked().values


async def test_a_wrong_shard_that_another_load_reads_is_withdrawn_when_that_has_ended(world: World) -> None:
    await world.stored("a")
    first = world.job(Direction.LOAD, "a")
    worker = await world.started(Direction.LOAD)
    world.pool[7] ^= 1
    second = world.job(Direction.LOAD, "a")
    (await world.started(Direction.LOAD, 2)).refuse()
    assert (await second).reason is Refusal.CHECKSUM
    assert world.cache.stats().quarantined_bytes == 0
    check_integrity(world.cache)
    worker.end(worker.nbytes(SLOT), 0)
    await first
    assert world.cache.stats().quarantined_bytes == SLOT


DIED = "the copier has ended (SIGKILL)"
ENDINGS: dict[str, JobResult] = {
    "done": JobResult(Outcome.DONE),
    "cancelled": JobResult(Outcome.DECLINED, Refusal.CANCELLED),
    "too late": JobResult(Outcome.DECLINED, Refusal.DEADLINE),
    "failed": JobResult(Outcome.FAILED, Refusal.COPY_FAILED, "bad"),
    "its copier has died": JobResult(Outcome.FAILED, Refusal.DEVICE_LOST, DIED),
    "a bug": UNEXPECTED,
}


@pytest.mark.parametrize("how", ENDINGS)
@pytest.mark.parametrize("direction", list(Direction))
async def test_however_a_job_ends_it_is_answered_once_and_gives_back_all_it_held(
    world: World, direction: Direction, how: str
) -> None:
    await world.stored("a")
    world.answers.clear()
    job = world.start(direction, "a" if direction is Direction.LOAD else "b")
    assert world.session.jobs == {job.number: job}
    assert world.session.outstanding_blocks == 1
    worker = await world.started(direction, 1 if direction is Direction.LOAD else 2)
    expected = ENDINGS[how]
    match how:
        case "done":
            worker.end(SLOT)
        case "cancelled" | "too late":
            assert expected.reason is not None
            job.cancel(expected.reason)
            assert worker.copies
            assert world.answers == [], "the copier has not said that it does not start"
            worker.cancel()
        case "failed":
            worker.fail("bad")
        case "its copier has died":
            world.copier.die()
        case "a bug":
            worker.break_(RuntimeError("what"))
    await asyncio.wait([job.over()])
    assert [(each.outcome, each.reason, each.error) for each in world.answers] == [
        (expected.outcome, expected.reason, expected.error)
    ]
    assert job.grants == []
    stats = world.cache.stats()
    assert (stats.reserved_bytes, stats.quarantined_bytes, stats.loads) == (0, 0, 0)
    assert world.readable("a", "b") == [True, direction is Direction.STORE and how == "done"]


async def test_a_deadline_that_has_not_come_goes_with_its_job(world: World) -> None:
    job = Job(1, Direction.STORE, [JobBlocks(0, [bytes(32)], np.zeros(1, np.int64))])
    world.runner.start(world.session, job, deadline=3600.0)
    timer = job.timer
    assert timer is not None
    await world.ends(Direction.STORE)
    await job.over()
    assert timer.cancelled()


async def test_a_job_that_is_over_leaves_nothing_for_the_garbage_collector(world: World) -> None:
    """A collection holds up the event loop the longer, the more there is to collect."""

    async def both() -> None:
        for direction in Direction:
            job = Job(1, direction, [JobBlocks(0, [bytes(32)], np.zeros(1, np.int64))])
            world.runner.start(world.session, job, deadline=3600.0)
            await world.ends(direction)
            await job.over()

    gc.collect()
    gc.disable()
    try:
        await both()
        await asyncio.sleep(0)
        assert not [each for each in gc.get_objects() if isinstance(each, Job | Copying)]
    finally:
        gc.enable()


async def test_kept_blocks_are_loaded_before_the_daemon_is_ready_and_nothing_is_stored(world: World) -> None:
    await world.stored("a", "b")
    readiness = world.runner.readiness = DaemonReadiness(SLOTS * SLOT)
    readiness.pinning(pinned_bytes=SLOT)
    world.cache.reader.below = SLOT
    assert (await world.job(Direction.LOAD, "a")).reason is Refusal.NOT_READY
    readiness.serve_kept(True)
    assert (await world.job(Direction.STORE, "c")).reason is Refusal.NOT_READY
    assert (await world.job(Direction.LOAD, "a", "b")).reason is Refusal.NOT_FOUND, "the slot of b is not pinned"
    job = world.job(Direction.LOAD, "a")
    await world.ends(Direction.LOAD)
    assert (await job).outcome is Outcome.DONE


async def test_who_waits_for_loads_waits_for_those_that_run_and_for_no_store(world: World) -> None:
    await asyncio.wait_for(world.runner.wait_for(Direction.LOAD), SECONDS)  # there is none
    await world.stored("a", "b")
    store, loads = world.job(Direction.STORE, "c"), [world.job(Direction.LOAD, name) for name in "ab"]
    held = await world.started(Direction.LOAD, 2)
    waits = asyncio.create_task(world.runner.wait_for(Direction.LOAD))
    for index, load in enumerate(loads):
        await asyncio.sleep(0)
        assert not waits.done()
        held.end(SLOT, index)
        await asyncio.wait_for(load, SECONDS)
    await asyncio.wait_for(waits, SECONDS)
    assert not store.done()
    await world.ends(Direction.STORE, 2)
    await store


# -- slots that are being zeroed -------------------------------------------------------------------------------------


class ZeroingAll:
    """Zeroes every slot, until the test says that it is done."""

    def __init__(self) -> None:
        self.later: list[Callable[[], object]] = []

    def may_write(self, grant: StoreGrant, later: Callable[[], object]) -> bool:
        self.later.append(later)
        return False


async def test_a_store_is_copied_when_its_slots_are_zeroed() -> None:
    zeroing = ZeroingAll()
    world = World(zeroing=zeroing)
    job = world.job(Direction.STORE, "a")
    await asyncio.sleep(0)
    assert world.runner.num_running == 1
    assert not world.answers
    (later,) = zeroing.later
    assert not world.copier.held[Direction.STORE].copies
    later()
    await world.ends(Direction.STORE)
    assert (await job).outcome is Outcome.DONE
    assert world.cache.stats().readable_blocks == 1


async def test_a_store_that_goes_first_still_does_when_its_slots_are_zeroed() -> None:
    zeroing = ZeroingAll()
    world = World(zeroing=zeroing)
    world.start(Direction.STORE, "a").prioritize()
    (later,) = zeroing.later
    later()
    held = world.copier.held[Direction.STORE]
    (copy,) = held.copies
    assert held.first == [copy.number]
    await world.ends(Direction.STORE)


async def test_a_store_that_is_stopped_before_its_slots_are_zeroed_is_never_copied() -> None:
    zeroing = ZeroingAll()
    world = World(zeroing=zeroing)
    job = world.start(Direction.STORE, "a")
    job.cancel(Refusal.DEADLINE)
    assert not world.answers, "its slots are still being zeroed"
    (later,) = zeroing.later
    later()
    assert [(answer.outcome, answer.reason) for answer in world.answers] == [(Outcome.DECLINED, Refusal.DEADLINE)]
    stats = world.cache.stats()
    assert (stats.free_bytes, stats.reserved_bytes) == (SLOTS * SLOT, 0)


@pytest.fixture
def two_at_a_time(world: World) -> None:
    """Jobs of three blocks and more take several steps."""
    world.runner.store_blocks = world.runner.load_blocks = 2


@pytest.mark.usefixtures("two_at_a_time")
async def test_a_large_job_takes_some_of_its_blocks_in_each_step_and_copies_all_at_once(world: World) -> None:
    await world.stored("b")
    job = world.start(Direction.STORE, *"abcd")
    assert (world.session.beginning, job.grants, world.copier.held[Direction.STORE].copies[1:]) == ([job], [], [])
    await eventually_in_loop(lambda: not world.session.beginning)
    (copy,) = world.copier.held[Direction.STORE].copies[1:]
    (part,) = copy.parts
    assert part.block_ids.tolist() == [0, 2, 3]
    assert copy.checks is not None
    assert copy.checks["slot"].tolist() == part.slots.tolist()
    assert world.readable(*"abcd") == [False, True, False, False]
    await world.ends(Direction.STORE, 2)
    await job.over()
    assert job.result is not None
    assert (job.result.outcome, job.result.copied_blocks, job.result.skipped_blocks) == (Outcome.DONE, 3, 1)
    load = world.start(Direction.LOAD, *"dcba", at=[4, 5, 6, 7])
    await world.ends(Direction.LOAD)
    await load.over()
    assert load.result is not None
    assert (load.result.outcome, load.result.copied_blocks) == (Outcome.DONE, 4)
    (loaded,) = world.copier.held[Direction.LOAD].copies
    assert loaded.parts[0].block_ids.tolist() == [4, 5, 6, 7]
    assert sorted(loaded.parts[0].slots.tolist()) == [0, SLOT, 2 * SLOT, 3 * SLOT]


@pytest.mark.usefixtures("two_at_a_time")
async def test_jobs_behind_a_large_one_begin_after_it_whatever_their_size(world: World) -> None:
    """Messages that came before the reply to the registration are taken one after the other."""
    sizes = [job.num_blocks for job in (world.start(Direction.STORE, *names) for names in ("abc", "d", "ab"))]
    assert world.copier.held[Direction.STORE].copies == []
    await eventually_in_loop(lambda: not world.session.beginning)
    copies = world.copier.held[Direction.STORE].copies
    assert [sum(len(part.block_ids) for part in copy.parts) for copy in copies] == sizes[:2]
    assert [each.skipped_blocks for each in world.answers] == [2]
    held = world.copier.held[Direction.STORE]
    for index in range(len(copies)):
        held.end(held.nbytes(SLOT, index), index)
    await eventually_in_loop(lambda: len(world.answers) == 3)


@pytest.mark.usefixtures("two_at_a_time")
async def test_of_a_large_load_the_shard_that_is_wrong_is_withdrawn_in_whatever_step_it_was_found(world: World) -> None:
    await world.stored("a")
    await world.stored("b", "c")
    (slot,) = world.copier.held[Direction.STORE].copies[0].parts[0].slots
    world.pool[int(slot)] ^= 1
    load = world.start(Direction.LOAD, *"cba")
    (await world.started(Direction.LOAD)).refuse()
    await load.over()
    assert load.result is not None
    assert load.result.reason is Refusal.CHECKSUM
    assert world.readable(*"abc") == [False, True, True]


@pytest.mark.usefixtures("two_at_a_time")
@pytest.mark.parametrize(
    "why",
    ["no space", "not found", "cancelled", "a cancelled load", "a bug", "its copier has died", "its copier is another"],
)
async def test_a_large_job_that_fails_in_a_later_step_gives_back_what_it_had(world: World, why: str) -> None:
    await world.stored("a", "b")
    world.answers.clear()
    match why:
        case "no space":
            job = world.start(Direction.STORE, *"cdefg")
        case "not found":
            job = world.start(Direction.LOAD, *"abc")
        case "a cancelled load":
            job = world.start(Direction.LOAD, *"abab")
        case _:
            job = world.start(Direction.STORE, *"cdef")
    while not job.grants:  # noqa: ASYNC110
        await asyncio.sleep(0)
    match why:
        case "cancelled" | "a cancelled load":
            job.cancel(Refusal.CANCELLED)
        case "a bug":
            world.cache.begin_store = None  # type: ignore[assignment, method-assign]
        case "its copier has died":
            world.copier.die()
        case "its copier is another":
            world.copier.die()
            world.copier.start_again()
    await job.over()
    assert job.result is not None
    assert job.result.outcome is not Outcome.DONE
    assert job.grants == []
    assert world.session.beginning == []
    assert len(world.answers) == 1
    stats = world.cache.stats()
    assert (stats.reserved_bytes, stats.loads) == (0, 0)
    assert world.readable(*"cdefg") == [False] * 5


@pytest.mark.usefixtures("two_at_a_time")
async def test_the_blocks_of_a_large_store_are_used_in_their_order_however_many_steps_seal_them(world: World) -> None:
    """The first of a prompt are evicted last."""
    job = world.start(Direction.STORE, *"abcd")
    await world.ends(Direction.STORE)
    await job.over()
    await world.stored("e")
    await world.stored("f")
    assert world.readable(*"abcd") == [True, True, False, False]


async def test_a_large_store_waits_until_none_of_its_slots_is_being_zeroed() -> None:
    waiting: list[Callable[[], object]] = []

    class Zeroes:
        def may_write(self, _grant: StoreGrant, later: Callable[[], object]) -> bool:
            waiting.append(later)
            return False

    world = World(zeroing=Zeroes())
    world.runner.store_blocks = 2
    job = world.start(Direction.STORE, *"abcd")
    await eventually_in_loop(lambda: not world.session.beginning)
    assert len(waiting) == 2
    waiting[0]()
    assert world.copier.held[Direction.STORE].copies == []
    waiting[1]()
    await world.ends(Direction.STORE)
    await job.over()
    assert all(world.readable(*"abcd"))
