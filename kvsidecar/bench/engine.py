"""One engine rank as the daemon sees it: memory, a client, and jobs with several in flight."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from kvsidecar.bench.driver import Cuda
from kvsidecar.bench.errors import BenchError
from kvsidecar.bench.layouts import Layout
from kvsidecar.bench.memory import EngineMemory, engine_memory
from kvsidecar.client import Blocks, Client, Outcome
from kvsidecar.types import Direction

TIMEOUT = 60.0
"""Time limit of each job and call, in seconds. None takes this long unless the daemon hangs."""
HASH_BYTES = 32


@dataclass(frozen=True, slots=True)
class Finished:
    """One job, by the client's clock."""

    submitted: float
    done: float
    nbytes: int
    copy_seconds: float
    """Seconds of DMA alone, as the daemon reports them."""

    @property
    def seconds(self) -> float:
        return self.done - self.submitted


@dataclass(frozen=True, slots=True)
class LeasedBlocks:
    """Sealed blocks of one job, under a lease."""

    hashes: list[bytes]
    lease: int


class AttachedEngine:
    """An attached rank. Made by `attached`."""

    def __init__(
        self, client: Client, layout: Layout, memory: EngineMemory, run: str, rng: np.random.Generator
    ) -> None:
        self.client = client
        self.layout = layout
        self.memory = memory
        self.namespace = layout.namespace(run)
        self._rng = rng

    def fresh(self, count: int) -> list[bytes]:
        """Hashes that nobody has stored: a known one would be skipped. Not from the seed, which several ranks share."""
        raw = os.urandom(count * HASH_BYTES)
        return [raw[start : start + HASH_BYTES] for start in range(0, len(raw), HASH_BYTES)]

    def jobs(self, hashes: Sequence[list[bytes]]) -> list[list[Blocks]]:
        """The arguments of `Client.store` and `Client.load` for jobs with these hashes, at ids in the layout's order:
        packed, as a connector keeps them."""
        ids = self.layout.block_ids(len(hashes[0]), len(hashes), self._rng)
        return [[Blocks(0, b"".join(of_job), np.array(at, np.int64))] for of_job, at in zip(hashes, ids, strict=True)]

    def stores(self, count: int, jobs: int) -> list[Callable[[], int]]:
        """Functions that submit one store of ``count`` fresh blocks each."""
        return [
            lambda blocks=blocks: self.client.store(blocks)  # type: ignore[misc]
            for blocks in self.jobs([self.fresh(count) for _ in range(jobs)])
        ]

    def loads(self, held: Sequence[LeasedBlocks], jobs: int) -> list[Callable[[], int]]:
        """Functions that submit one load each, of these blocks in turn."""
        used = [held[job % len(held)] for job in range(jobs)]
        return [
            lambda blocks=blocks, lease=each.lease: self.client.load(blocks, lease=lease)  # type: ignore[misc]
            for blocks, each in zip(self.jobs([each.hashes for each in used]), used, strict=True)
        ]

    def submits(
        self, direction: Direction, count: int, jobs: int, held: Sequence[LeasedBlocks]
    ) -> list[Callable[[], int]]:
        """Functions that submit jobs of one direction."""
        return self.stores(count, jobs) if direction is Direction.STORE else self.loads(held, jobs)

    def finish(self, job: int) -> tuple[int, float]:
        """Wait for a job. Returns its bytes and the seconds of its DMA. Raises BenchError unless it was done."""
        done = self.client.wait([job], TIMEOUT).get(job)
        if done is None:
            raise BenchError(f"a job of {self.layout.name} did not end in {TIMEOUT:g} s")
        if done.outcome is not Outcome.DONE or done.skipped_blocks:
            why = f"{done.reason} {done.error}".strip() or f"{done.skipped_blocks} blocks were skipped"
            raise BenchError(f"a job of {self.layout.name} was {done.outcome}: {why}")
        return done.nbytes, done.copy_seconds

    def run(self, submits: Sequence[Callable[[], int]], in_flight: int) -> list[Finished]:
        """Submit all, never more than ``in_flight`` outstanding; wait for them in order."""
        finished: list[Finished] = []
        outstanding: deque[tuple[int, float]] = deque()

        def finish_oldest() -> None:
            job, submitted = outstanding.popleft()
            nbytes, copy_seconds = self.finish(job)
            finished.append(Finished(submitted, time.perf_counter(), nbytes, copy_seconds))

        for submit in submits:
            if len(outstanding) == in_flight:
                finish_oldest()
            submitted = time.perf_counter()
            outstanding.append((submit(), submitted))
        while outstanding:
            finish_oldest()
        return finished

    @contextmanager
    def held(self, count: int, jobs: int, seconds: float = TIMEOUT) -> Iterator[list[LeasedBlocks]]:
        """Store ``jobs`` times ``count`` blocks and keep them from eviction."""
        hashes = [self.fresh(count) for _ in range(jobs)]
        for blocks in self.jobs(hashes):
            self.finish(self.client.store(blocks))
        leases: list[LeasedBlocks] = []
        try:
            for of_job in hashes:
                found = self.client.lookup(self.namespace, {0: of_job}, lease_seconds=seconds, timeout=TIMEOUT)
                if found.lease is None or found.groups[0].hits != count:
                    hits = found.groups[0].hits if found.groups else 0
                    raise BenchError(
                        f"only {hits} of {count} blocks of {self.layout.name} that were just stored are hits"
                    )
                leases.append(LeasedBlocks(of_job, found.lease))
            yield leases
        finally:
            for each in leases:
                self.client.release(each.lease)

    def clear(self) -> None:
        """Forget what was stored, so that the next stores find free slots."""
        self.client.clear(self.namespace)


@contextmanager
def attached(
    socket: str,
    layout: Layout,
    cuda: Cuda | None,
    *,
    run: str,
    rng: np.random.Generator,
    name: str = "kvsidecar-bench",
    host: str = "host",
) -> Iterator[AttachedEngine]:
    """Allocate, attach, and wait until the daemon is ready; detach and free the memory at the end.

    Args:
        host: the device on the host, without a GPU.

    Raises:
        ClientError: the daemon refuses the rank.
        BenchError: the daemon is not ready in time, or has failed.
    """
    memory = engine_memory(layout, cuda, host)
    # The budgets of a real engine would turn a stall into a miss; here the stall is what is to be seen.
    client = Client(socket, name=name, timeout=TIMEOUT, step_budget=TIMEOUT)
    try:
        client.attach(
            instance=name, namespace=layout.namespace(run), buffers=memory.kv_buffers(), groups=[layout.group()]
        )
        readiness = client.wait_ready(TIMEOUT)
        if not readiness.ready:
            raise BenchError(f"the daemon is not ready: {readiness.state}: {readiness.reason}")
        yield AttachedEngine(client, layout, memory, run, rng)
    finally:
        unmapped = client.close(TIMEOUT)
        if unmapped:  # else the daemon may still write there, and freeing it is undefined
            memory.close()


def throughput(finished: Sequence[Finished]) -> float:
    """Bytes per second from the first submission to the last end."""
    seconds = max(each.done for each in finished) - min(each.submitted for each in finished)
    return sum(each.nbytes for each in finished) / seconds
