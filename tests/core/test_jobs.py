"""What a job does to the cache when its copy succeeds, fails, or leaves nobody knowing."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.slots import SlotAllocator
from kvsidecar.copier.hub import DeviceHub
from kvsidecar.copier.worker import CopyResult
from kvsidecar.core.access import Caller, Grant
from kvsidecar.core.checksums import Checksums
from kvsidecar.core.copy_plan import bind
from kvsidecar.core.job import Job, JobBlocks, JobResult
from kvsidecar.core.jobs import MANY_JOBS, UNEXPECTED, JobRunner
from kvsidecar.core.metrics import Metrics
from kvsidecar.core.readiness import DaemonReadiness
from kvsidecar.core.registration import RankRegistration
from kvsidecar.core.sessions import Peer, RankSession, SessionGroup
from kvsidecar.device.base import CopyPlan, DeviceEvent, DeviceMemory
from kvsidecar.errors import CopyFailed, DeviceLost, Refusal
from kvsidecar.support.cpu_sleep import SleepGuard
from kvsidecar.support.tasks import TaskSet
from kvsidecar.types import Direction, GroupLayout, LookupMode, Namespace, Outcome, Region, Verify
from tests.cache.integrity import check_integrity
from tests.failpoints import active
from tests.harness import eventually_in_loop
from tests.plans import copies_of

NAMESPACE = Namespace("m", "bf16", "LBNHC", 16, 1, 1, "sha256")
SLOT = 4096
SLOTS = 4


@dataclass
class Worker:
    """Takes plans and ends them when the test says so."""

    plans: list[CopyPlan] = field(default_factory=list)
    futures: list[Future[CopyResult]] = field(default_factory=list)
    refuse: Exception | None = None

    def submit(
        self, plan: CopyPlan, *, after: DeviceEvent | None = None, on_start: Callable[[], None] | None = None
    ) -> Future[CopyResult]:
        if self.refuse:
            raise self.refuse
        self.plans.append(plan)
        self.futures.append(Future())
        return self.futures[-1]

    def end(self) -> None:
        self.futures[-1].set_result(CopyResult(self.plans[-1].nbytes, 0.001, 0.0, 1.0))


class Hub(DeviceHub):
    def __init__(self) -> None:
        self.by_direction = {direction: Worker() for direction in Direction}
        self.paced = False

    def chunk(self, uuid: str, direction: Direction) -> int | None:
        return 4096 if self.paced and direction is Direction.STORE else None

    async def worker(self, uuid: str, direction: Direction) -> Worker:  # type: ignore[override]
        return self.by_direction[direction]


class Fake:
    uuid = "host"
    numa_node = None


class Guard(SleepGuard):
    """Counts how often it was told to keep awake."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.times = 0

    def keep_awake(self) -> None:
        self.times += 1


class World:
    """A cache of four slots, one session with one group, and workers in the test's hands."""

    def __init__(self) -> None:
        self.cache = BlockCache(SlotAllocator(SLOTS * SLOT, SLOTS * SLOT))
        self.hub = Hub()
        self.pool = np.zeros(SLOTS * SLOT, np.uint8)
        self.metrics = Metrics("host")
        self.readiness = DaemonReadiness(SLOTS * SLOT)
        self.readiness.pinning()
        self.readiness.become_ready()
        self.guard = Guard()
        self.numbers = 0
        self.answers: list[JobResult] = []
        self.unsettled: list[str] = []
        self.runner = JobRunner(
            self.cache, self.hub, self.readiness, self.metrics, lambda: 0.0, slab_bytes=SLOTS * SLOT,
            checksums=Checksums(Verify.ALWAYS, lambda: self.pool), guard=self.guard, on_unsettled=self.unsettled.append,
        )  # fmt: skip
        self.space = self.cache.open_space(NAMESPACE, 0, 1, 0, SLOT)
        layout = GroupLayout(0, 8, 0, 1, (Region(0, 0, SLOT, SLOT, SLOT, 1),))
        registration = RankRegistration(b"t", "i", NAMESPACE, 0, 1, "host", (), (layout,))
        peer = Peer(b"t", 1, 0, 0, "", (), Caller(None, Grant()))
        self.session = RankSession(
            1, peer, registration, Fake(), (DeviceMemory(0x10000, 8 * SLOT, b"k"),),
            {0: SessionGroup(layout, bind(layout, [0x10000]), self.space)}, 0.0, TaskSet(lambda *_: None),
        )  # type: ignore[arg-type]  # fmt: skip

    def says_once_that_a_copy_may_run(self, direction: Direction) -> None:
        (text,) = self.unsettled
        assert text.startswith(f"the copy of a {direction} on host may still run (")
        assert self.session.unsettled
        assert self.metrics.value("kvsidecar_unsettled_copies_total", direction=direction.value) == 1

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
            await job.task
            assert job.result is not None
            assert job.result in self.answers
            return job.result

        return asyncio.create_task(result())

    async def started(self, direction: Direction, count: int = 1) -> Worker:
        worker = self.hub.by_direction[direction]
        await eventually_in_loop(lambda: len(worker.futures) >= count)  # a checksum is taken in a thread
        return worker

    def readable(self, *names: str) -> list[bool]:
        hashes = [hashlib.sha256(name.encode()).digest() for name in names]
        return self.cache.lookup(self.space, hashes, LookupMode.BITMAP)

    async def stored(self, *names: str) -> None:
        job = self.job(Direction.STORE, *names)
        (await self.started(Direction.STORE, len(self.hub.by_direction[Direction.STORE].futures) + 1)).end()
        assert (await job).outcome is Outcome.DONE


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    check_integrity(world.cache)
    assert (world.session.jobs, world.session.outstanding_blocks, world.runner.num_running) == ({}, 0, 0)
    assert not world.cache._stores, "the cache still waits for the end of a store"


async def test_a_block_is_readable_only_after_its_copy_is_over(world: World) -> None:
    job = world.job(Direction.STORE, "a")
    worker = await world.started(Direction.STORE)
    assert world.readable("a") == [False]
    worker.end()
    result = await job
    assert (result.outcome, result.copied_blocks, result.nbytes) == (Outcome.DONE, 1, SLOT)
    assert world.readable("a") == [True]


async def test_a_store_of_what_is_there_copies_nothing_and_of_the_rest_only_the_rest(world: World) -> None:
    await world.stored("a")
    again = await world.job(Direction.STORE, "a")
    assert (again.outcome, again.copied_blocks, again.skipped_blocks, again.nbytes) == (Outcome.DONE, 0, 1, 0)
    job = world.job(Direction.STORE, "a", "b", at=[6, 7])
    worker = await world.started(Direction.STORE, 2)
    assert worker.plans[-1].nbytes == SLOT
    assert copies_of(worker.plans[-1])["device_address"].tolist() == [0x10000 + 7 * SLOT]
    worker.end()
    assert (await job).skipped_blocks == 1


async def test_a_failed_store_of_known_outcome_gives_its_slot_back(world: World) -> None:
    job = world.job(Direction.STORE, "a")
    worker = await world.started(Direction.STORE)
    worker.futures[-1].set_exception(CopyFailed("refused", outcome_known=True))
    result = await job
    assert (result.outcome, result.reason, result.error) == (Outcome.FAILED, Refusal.COPY_FAILED, "refused")
    assert not result.unsettled
    assert (world.unsettled, world.session.unsettled) == ([], False)
    assert world.cache.stats().free_bytes == SLOTS * SLOT
    assert world.readable("a") == [False]


@pytest.mark.parametrize("error", [CopyFailed("?", outcome_known=False), DeviceLost("gone"), RuntimeError("what")])
async def test_a_store_of_unknown_outcome_never_gives_its_slot_back(world: World, error: Exception) -> None:
    job = world.job(Direction.STORE, "a")
    worker = await world.started(Direction.STORE)
    worker.futures[-1].set_exception(error)
    await asyncio.wait([job])
    if isinstance(error, RuntimeError):
        assert job.exception() is error
    else:
        result = await job
        assert (result.outcome, result.unsettled) == (Outcome.FAILED, True)
    world.says_once_that_a_copy_may_run(Direction.STORE)
    assert world.cache.stats().quarantined_bytes == SLOT
    await world.stored("b", "c", "d")
    assert (await world.job(Direction.STORE, "e", "f", "g", "h")).reason is Refusal.POOL_FULL


async def test_a_cancelled_store_is_of_unknown_outcome(world: World) -> None:
    job = world.job(Direction.STORE, "a")
    worker = await world.started(Direction.STORE)
    worker.futures[-1].set_running_or_notify_cancel()
    job.cancel()
    await asyncio.wait([job])
    assert world.cache.stats().quarantined_bytes == SLOT
    world.says_once_that_a_copy_may_run(Direction.STORE)


@pytest.mark.parametrize("direction", list(Direction))
async def test_a_lost_device_to_which_nothing_was_given_harms_nobody(world: World, direction: Direction) -> None:
    """Neither a copy that was queued when it was lost, nor one that is asked for after."""
    await world.stored("a")
    job = world.job(direction, "a" if direction is Direction.LOAD else "b")
    worker = await world.started(direction, 1 if direction is Direction.LOAD else 2)
    worker.futures[-1].set_exception(DeviceLost("gone", outcome_known=True))
    world.hub.by_direction[direction].refuse = DeviceLost("gone")
    for result in (await job, await world.job(direction, "a" if direction is Direction.LOAD else "c")):
        assert (result.outcome, result.reason, result.unsettled) == (Outcome.FAILED, Refusal.DEVICE_LOST, False)
    stats = world.cache.stats()
    assert (stats.free_bytes, stats.leased_bytes, world.unsettled) == ((SLOTS - 1) * SLOT, 0, [])


async def test_a_load_has_its_pins_when_it_is_taken_whatever_comes_behind_it(world: World) -> None:
    """The end of its lease, and a store that wants the room, before the loop has run once."""
    await world.stored("a", "b", "c", "d")
    hashes = [hashlib.sha256(name.encode()).digest() for name in "abcd"]
    lease, _ = world.cache.lookup_and_lease([(world.space, hashes)], LookupMode.PREFIX, 0.0, 9.0, "o")
    assert lease is not None
    load = world.start(Direction.LOAD, *"abcd", lease=lease.id)
    assert world.cache.release(lease.id)
    assert (await world.job(Direction.STORE, "e")).reason is Refusal.POOL_FULL
    (await world.started(Direction.LOAD)).end()
    await load.task
    assert load.result is not None
    assert load.result.copied_blocks == 4
    await world.stored("e")


async def test_a_worker_that_takes_no_copy_leaves_no_reservation(world: World) -> None:
    world.hub.by_direction[Direction.STORE].refuse = DeviceLost("gone")
    result = await world.job(Direction.STORE, "a")
    assert (result.outcome, result.reason) == (Outcome.FAILED, Refusal.DEVICE_LOST)
    assert world.cache.stats().free_bytes == SLOTS * SLOT


async def test_blocks_that_are_being_loaded_are_not_evicted(world: World) -> None:
    await world.stored("a", "b", "c", "d")
    load = world.job(Direction.LOAD, "a", "b", "c", "d")
    worker = await world.started(Direction.LOAD)
    assert (await world.job(Direction.STORE, "e")).reason is Refusal.POOL_FULL
    worker.end()
    assert (await load).copied_blocks == 4
    await world.stored("e")


async def test_a_load_of_unknown_outcome_keeps_its_blocks_for_ever(world: World) -> None:
    await world.stored("a")
    load = world.job(Direction.LOAD, "a")
    worker = await world.started(Direction.LOAD)
    worker.futures[-1].set_exception(CopyFailed("?", outcome_known=False))
    failed = await load
    assert (failed.outcome, failed.unsettled) == (Outcome.FAILED, True)
    world.says_once_that_a_copy_may_run(Direction.LOAD)
    await world.stored("b", "c", "d")
    await world.stored("e", "f", "g")
    assert world.readable("a") == [True]


async def test_a_load_of_known_outcome_lets_its_blocks_go(world: World) -> None:
    await world.stored("a")
    load = world.job(Direction.LOAD, "a")
    worker = await world.started(Direction.LOAD)
    worker.futures[-1].set_exception(CopyFailed("refused", outcome_known=True))
    await load
    await world.stored("b", "c", "d", "e")
    assert world.readable("a") == [False]


async def test_a_load_of_what_is_not_there_copies_nothing(world: World) -> None:
    await world.stored("a")
    result = await world.job(Direction.LOAD, "a", "b")
    assert (result.outcome, result.reason) == (Outcome.DECLINED, Refusal.NOT_FOUND)
    assert world.hub.by_direction[Direction.LOAD].plans == []


async def test_work_is_declined_unless_ready_and_each_refusal_is_counted(world: World) -> None:
    world.readiness.drain("bye")
    for direction in Direction:
        result = await world.job(direction, "a")
        assert (result.outcome, result.reason) == (Outcome.DECLINED, Refusal.DRAINING)
    assert world.metrics.refusal_counts() == {"draining": 2}
    assert world.metrics.value("kvsidecar_jobs_total", direction="load", outcome="declined") == 1


async def test_the_age_of_the_oldest_job_is_known_while_it_runs(world: World) -> None:
    now = 0.0
    world.runner._clock = lambda: now
    job = world.job(Direction.STORE, "a")
    worker = await world.started(Direction.STORE)
    now = 7.0
    assert world.runner.oldest_seconds(Direction.STORE) == 7.0
    assert world.runner.oldest_seconds(Direction.LOAD) == 0.0
    worker.end()
    await job
    assert world.runner.oldest_seconds(Direction.STORE) == 0.0


async def test_the_loop_is_kept_awake_for_jobs_whose_end_somebody_waits_for(world: World) -> None:
    await world.stored("a")
    assert world.guard.times == 2  # at the begin and at the end
    world.hub.paced = True
    await world.stored("b")
    assert world.guard.times == 2
    loads = [world.job(Direction.LOAD, "a") for _ in range(MANY_JOBS + 3)]
    worker = await world.started(Direction.LOAD, len(loads))
    assert world.guard.times == 2 + MANY_JOBS
    for future in worker.futures:
        future.set_result(CopyResult(SLOT, 0.0, 0.0, 0.0))
    await asyncio.gather(*loads)
    assert world.guard.times == 2 + 2 * MANY_JOBS


@pytest.mark.parametrize("point", ["store.after_reserve", "store.before_copy"])
async def test_a_fault_before_the_copy_gives_everything_back(world: World, point: str) -> None:
    with active(f"{point}=raise(planted)"):
        result = await world.job(Direction.STORE, "a")
    assert result.outcome is Outcome.FAILED
    assert world.cache.stats().free_bytes == SLOTS * SLOT


async def test_a_fault_between_copy_and_seal_leaves_nothing_readable(world: World) -> None:
    with active("store.before_seal=raise(planted)"):
        job = world.job(Direction.STORE, "a")
        (await world.started(Direction.STORE)).end()
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
    (await world.started(Direction.LOAD)).end()
    assert (await load).outcome is Outcome.DONE
    world.pool[7] ^= 1  # in the slot of "a", the first one
    wrong = await world.job(Direction.LOAD, "a", "b")
    assert (wrong.outcome, wrong.reason) == (Outcome.DECLINED, Refusal.CHECKSUM)
    assert world.readable("a", "b") == [False, True]
    assert world.cache.stats().quarantined_bytes == SLOT
    assert world.metrics.refusal_counts() == {"checksum": 1}
    await world.stored("c", "d")
    await world.stored("e")
    assert world.cache.stats().quarantined_bytes == SLOT


async def test_a_wrong_shard_that_another_load_reads_is_withdrawn_when_that_has_ended(world: World) -> None:
    await world.stored("a")
    first = world.job(Direction.LOAD, "a")
    worker = await world.started(Direction.LOAD)
    world.pool[7] ^= 1
    assert (await world.job(Direction.LOAD, "a")).reason is Refusal.CHECKSUM
    assert world.cache.stats().quarantined_bytes == 0
    check_integrity(world.cache)
    worker.end()
    await first
    assert world.cache.stats().quarantined_bytes == SLOT


ENDINGS: dict[str, tuple[Exception | Refusal | None, JobResult]] = {
    "done": (None, JobResult(Outcome.DONE)),
    "cancelled": (Refusal.CANCELLED, JobResult(Outcome.DECLINED, Refusal.CANCELLED)),
    "too late": (Refusal.DEADLINE, JobResult(Outcome.DECLINED, Refusal.DEADLINE)),
    "failed": (CopyFailed("bad", outcome_known=True), JobResult(Outcome.FAILED, Refusal.COPY_FAILED, "bad")),
    "of unknown outcome": (
        CopyFailed("bad", outcome_known=False),
        JobResult(Outcome.FAILED, Refusal.COPY_FAILED, "bad", unsettled=True),
    ),
    "a bug": (RuntimeError("what"), replace(UNEXPECTED, unsettled=True)),
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
    error, expected = ENDINGS[how]
    if error is None:
        worker.end()
    elif isinstance(error, Refusal):
        job.cancel(error)
    else:
        worker.futures[-1].set_exception(error)
    await asyncio.wait([job.task])
    assert [(each.outcome, each.reason, each.error, each.unsettled) for each in world.answers] == [
        (expected.outcome, expected.reason, expected.error, expected.unsettled)
    ]
    assert job.grant is None
    stats = world.cache.stats()
    stores = direction is Direction.STORE
    assert stats.reserved_bytes == 0
    assert stats.quarantined_bytes == SLOT * (stores and expected.unsettled)
    assert stats.loads == (not stores and expected.unsettled)
    assert world.readable("a", "b") == [True, stores and how == "done"]


async def test_a_store_of_what_is_there_already_leaves_nothing_with_the_cache(world: World) -> None:
    """An engine that offers the same prompt again and again must not fill the daemon's memory with grants."""
    await world.stored("a")
    for _ in range(3):
        assert (await world.job(Direction.STORE, "a")).skipped_blocks == 1
    assert not world.cache._stores


async def test_a_deadline_that_has_not_come_goes_with_its_job(world: World) -> None:
    job = Job(1, Direction.STORE, [JobBlocks(0, [bytes(32)], np.zeros(1, np.int64))])
    world.runner.start(world.session, job, deadline=3600.0)
    assert job.timer is not None
    (await world.started(Direction.STORE)).end()
    await job.task
    assert job.timer.cancelled()
