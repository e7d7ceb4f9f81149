"""A tier whose backend the test controls."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvsidecar.support import host_memory
from kvsidecar.support.memory_limits import PageKind, Pages
from kvsidecar.support.tasks import TaskSet
from kvsidecar.tiers.backend import ReadEnd, ShardSpace, WriteEnd
from kvsidecar.tiers.link import TierOptions
from kvsidecar.tiers.tier import Tier
from tests.harness import NAMESPACE, SECONDS, eventually_in_loop
from tests.tiers import memory_backend

POOL, SHARD = 1 << 20, 4096

SPACE = ShardSpace(NAMESPACE, 0, 0, 1, SHARD)

WIDTH = NAMESPACE.hash_bytes

NEVER = 3600.0


def name(number: int) -> bytes:
    return number.to_bytes(WIDTH, "little")


def names(*numbers: int) -> bytes:
    return b"".join(map(name, numbers))


class Bench:
    def __init__(self, tier: Tier, fd: int, pool: np.ndarray, changes: list[str], running: asyncio.Task[None]) -> None:
        self.tier, self.fd, self.pool, self.changes, self.running = tier, fd, pool, changes, running
        self.errors: list[str] = []
        """Of `running`, which goes on."""

    def slot(self, number: int) -> np.ndarray:
        return self.pool[number * SHARD : (number + 1) * SHARD]

    async def asked(self, ask: Callable[[Callable[[Any], None]], None]) -> Any:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        ask(answer.set_result)
        return await asyncio.wait_for(answer, SECONDS)

    async def write(self, *numbers: int, space: ShardSpace = SPACE) -> list[WriteEnd]:
        slots = np.array(numbers) * SHARD
        ends: list[WriteEnd] = await self.asked(
            lambda end: self.tier.write(space, names(*numbers), slots, [None] * len(numbers), end)
        )
        return ends

    async def read(self, *numbers: int, space: ShardSpace = SPACE) -> list[ReadEnd]:
        slots = np.array(numbers) * SHARD
        ends: list[ReadEnd] = await self.asked(
            lambda end: self.tier.read(space, names(*numbers), slots, end, lambda: None)
        )
        return ends

    async def find(self, *numbers: int, space: ShardSpace = SPACE) -> list[bool]:
        flags: list[bool] = await self.asked(lambda end: self.tier.find(space, names(*numbers), end))
        return flags

    async def stop_while_it_opens(self) -> int:
        """Returns the process."""
        await eventually_in_loop(lambda: self.tier._link is not None)
        assert self.tier._link is not None
        process = self.tier._link.pid
        os.kill(process, signal.SIGSTOP)
        assert self.tier.pid == 0
        return process

    async def on(self) -> None:
        await eventually_in_loop(lambda: not self.tier.off)


@asynccontextmanager
async def bench(*, deadline: float = NEVER, backend: str = memory_backend.NAME, **options: Any) -> AsyncIterator[Bench]:
    fd = os.memfd_create("pool")
    os.ftruncate(fd, POOL)
    pages = Pages(PageKind.SMALL, 4096)
    address = host_memory.map_file(fd, POOL, pages)
    changes: list[str] = []
    memory = SimpleNamespace(fd=fd, nbytes=POOL, pages=pages)
    tier = Tier("memory", TierOptions(backend, options, capacity_bytes=0), memory, deadline=deadline)
    tier.on_change = lambda each: changes.append(each.down)
    tasks = TaskSet(lambda _, error: made.errors.append(repr(error)))
    running = tasks.keep(tier.run, name="tier")
    made = Bench(tier, fd, host_memory.as_array(address, POOL), changes, running)
    try:
        yield made
    finally:
        await tier.close()
        if not running.cancelled():
            await asyncio.wait_for(running, SECONDS)
        host_memory.unmap(address, POOL)
        os.close(fd)
