"""Workers of the vLLM connector with stand-ins for their client and kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from kvsidecar.client import Client, GroupLayout, HostBuffer, JobDone, Readiness, State, pack_ids
from kvsidecar.integrations.namespace_facts import EngineIdentity
from kvsidecar.integrations.rank_memory import RankMemory
from kvsidecar.integrations.vllm.adapters import AdapterLoads
from kvsidecar.integrations.vllm.metadata import GroupBlocks, LoadJob, RankReport, StepPlan, StoreJob
from kvsidecar.integrations.vllm.ranks import Place
from kvsidecar.integrations.vllm.step_loads import StepLoads
from kvsidecar.integrations.vllm.worker import LoadResults, WorkerSide
from tests.harness import (
    LAYERS,
    NAMESPACE,
    NUM_BLOCKS,
    ROW_BYTES,
    SECONDS,
    closed_after_the_test,
    eventually,
    hashes,
    layout,
)


class Worker:
    """A worker with memory of its own, and the steps of an engine.

    Args:
        held: groups of which it has layers.
    """

    def __init__(
        self,
        socket: str,
        place: Place | None = None,
        *,
        held: tuple[int, ...] = (0,),
        name: str = "e",
        adapters: AdapterLoads | None = None,
        step_loads: StepLoads | None = None,
    ) -> None:
        self.place = place or Place()
        self.buffer = closed_after_the_test(HostBuffer(len(held) * LAYERS * NUM_BLOCKS * ROW_BYTES))
        self.kv = np.frombuffer(self.buffer.memory, np.uint8).reshape(len(held), LAYERS, NUM_BLOCKS, ROW_BYTES)
        self.held = held
        self.layouts = []
        for at, group in enumerate(held):
            shard, num_shards = self.place.shard(group)
            (region,) = layout().regions
            region = replace(region, offset=at * self.kv[0].nbytes)
            self.layouts.append(GroupLayout(group, NUM_BLOCKS, shard, num_shards, (region,)))
        identity = EngineIdentity(NAMESPACE, {})
        self.side = WorkerSide(
            identity,
            name,
            self.place,
            lambda: closed_after_the_test(Client(socket, timeout=SECONDS)),
            adapters=adapters,
            step_loads=step_loads,
        )
        self.forward: Callable[[], object] = lambda: None
        """The step's kernels."""
        self.known_changes = 0
        """Changed adapters that the scheduler's side knows of."""
        self.report = RankReport()
        self.results = LoadResults()

    def register(self, *, attached: bool = True, order: LateKernels | None = None) -> Worker:
        self.side.register(RankMemory(self.buffer.kv_buffers(), tuple(self.layouts)), order)
        if attached:
            assert self.side.wait_attached(SECONDS)
            self.client.wait_ready(SECONDS)
        return self

    @property
    def client(self) -> Client:
        client = self.side._client
        assert client is not None
        return client

    def step(self, *stores: StoreJob, loads: tuple[LoadJob, ...] = (), saves: bool = True) -> None:
        """One step of the engine, in the order of vLLM's hooks."""
        self.run(StepPlan(tuple(stores), loads, adapter_changes=self.known_changes), saves=saves)

    def run(self, plan: StepPlan, *, saves: bool = True) -> None:
        """A step with this plan."""
        self.side.bind(plan)
        self.side.submit_loads()
        self.forward()
        if saves:
            self.side.submit_stores()
        self.side.end_step_loads()
        self.side.poll()
        results = self.side.take_loads()
        self.results.failed_in_step |= results.failed_in_step
        self.results.finished |= results.finished
        self.results.failed |= results.failed
        self.results.failed_block_ids |= results.failed_block_ids
        if (report := self.side.take_report()) is not None:
            self.report = self.report.merged(report)
        self.side.submit_rest()

    def step_behind(self, mark: Mark, *stores: StoreJob, loads: tuple[LoadJob, ...] = ()) -> None:
        """`step`, whose jobs come after this work of the engine's stream."""
        self.side._order = SimpleNamespace(ring=None, mark=lambda: mark)  # type: ignore[assignment]
        self.step(*stores, loads=loads)
        self.side._order = None

    def until(self, what: Callable[[Worker], object]) -> Worker:
        """Steps with nothing to do, as of an engine that waits."""

        def stepped() -> object:
            return what(self) or self.step()

        eventually(stepped, lambda: (self.report, self.results), pause=0.001)
        return self

    def close(self) -> None:
        self.side.unregister()
        del self.kv
        self.buffer.close()


def blocks(*names: str, at: list[int], group: int = 0) -> tuple[GroupBlocks, ...]:
    return (GroupBlocks(group, b"".join(hashes(*names)), pack_ids(at)),)


def store(number: int, *names: str, at: list[int], group: int = 0) -> StoreJob:
    return StoreJob(number, blocks(*names, at=at, group=group))


def load(number: int, *names: str, at: list[int], request: str = "r", group: int = 0) -> LoadJob:
    return LoadJob(number, request, blocks(*names, at=at, group=group))


class Mark:
    """Work of the engine's stream that ends when a test says so."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def query(self) -> bool:
        return self.over.is_set()

    def synchronize(self) -> None:
        assert self.over.wait(SECONDS)


class LateKernels:
    """A device order with a ring, for a device whose events nobody can share: the client waits for `mark`. What the
    engine's stream was given writes ``block`` of ``kv`` when `run` says so, and not before."""

    def __init__(self) -> None:
        self.handles = [bytes(64)]
        self.marked: list[Mark] = []

    @property
    def ring(self) -> LateKernels:
        return self

    def record(self, index: int) -> None:
        raise AssertionError("the daemon waits on no event of this device")

    def mark(self) -> Mark:
        self.marked.append(Mark())
        return self.marked[-1]

    def run(self) -> None:
        for each in self.marked:
            each.over.set()


class StubClient:
    """A client whose jobs end as a test says."""

    attached = True
    epoch = attached_epoch = 5
    readiness = Readiness(State.READY)
    lost_reason = ""

    def __init__(self) -> None:
        self.ended: list[JobDone] = []
        self.jobs = 0
        self.traceparents: list[str | None] = []
        self.released = True

    def attach(self, **_: object) -> None: ...

    def set_idle(self, idle: bool, *, soon: bool) -> None: ...

    def store(self, *_: object, traceparent: str | None, **__: object) -> int:
        self.traceparents.append(traceparent)
        self.jobs += 1
        return self.jobs

    load = store

    def poll(self) -> list[JobDone]:
        ended, self.ended = self.ended, []
        return ended

    def close(self, timeout: float) -> bool:
        return self.released

    def unmapped(self) -> bool:
        return self.released


def stubbed() -> tuple[Worker, StubClient]:
    worker, stub = Worker("unused"), StubClient()
    worker.side._new_client = lambda: stub  # type: ignore[assignment, return-value]
    return worker.register(attached=False), stub
