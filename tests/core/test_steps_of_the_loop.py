"""No request, no command of an operator and no chore keeps the event loop for longer than its budget, whatever its
size, in a pool of a million blocks.

The parts are wired as `kvsidecar.daemon.daemon` wires them, without sockets and processes, on asyncio's own loop. A
step is one callback of the loop, and its time that of the thread's processor. Its budget is what `fixed` takes, a loop
of Python and numpy that took five milliseconds on a quiet core: it is measured beside each kind, so that a slow core,
or one that others use, is slow for both.

python -m tests.core.test_steps_of_the_loop prints the table of docs/benchmarks.md.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import pytest

from kvsidecar.cache.arrays import Words
from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.grants import StoreGrant
from kvsidecar.cache.shares import ShareLimits
from kvsidecar.cache.slots import SlotAllocator
from kvsidecar.cache.space_blocks import COPIED_ROWS, Space
from kvsidecar.copier.link import Imported
from kvsidecar.core.access import Access, Caller, Grant, Identity
from kvsidecar.core.hashes import PackedHashes
from kvsidecar.core.holds import Holds
from kvsidecar.core.job import Job, JobResult
from kvsidecar.core.jobs import LOAD_BLOCKS, STORE_BLOCKS, JobRunner
from kvsidecar.core.lookups import MAX_LEASES, Clearing, LookupService
from kvsidecar.core.metrics import Metrics
from kvsidecar.core.peer import Peer
from kvsidecar.core.readiness import DaemonReadiness
from kvsidecar.core.registration import RankRegistration
from kvsidecar.core.sessions import Instances, RankSession, SessionGroup
from kvsidecar.core.watches import Watches
from kvsidecar.protocol.framing import MAX_MESSAGE_BYTES
from kvsidecar.server.convert import blocks_from
from kvsidecar.server.report import Report
from kvsidecar.support.loop_time import LoopTime
from kvsidecar.support.tasks import TaskSet
from kvsidecar.types import Direction, Eviction, GroupLayout, LookupMode, Namespace, Outcome, Region
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.copiers import NoProcessCopiers
from tests.marks import long

BLOCKS = 1 << 20
NAMESPACES = 10_000
BLOCK = 4096
HASH_BYTES = 32
MESSAGE_BLOCKS = MAX_MESSAGE_BYTES // HASH_BYTES
"""As many hashes as a message can have."""
JOB_BLOCKS = MAX_MESSAGE_BYTES // (HASH_BYTES + 8)
"""The same with the blocks' numbers."""
ROUNDS = 3
"""Each kind is measured so often, in a pool of its own."""


Answer = TypeVar("Answer")


def fixed() -> float:
    """Seconds of the processor that a loop takes which took 5 ms on a quiet core."""
    rows = np.random.default_rng(1).integers(0, 1 << 20, 1 << 14)
    column = np.zeros(1 << 20, np.int64)
    began, total = time.thread_time(), 0
    for _ in range(2):
        column[rows] += 1
        total += int(column[rows.argsort(kind="stable")].sum())
    for number in range(30_000):
        total += number & 7
    return time.thread_time() - began


class Stopwatch:
    """Seconds of each callback of the loop, in their order."""

    def __init__(self) -> None:
        self.steps: list[float] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        run = asyncio.events.Handle._run

        def timed(handle: asyncio.events.Handle) -> None:
            began = time.thread_time()
            try:
                run(handle)
            finally:
                self.steps.append(time.thread_time() - began)

        gc.collect()
        gc.disable()
        asyncio.events.Handle._run = timed  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            asyncio.events.Handle._run = run  # type: ignore[method-assign]
            gc.enable()


def namespace(number: int = 0) -> Namespace:
    return Namespace(f"model-{number}", "bfloat16", "NHD", 16, 1, 1, "sha256", HASH_BYTES)


class World:
    """A full pool, in one namespace or in very many.

    Args:
        blocks: in the pool.
        namespaces: that share them.
    """

    def __init__(
        self, eviction: Eviction, blocks: int, namespaces: int = 1, block: int = BLOCK, ttl: float = 0
    ) -> None:
        self.blocks, self.now = blocks, 0.0
        pool = blocks * block
        self.cache = BlockCache(SlotAllocator(pool, min(pool, 1 << 24)), seed=7, eviction=eviction)
        metrics, readiness = Metrics("host"), DaemonReadiness(pool)
        readiness.pinning()
        readiness.become_ready()
        self.time = LoopTime(seconds=0.0)  # one step in each iteration: a callback is the same one in every round
        copiers = NoProcessCopiers()
        self.instances = Instances(
            self.cache, copiers, self.clock, lambda *_: None, Access(None, owner=0, private=True), self.time
        )
        runner = JobRunner(
            self.cache, copiers, readiness, metrics, self.clock, later=self.time.later,
            on_ended=lambda *_: self.job_ended.set(),
        )  # fmt: skip
        self.runner, self.copier, self.job_ended = runner, copiers.by_uuid["host"], asyncio.Event()
        self.copier.start_again()
        self.watches = Watches(self.cache, metrics, lambda *_: None, lambda: True)
        holds = Holds(self.cache, self.clock, pool)
        self.lookups = LookupService(
            self.cache, readiness, metrics, self.clock, lease_max=1e9, holds=holds, notes=self.watches.notes
        )
        self.report = Report(
            epoch=1,
            backend="host",
            cache=self.cache,
            copiers=copiers,
            instances=self.instances,
            runner=runner,
            readiness=readiness,
            metrics=metrics,
            clock=self.clock,
            tiering=None,
            watches=self.watches,
            holds=holds,
        )
        self.metrics = metrics
        metrics.read_gauges_from(self.report.gauges, self.report.count_models)
        self.hashes: Words = np.random.default_rng(3).integers(0, 1 << 63, (2 * blocks, 4)).astype(np.uint64)
        self.lookups.expire()
        self.spaces: list[Space] = []
        each = blocks // namespaces
        for number in range(namespaces):
            space = self.cache.open_space(namespace(number), 0, 1, 0, block)
            self.spaces.append(space)
            for first in range(number * each, (number + 1) * each, 8192):
                self.store(space, first, min(first + 8192, (number + 1) * each), ttl)

    def clock(self) -> float:
        return self.now

    def packed(self, first: int, end: int) -> bytes:
        return self.hashes[first:end].tobytes()

    def begin_store(self, space: Space, first: int, end: int, ttl: float = 0.0) -> StoreGrant:
        grant = self.cache.begin_store([(space, 0, self.packed(first, end))], ttl=ttl)
        assert isinstance(grant, StoreGrant), grant
        return grant

    def store(self, space: Space, first: int, end: int, ttl: float = 0.0) -> None:
        self.cache.seal_all(self.begin_store(space, first, end, ttl))

    def lease(self, first: int, end: int, owner: bytes, lease: int = 0, mode: LookupMode = LookupMode.BITMAP) -> int:
        answer = self.lookups.lookup(
            namespace(), self.group(first, end), mode, lease_seconds=1e8, owner=owner, lease=lease
        )
        assert answer.lease is not None
        return answer.lease

    def group(self, first: int, end: int) -> list[tuple[int, PackedHashes]]:
        return [(0, PackedHashes(self.packed(first, end), HASH_BYTES))]

    async def clear(self, steps: Clearing) -> int:
        return await self.time.run(steps)

    async def sweep(self) -> None:
        """As the daemon's task does."""
        while self.cache.sweep():  # noqa: ASYNC110
            await asyncio.sleep(0)

    async def step(self, call: Callable[[], Answer]) -> Answer:
        """In a callback of its own."""
        answers: list[Answer] = []
        asyncio.get_running_loop().call_soon(lambda: answers.append(call()))
        await asyncio.sleep(0)
        return answers[0]


Kind = Callable[[World], Awaitable[object]]


@dataclass(frozen=True)
class Case:
    """One kind of work.

    Args:
        ready: makes the pool ready for it, unmeasured.
        namespaces: that share the pool.
        ttl: seconds after which its blocks expire; 0: they do not.
    """

    name: str
    run: Kind
    ready: Callable[[World], object] = lambda _: None
    namespaces: int = 1
    ttl: float = 0.0


def leased(world: World) -> None:
    for first in range(0, world.blocks * 8 // 10, 8192):
        world.lease(first, min(first + 8192, world.blocks), b"dead")


def later(seconds: float) -> Callable[[World], None]:
    def pass_time(world: World) -> None:
        world.now = seconds

    return pass_time


def cleared(world: World) -> None:
    world.cache.clear(sweep=0)


async def engine_dies(world: World) -> None:
    await world.step(lambda: world.cache.drop_owner(b"dead"))
    await world.sweep()


async def expire(world: World) -> None:
    await world.step(world.lookups.expire)
    await world.sweep()


async def share_out(world: World) -> None:
    limits = [
        ShareLimits(f"s{number}", lambda each, number=number: each.model.endswith(f"{number}"), 1 << 20)  # type: ignore[misc]
        for number in range(10)
    ]
    await world.step(lambda: world.cache.set_shares(limits))
    await world.sweep()


async def large_blocks(world: World) -> None:
    space = world.cache.open_space(namespace(-1), 0, 1, 0, 1 << 20)

    def store() -> None:
        grant = world.cache.begin_store([(space, 0, world.packed(0, 32))])
        if isinstance(grant, StoreGrant):
            world.cache.seal_all(grant)

    await world.step(store)


async def small_store(world: World) -> None:
    await world.step(lambda: world.store(world.spaces[0], world.blocks, world.blocks + 32))


async def clear_leased(world: World) -> None:
    await world.clear(world.lookups.clear_blocks(namespace(), world.group(0, min(MESSAGE_BLOCKS, world.blocks))))


async def clear_unused(world: World) -> None:
    await world.clear(world.lookups.clear_unused(None, "", 50.0))


async def store_leased_again(world: World) -> None:
    """What has expired under leases, in the steps of a job."""
    for first in range(0, world.blocks // 10, STORE_BLOCKS):
        end = first + STORE_BLOCKS
        grant = await world.step(lambda first=first, end=end: world.begin_store(world.spaces[0], first, end, 5.0))  # type: ignore[misc]
        await world.step(lambda grant=grant: world.cache.seal_all(grant))  # type: ignore[misc]


def tenth_leased(world: World) -> None:
    for first in range(0, world.blocks // 10 + 4096, 4096):
        world.lease(first, first + 4096, b"holds")


def tenth_leased_and_expired(world: World) -> None:
    tenth_leased(world)
    world.now = 10.0
    world.lookups.expire()


def lookup(mode: LookupMode, *, lease: bool = False, touch: bool = False) -> Kind:
    async def look_up(world: World) -> None:
        group, seconds = world.group(0, MESSAGE_BLOCKS), 60.0 if lease else 0.0
        await world.step(
            lambda: world.lookups.lookup(namespace(), group, mode, lease_seconds=seconds, owner=b"o", touch=touch)
        )

    return look_up


def job(direction: Direction, blocks: int) -> Kind:
    """From its message, which is parsed already, to its answer."""

    async def run(world: World) -> None:
        space = world.spaces[0]
        layout = GroupLayout(0, blocks, 0, 1, (Region(0, 0, BLOCK, BLOCK, BLOCK, 1),))
        registration = RankRegistration(b"t", "i", namespace(), 0, 1, "host", (), (layout,))
        session = RankSession(
            1, Peer(b"t", 1, 0, 0, "", (), Caller(None, Grant())), registration, world.copier, world.copier.pid,
            (Imported(b"k", blocks * BLOCK),), {0: SessionGroup(layout, space)}, 0.0, TaskSet(lambda *_: None),
        )  # fmt: skip
        first = world.blocks if direction is Direction.STORE else 0
        message = pb.Blocks(hashes=world.packed(first, first + blocks), block_ids=np.arange(blocks).tobytes())
        answers: list[JobResult] = []

        def start() -> None:
            parts = blocks_from([message], HASH_BYTES)
            world.runner.start(session, Job(1, direction, parts, on_done=answers.append))

        await world.step(start)
        held = world.copier.held[direction]
        while not held.copies:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await world.step(lambda: held.end(held.nbytes(BLOCK)))
        await world.job_ended.wait()
        assert [(each.outcome, each.copied_blocks) for each in answers] == [(Outcome.DONE, blocks)]

    return run


def small_table(world: World) -> None:
    world.spaces.append(world.cache.open_space(namespace(-1), 0, 1, 0, BLOCK))
    for first in range(world.blocks, world.blocks + COPIED_ROWS - 512, 512):
        world.store(world.spaces[-1], first, first + 512)


async def grow(world: World) -> None:
    for first in range(world.blocks + COPIED_ROWS - 512, world.blocks + COPIED_ROWS + 2048, 512):
        await world.step(lambda first=first: world.store(world.spaces[-1], first, first + 512))  # type: ignore[misc]


def many_leases(world: World) -> None:
    for number in range(MAX_LEASES):
        world.lease(number, number + 1, b"o%d" % (number % 100))


async def leases_expire(world: World) -> None:
    world.now = 1e9
    await expire(world)


async def pin(world: World) -> None:
    group = world.group(0, MESSAGE_BLOCKS)
    await world.time.run(world.lookups.hold("name", "owner", namespace(), group, 60.0))


async def scrape(world: World) -> None:
    await world.time.run(world.metrics.rendering())


async def status(world: World) -> None:
    everything = Caller(Identity(0), Grant(("*",), admin=True))
    await world.time.run(world.report.reply(everything))


async def look(world: World) -> None:
    for _ in range(4):
        await world.step(world.watches.look)


def noted(world: World) -> None:
    for number in range(len(world.spaces)):
        world.watches.note(namespace(number), 0, world.packed(number, number + 1), b"note", user=number % 10)


CASES = [
    Case(f"a lookup of {MESSAGE_BLOCKS:,} hashes, a prefix, with a lease", lookup(LookupMode.PREFIX, lease=True)),
    Case(f"a lookup of {MESSAGE_BLOCKS:,} hashes, each by itself", lookup(LookupMode.BITMAP)),
    Case(f"a touch of {MESSAGE_BLOCKS:,} hashes", lookup(LookupMode.PREFIX, touch=True)),
    Case(f"a store of {STORE_BLOCKS:,} blocks into the full pool", job(Direction.STORE, STORE_BLOCKS)),
    Case(f"a store of {JOB_BLOCKS:,} blocks into the full pool", job(Direction.STORE, JOB_BLOCKS)),
    Case(f"a load of {LOAD_BLOCKS:,} blocks", job(Direction.LOAD, LOAD_BLOCKS)),
    Case(f"a load of {JOB_BLOCKS:,} blocks", job(Direction.LOAD, JOB_BLOCKS)),
    Case("a table grows beyond 65,536 blocks", grow, small_table),
    Case("16,384 leases expire", leases_expire, many_leases),
    Case("an engine dies with 8 of 10 blocks leased", engine_dies, leased),
    Case("all blocks expire", expire, later(100.0), ttl=50.0),
    Case("a store of 32 blocks where all have expired", small_store, later(100.0), ttl=50.0),
    Case("all blocks are cleared", lambda world: world.clear(world.lookups.clear(None))),
    Case("what was cleared is swept", lambda world: world.sweep(), cleared),
    Case("a store of 32 blocks of 1 MiB where blocks of 4 KiB were cleared", large_blocks, cleared),
    Case(f"{MESSAGE_BLOCKS:,} blocks are cleared, most of them leased", clear_leased, leased),
    Case("leased blocks that have expired are stored again", store_leased_again, tenth_leased_and_expired, ttl=5.0),
    Case("unused blocks are cleared: all", clear_unused, later(100.0)),
    Case("10,000 namespaces get new shares", share_out, namespaces=NAMESPACES),
    Case("10,000 namespaces are cleared", lambda world: world.clear(world.lookups.clear(None)), namespaces=NAMESPACES),
    Case("a scrape with 10,000 namespaces", scrape, namespaces=NAMESPACES),
    Case("a status with 10,000 namespaces", status, namespaces=NAMESPACES),
    Case("notes of 10,000 namespaces are looked at", look, noted, namespaces=NAMESPACES),
    Case(f"{MESSAGE_BLOCKS:,} blocks are pinned", pin),
]  # fmt: skip


def steps_of(case: Case, eviction: Eviction, blocks: int) -> tuple[list[float], float]:
    """Seconds of each step, and of the fixed loop beside it."""

    async def measure() -> tuple[list[float], float]:
        world = World(eviction, blocks, case.namespaces, ttl=case.ttl)
        world.now = 1.0
        world.lookups.expire()
        case.ready(world)
        watch, before = Stopwatch(), fixed()
        with watch.running():
            await case.run(world)
        steps = list(watch.steps)  # not this callback, which takes as long as the fixed loop
        return steps, min(before, fixed())

    return asyncio.run(measure())


def longest_step(case: Case, eviction: Eviction, blocks: int, rounds: int) -> tuple[float, float]:
    """Its longest step as a multiple of the fixed loop, and in seconds.

    Every round takes the same steps, so of each step the shortest one counts: what else a core did makes a step longer,
    never shorter, and of hundreds of steps some meet it in each round.
    """
    found = [steps_of(case, eviction, blocks) for _ in range(rounds)]
    seconds = [min(steps) for steps in zip(*(steps for steps, _ in found), strict=True)]
    return max(seconds) / min(beside for _, beside in found), max(seconds)


@pytest.mark.alone
@long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("eviction", Eviction)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_step_takes_longer_than_its_budget(case: Case, eviction: Eviction) -> None:
    for rounds in (1, ROUNDS):  # mostly the first is enough
        multiple, seconds = longest_step(case, eviction, BLOCKS, rounds)
        if multiple <= 1.0:
            return
    pytest.fail(f"a step took {seconds * 1e3:.1f} ms, {multiple:.2f} times its budget")


def main() -> None:
    only = sys.argv[1:]
    print("| What | lru | rhythm |\n|---|---|---|")
    for case in CASES:
        if only and not any(each in case.name for each in only):
            continue
        cells = []
        for eviction in (Eviction.LRU, Eviction.RHYTHM):
            multiple, seconds = longest_step(case, eviction, BLOCKS, ROUNDS)
            cells.append(f"{seconds * 1e3:.1f} ms ({multiple:.2f})")
        print(f"| {case.name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
