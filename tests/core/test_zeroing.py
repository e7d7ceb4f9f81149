"""Real memory is zeroed by a real thread, which the tests hold where they like."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest

from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.freed import Freed
from kvsidecar.cache.grants import StoreGrant
from kvsidecar.cache.slots import SlotAllocator
from kvsidecar.core import zeroing
from kvsidecar.core.metrics import Metrics
from kvsidecar.core.zeroing import Zeroing
from kvsidecar.support import tasks
from kvsidecar.support.tasks import TaskSet
from tests.cache.support import PAGE, begin, keys, namespace
from tests.harness import SECONDS, eventually_in_loop

POOL = 8
SHORT = 1000
"""Bytes that a shard has less than its slot."""


class World:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, short: int = 0) -> None:
        self.bytes = np.zeros(POOL * PAGE, np.uint8)
        self.address = self.bytes.ctypes.data
        freed = Freed(POOL * PAGE)
        self.cache = BlockCache(SlotAllocator(POOL * PAGE, POOL * PAGE, freed=freed))
        self.metrics = Metrics("host")
        self.zeroing = Zeroing(freed, self, self.metrics)
        self.shard_bytes = 2 * PAGE - short
        self.space = self.cache.open_space(namespace(), 0, 1, 0, self.shard_bytes)
        self.slices: list[Sequence[tuple[int, int]]] = []
        self.begun, self.goes_on = threading.Semaphore(0), threading.Semaphore(0)
        zero = zeroing._zero_pieces

        def held(address: int, pieces: Sequence[tuple[int, int]]) -> None:
            self.slices.append(pieces)
            self.begun.release()
            assert self.goes_on.acquire(timeout=SECONDS)
            zero(address, pieces)

        monkeypatch.setattr(zeroing, "_zero_pieces", held)
        monkeypatch.setattr(zeroing, "TURN_SECONDS", 0.001)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[None]]:
        task = asyncio.create_task(self.zeroing.run())
        try:
            yield task
        finally:
            self.goes_on.release(100)
            task.cancel()
            await asyncio.wait([task])

    async def slice(self) -> Sequence[tuple[int, int]]:
        """The next slice, which its thread has begun, and not done yet."""
        assert await asyncio.to_thread(self.begun.acquire, timeout=SECONDS)
        return self.slices[-1]

    async def all_zeroed(self) -> None:
        await eventually_in_loop(lambda: not self.cache.stats().unzeroed_bytes)

    def begin(self, name: str) -> StoreGrant:
        return begin(self.cache, self.space, keys(name))

    def fill(self, grant: StoreGrant, byte: int) -> None:
        for slot in grant.parts[0].slots.tolist():
            self.bytes[slot : slot + self.shard_bytes] = byte

    def left(self) -> set[int]:
        return set(self.bytes.tolist())


async def test_what_is_aborted_or_cleared_is_zeroed_and_the_rest_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    grants = [world.begin(name) for name in "abc"]
    for byte, grant in enumerate(grants, 1):
        assert world.zeroing.may_write(grant, lambda: pytest.fail("nothing is being zeroed"))
        world.fill(grant, byte)
    world.cache.abort_all(grants[0])
    world.cache.seal_all(grants[1])
    world.cache.seal_all(grants[2])
    world.cache.clear_blocks(world.space, keys("c"))
    world.goes_on.release(100)
    async with world.running():
        await world.all_zeroed()
    assert world.left() == {0, 2}
    assert world.metrics.value("kvsidecar_zeroed_bytes_total") == 4 * PAGE


async def test_a_store_waits_for_the_slice_that_its_slot_is_in_and_for_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch)
    first = world.begin("a")
    world.fill(first, 1)
    world.cache.abort_all(first)
    async with world.running():
        assert await world.slice() == ((0, 2 * PAGE),)
        late: list[str] = []
        waits, free = world.begin("b"), world.begin("c")
        assert not world.zeroing.may_write(waits, lambda: late.append("b"))
        assert world.zeroing.may_write(free, lambda: late.append("c"))
        assert not late
        world.goes_on.release()
        await world.all_zeroed()
        assert late == ["b"]
        world.fill(waits, 2)
        world.cache.seal_all(waits)
    assert world.left() == {0, 2}


async def test_a_store_zeroes_the_end_of_a_slot_that_it_does_not_write_to(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, short=SHORT)
    world.bytes[:] = 9
    grant = world.begin("a")
    assert world.zeroing.may_write(grant, lambda: None)
    (slot,) = grant.parts[0].slots.tolist()
    end = slot + 2 * PAGE
    assert set(world.bytes[end - SHORT : end].tolist()) == {0}
    assert set(world.bytes[: end - SHORT].tolist()) == set(world.bytes[end:].tolist()) == {9}


async def test_it_ends_only_when_its_thread_does_not_write_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool is unmapped then."""
    world = World(monkeypatch)
    grant = world.begin("a")
    world.fill(grant, 1)
    world.cache.abort_all(grant)
    late: list[str] = []
    async with world.running() as task:
        await world.slice()
        assert not world.zeroing.may_write(world.begin("b"), lambda: late.append("b"))
        task.cancel()
        for _ in range(100):
            await asyncio.sleep(0)
        assert not task.done()
        assert world.left() == {0, 1}
        world.goes_on.release()
        await asyncio.wait([task])
        assert task.cancelled()
        assert world.left() == {0}
        assert late == ["b"], "a job that waits has to end"


async def test_what_could_not_be_zeroed_is_zeroed_before_anybody_may_write_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch)
    monkeypatch.setattr(tasks, "AGAIN_SECONDS", 0.0)
    held, failures, heard = zeroing._zero_pieces, 2, list[str]()

    def failing(address: int, pieces: Sequence[tuple[int, int]]) -> None:
        nonlocal failures
        if failures:
            failures -= 1
            raise MemoryError("planned")
        held(address, pieces)

    monkeypatch.setattr(zeroing, "_zero_pieces", failing)
    grant = world.begin("a")
    world.fill(grant, 1)
    world.cache.abort_all(grant)
    parts = TaskSet(lambda name, error: heard.append(f"{name}: {error}"))
    part = parts.keep(world.zeroing.run, name="zeroing")
    await world.slice()
    assert heard == ["zeroing: planned"] * 2
    late: list[str] = []
    waits = world.begin("b")
    assert not world.zeroing.may_write(waits, lambda: late.append("b"))
    world.goes_on.release(100)
    await world.all_zeroed()
    assert (late, world.left()) == (["b"], {0})
    world.fill(waits, 2)
    world.cache.seal_all(waits)
    other = world.begin("c")
    world.fill(other, 3)
    world.cache.abort_all(other)
    await world.all_zeroed()
    assert world.left() == {0, 2}, "it zeroes no more, or what is in use"
    assert world.metrics.value("kvsidecar_zeroed_bytes_total") == 4 * PAGE
    part.cancel()
    await asyncio.wait([part])
