"""The daemon's parts over a simulated machine, wired as `kvsidecar.daemon.daemon` wires them, and
what must always hold."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import structlog

from benchmarks.simulation.copiers import SimCopiers
from benchmarks.simulation.kills import Kills
from benchmarks.simulation.loop import SimLoop
from benchmarks.simulation.machine import Machine, Violation
from benchmarks.simulation.shapes import PAGE, SHAPES
from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.shares import ShareLimits
from kvsidecar.cache.slots import SlotAllocator
from kvsidecar.copier.copiers import Copier
from kvsidecar.core.access import Access
from kvsidecar.core.checksums import Checksums
from kvsidecar.core.jobs import JobRunner
from kvsidecar.core.lookups import LookupService
from kvsidecar.core.metrics import Metrics
from kvsidecar.core.readiness import DaemonReadiness
from kvsidecar.core.sessions import Instances
from kvsidecar.core.watches import Watches
from kvsidecar.server.handler import Handler
from kvsidecar.server.service import Service
from kvsidecar.support.loop_time import LoopTime
from kvsidecar.support.steps import Steps
from kvsidecar.support.tasks import TaskSet
from kvsidecar.types import Namespace, Verify
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.cache.integrity import check_integrity

SLAB = 4 * PAGE
DEVICES = ("gpu-0", "gpu-1")
LEASE_MAX = 20.0


@functools.cache
def _metrics() -> Metrics:
    """One for all worlds of a process: they decide nothing, and take longer to build than a world to run."""
    return Metrics("simulation")


def _is_of(model: str, namespace: Namespace) -> bool:
    return namespace.model == model


@contextmanager
def quiet_and_repeatable() -> Iterator[None]:
    """No log lines."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)


class Call:
    """Stands for gRPC: a servicer context of one RPC whose other end is a simulated engine."""

    def __init__(
        self, on_reply: Callable[[pb.AttachReply], None] | None = None, wire: deque[tuple[Call, Any]] | None = None
    ) -> None:
        self._wire = wire
        self._inbox: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._on_reply = on_reply
        self.refused: tuple[grpc.StatusCode, str] | None = None
        self.broken = False
        """The client is not there any more: nobody reads."""

    def send(self, message: Any) -> None:
        """From the engine; on a slow wire it arrives when the scheduler says."""
        if self._wire is None:
            self.arrive(message)
        else:
            self._wire.append((self, message))

    def arrive(self, message: Any) -> None:
        self._inbox.append(message)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def half_close(self) -> None:
        self.send(grpc.aio.EOF)

    def invocation_metadata(self) -> None:
        """It sends no token."""

    async def read(self) -> Any:
        while not self._inbox:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._inbox.popleft()

    async def write(self, reply: pb.AttachReply) -> None:
        await asyncio.sleep(0)
        if self.broken:
            raise grpc.aio.InternalError("the call is over")  # as gRPC does before the handler hears of it
        if self._on_reply is not None:
            self._on_reply(reply)

    async def abort(self, code: grpc.StatusCode, text: str = "") -> None:
        self.refused = (code, text)
        raise grpc.aio.AbortError(text)


@dataclass(eq=False)
class Lease:
    """What an engine has been promised."""

    id: int
    keys: dict[int, list[int]]
    """Keys that the daemon must keep, by group."""
    expires_at: float
    ended: bool = False
    """Released, or the namespace was cleared: it promises nothing any more."""


class World:
    """One run of the daemon's decisions.

    Args:
        rng: every choice of the run comes from it.
    """

    def __init__(self, rng: random.Random, loop: SimLoop, note: Callable[[str], None]) -> None:
        self.rng = rng
        self.loop = loop
        self.note = note
        pool_bytes = rng.choice((2, 3, 5)) * SLAB + rng.choice((0, PAGE, 3 * PAGE))
        self.machine = Machine(rng, pool_bytes, note)
        self.copiers = SimCopiers(self.machine, loop, DEVICES, SLAB)
        self.copiers.on_change = self._copier_changed
        self.readiness = DaemonReadiness(pool_bytes)
        self.readiness.pinning()
        self.readiness.become_ready()
        self.tasks = TaskSet(self._task_failed)
        self.kills = self._maybe_killed()
        self.cache = BlockCache(
            SlotAllocator(pool_bytes, SLAB),
            next_id=itertools.count(1).__next__,
            records=self.kills and self.kills.records,
        )
        self._committed = 0
        if rng.random() < 0.5:
            self.reload_shares()
        loop_time = LoopTime(loop.time, 0.0)  # one step per iteration
        self.instances = Instances(
            self.cache, self.copiers, loop.time, self._task_failed, Access(None, owner=0, private=True), loop_time
        )
        checksums = Checksums(Verify.ALWAYS, self.cache) if rng.random() < 0.5 else None
        steps = Steps(loop_time)
        self.runner = JobRunner(
            self.cache, self.copiers, self.readiness, _metrics(), loop.time, later=steps.later, checksums=checksums,
            store_blocks=rng.randint(1, 3), load_blocks=rng.randint(1, 3),
        )  # fmt: skip
        self.lookups = LookupService(self.cache, self.readiness, _metrics(), loop.time, lease_max=LEASE_MAX)
        self.handler = Handler(
            epoch=1,
            instances=self.instances,
            runner=self.runner,
            lookups=self.lookups,
            readiness=self.readiness,
            metrics=_metrics(),
            tasks=self.tasks,
            make_status=lambda _: pb.StatusReply(),
            watches=Watches(self.cache, _metrics(), lambda *_: None, lambda: True),
            steps=steps,
        )
        self.service = Service(self.handler)
        self.wire: deque[tuple[Call, Any]] | None = deque() if rng.random() < 0.5 else None
        """What engines have sent and the daemon has not got, if the wire is slow."""
        self.leases: defaultdict[Namespace, list[Lease]] = defaultdict(list)
        self.failures: list[str] = []
        self.copiers.launch()
        self.finish(loop.create_task(self.copiers.start()))
        self._checked: object = None

    def _maybe_killed(self) -> Kills | None:
        """In three of ten runs, because it doubles their time. A run does the same with it as without."""
        rng = random.Random()
        rng.setstate(self.rng.getstate())
        return Kills(self.machine, SLAB, rng) if rng.random() < 0.3 else None

    # -- as in kvsidecar.daemon.daemon --------------------------------------------------------------------------------

    def end_all(self) -> None:
        """SIGTERM."""
        self.readiness.drain("the daemon is shutting down")
        for session in self.instances:
            self.tasks.spawn(self.instances.end(session, gone=False), name="end-session")

    def _copier_changed(self, copier: Copier) -> None:
        down = {each.uuid: each.down for each in self.copiers if each.down}
        self.readiness.devices_down(down, all_down=len(down) == len(DEVICES))
        self.note(f"the copier of {copier.uuid} {'is down' if copier.down else 'works'}")
        if copier.down:
            self.handler.copier_lost(copier)

    def _task_failed(self, name: str, error: BaseException) -> None:
        if not isinstance(error, grpc.aio.AbortError):
            self.failures.append(f"task {name} failed: {type(error).__name__}: {error}")

    def finish(self, task: asyncio.Task[Any]) -> None:
        """Let the loop run until this is over."""
        for _ in range(10_000):
            if task.done():
                break
            if self.loop.num_ready:
                self.loop.run_one()
            elif self.loop.num_threads:
                self.loop.run_thread()
            else:
                self.loop.advance(0.1)
        else:
            raise Violation(f"it does not end: {task}")
        task.result()

    def reload_shares(self) -> None:
        """SIGHUP: the pool is divided again, or not at all."""
        pages = self.cache.stats().total_bytes // PAGE
        names, left, limits = [shape.namespace.model for shape in SHAPES], pages, []
        for name in self.rng.sample(names, self.rng.randint(0, len(names))):
            guaranteed = self.rng.randint(0, left)
            most = self.rng.choice((None, None, self.rng.randint(max(1, guaranteed), pages)))
            left -= guaranteed
            covers = functools.partial(_is_of, name)
            ttl, idle_ttl = self.rng.choice((None, None, 1.0, 20.0)), self.rng.choice((None, None, 1.0, 20.0))
            limits.append(
                ShareLimits(name, covers, guaranteed * PAGE, None if most is None else most * PAGE, ttl, idle_ttl)
            )
        self.cache.set_shares(limits)
        self._committed = self.cache._table.shares.committed
        self.note(f"shares: {[(each.name, each.guaranteed, each.most) for each in limits]}")

    # -- what must hold --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """After every step."""
        if problems := Violation.seen + self.failures + self.loop.errors:
            raise AssertionError("; ".join(problems))
        # Every change of the cache moves its tick or a gauge; without one there is nothing new to look at.
        now = (self.cache._tick, self.cache.stats())
        if now != self._checked:
            check_integrity(self.cache)
            shares = self.cache._table.shares
            if shares.limited and shares.committed > max(now[1].total_bytes, self._committed):
                raise Violation("bytes that are guaranteed to a share are in use by another")
            self._committed = shares.committed
            if self.kills is not None:
                self.kills.check(self.cache)
            self._checked = now

    def check_at_rest(self) -> None:
        """The daemon has nothing to do."""
        if any(session.lost and not session.ending for session in self.instances):
            raise Violation("a session has outlived the copier that had its memory")

    def check_end(self) -> None:
        """All engines have gone, and nothing moves any more."""
        stats = self.cache.stats()
        if len(self.instances) or self.instances._peers:
            raise Violation(f"{len(self.instances)} sessions and {len(self.instances._peers)} peers are left")
        if mapped := [each.name for each in self.machine.by_handle.values() if each.mapped_by]:
            raise Violation(f"still mapped: {mapped}")
        if stats.leases or stats.reserved_bytes:
            raise Violation(f"{stats.leases} leases and {stats.reserved_bytes} reserved bytes are left")
        if self.machine.inflight:
            raise Violation(f"{len(self.machine.inflight)} copies never ended")
        if stats.loads or stats.leased_bytes:
            raise Violation(f"{stats.loads} loads have references, {stats.leased_bytes} bytes are referenced by nobody")
        if stats.quarantined_bytes:
            raise Violation(f"{stats.quarantined_bytes} bytes are quarantined")
        if self.runner.num_running:
            raise Violation("a job is still counted as running")
        if self.cache._stores:
            raise Violation(f"{len(self.cache._stores)} stores have never been ended")
        if len(self.tasks):
            raise Violation(f"{len(self.tasks)} tasks never ended")
        self.finish(self.loop.create_task(self.copiers.close()))
        if self.copiers.living:
            raise Violation(f"{len(self.copiers.living)} processes of copiers have outlived the daemon")
