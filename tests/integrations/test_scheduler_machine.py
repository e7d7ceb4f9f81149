"""Engines that do anything in any order: every reference is given back, every lease ends, and no copy reads or writes a
block that holds something else, or the same of other weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvsidecar.client.types import NO_ANSWER
from kvsidecar.integrations.vllm.groups import Group, Kind
from kvsidecar.integrations.vllm.lookups import OFFER_SECONDS
from kvsidecar.integrations.vllm.metadata import GroupBlocks, LoadJob, RankReport, StoreJob
from tests.integrations.engine import (
    Block,
    CachedRequests,
    Clock,
    LiveTables,
    NewRequest,
    Request,
    Step,
    TinyDaemon,
    TinyPool,
    full,
    group,
    side,
)
from tests.marks import examples

GROUPS = {
    "full": (full(),),
    "eagle": (full(eagle=True, lag_tokens=1),),
    "hybrid": (full(0), group(1, Kind.SLIDING_WINDOW, 4, window=6)),
}


@dataclass(eq=False)
class Running:
    request: Request
    tables: list[list[Block]] = field(default_factory=list)
    loading: int = 0
    """Tokens that are computed when the load is over."""
    aborted: bool = False


@dataclass(eq=False)
class Job:
    job: StoreJob | LoadJob
    ranks: int
    epoch: int
    """Of the daemon when it was planned."""
    weights: int
    """Of the engine when it was planned."""
    hashes: dict[bytes, bytes]
    """By the keys that the ranks were told."""
    leased: bool = False
    failed: bool = False

    @property
    def blocks(self) -> set[tuple[int, bytes]]:
        return {(each.group, one) for each in self.job.blocks for one in each.split()}


class Engine:
    """Each operation takes a number, from which it makes its choices; one that makes no sense now does nothing.

    Args:
        forgets: whether the daemon loses blocks, or is told to. If not, all that the GPU has in the end is stored.
    """

    def __init__(self, groups: tuple[Group, ...], lazy: bool, world_size: int, forgets: bool) -> None:
        self.groups, self.lazy, self.forgets = groups, lazy, forgets
        self.pool, self.daemon, self.clock = TinyPool(14), TinyDaemon(), Clock()
        extra: dict[str, Any] = {"store_mode": "lazy", "lazy_watermark": 10} if self.lazy else {}
        self.waits = world_size == 1
        self.side = side(
            self.groups,
            self.pool,
            world_size=world_size,
            daemon=self.daemon,
            clock=self.clock,
            waits=self.waits,
            **extra,
        )
        self.world_size = world_size
        self.waiting: list[Request] = []
        self.running: list[Running] = []
        self.loading: list[Running] = []
        self.preempted: set[str] = set()
        self.finished: set[str] = set()
        self.flight: list[tuple[list[tuple[Block, bytes]], list[Job]]] = []
        """Steps that are not executed: what they write, and the jobs that come with them."""
        self.jobs: list[Job] = []
        self.weights = 0
        self.refused = False
        """A reset, since the weights changed: vLLM was told to go on all the same, with KV of both."""
        self.count = 0
        self.attach()

    # -- requests --------------------------------------------------------------------------------------------------

    def arrive(self, choice: int) -> None:
        if len(self.waiting) + len(self.running) + len(self.loading) < 4:
            self.count += 1
            self.waiting.append(Request(f"r{self.count}", [choice % 2] * (7 + choice // 2 % 16)))
            self.side.on_new_request(self.waiting[-1])

    def key(self, each: Group, request: Request, index: int) -> bytes:
        return each.hashes(request.block_hashes, index, index + 1)[0] + each.index.to_bytes(4, "big")

    def local_hit(self, request: Request) -> tuple[int, list[list[Block]]]:
        """As vLLM's own prefix cache: the longest one that all groups can go on behind."""
        for tokens in range((request.num_tokens - 1) // 4 * 4, 0, -4):
            tables: list[list[Block]] = []
            for each in self.groups:
                need = each.first_needed(tokens)
                one = self.pool.cached_block_hash_to_block.get_one_block
                found = [one(self.key(each, request, i)) for i in range(need, tokens // 4)]
                if None in found:
                    break
                tables.append([self.pool.null_block] * need + [block for block in found if block is not None])
            else:
                return tokens, tables
        return 0, [[] for _ in self.groups]

    def admit(self, choice: int = 0) -> None:
        if not self.waiting:
            return
        request, accept = self.waiting[0], choice % 8
        local, tables = self.local_hit(request)
        external, is_async = self.side.get_num_new_matched_tokens(request, local)
        if external is None:
            return
        assert external % 4 == 0
        assert local + external < request.num_tokens
        assert is_async == (external > 0)
        external = external - 4 if accept == 7 and external > 4 else external  # vLLM may take less
        tokens = local + external if external else min(request.num_tokens, local + 8)
        touched = [block for table in tables for block in table if not block.is_null]
        self.pool.touch(touched)
        missing = [range(len(table), -(-tokens // 4)) for table in tables]
        nulls = [each.first_needed(tokens) if external else 0 for each in self.groups]
        count = sum(1 for blocks, null in zip(missing, nulls, strict=True) for i in blocks if i >= null)
        if count > self.pool.num_free:
            self.pool.free_blocks(reversed(touched))
            if not self.side.has_pending_block_frees() and self.running:
                self.preempt(len(self.running) - 1)
            return
        self.waiting.pop(0)
        fresh = iter(self.pool.take(count))
        for table, blocks, null in zip(tables, missing, nulls, strict=True):
            table += [next(fresh) if i >= null else self.pool.null_block for i in blocks]
        state = Running(request, tables, local + external if external else 0)
        self.side.update_state_after_alloc(request, LiveTables(tables), external)
        if external:
            while self.flight:  # vLLM frees no block that a step in flight may write, where loads could come
                self.execute()
            self.loading.append(state)
            self.schedule({})
        else:
            request.num_computed_tokens = local
            self.running.append(state)
            self.schedule({request.request_id: tokens - local}, new=state)

    def schedule(self, scheduled: dict[str, int], new: Running | None = None) -> None:
        """One step: blocks are allocated and entered in the cache now, and written when the step is executed."""
        writes: list[tuple[Block, bytes]] = []
        cached = CachedRequests()
        for state in self.running:
            request = state.request
            count = scheduled.get(request.request_id, 0)
            if not count:
                continue
            end = request.num_computed_tokens + count
            added = []
            for each, table in zip(self.groups, state.tables, strict=True):
                extra = self.pool.take(max(0, -(-end // 4) - len(table)))
                added.append([block.block_id for block in extra])
                table += extra
                for i in range(request.num_computed_tokens // 4, min(end // 4, len(request.block_hashes))):
                    self.pool.cache(table[i], self.key(each, request, i))
                    writes.append((table[i], self.key(each, request, i)))
                for i in range(min(each.first_needed(request.num_computed_tokens), len(table))):
                    if not table[i].is_null:  # left the window
                        self.pool.free_blocks([table[i]])
                        table[i] = self.pool.null_block
            if state is not new:
                cached.req_ids.append(request.request_id)
                cached.new_block_ids.append(tuple(added))
        orders = self.side.build_plan(
            Step(
                scheduled,
                self.preempted,
                self.finished,
                [self.new_request(new)] if new else [],
                cached,
            )
        )
        self.preempted, self.finished = set(), set()
        assert not (self.refused and (orders.stores or orders.loads))
        self.flight.append((writes, [self.job_of(each) for each in (*orders.stores, *orders.loads)]))
        for state in self.running:
            state.request.num_computed_tokens += scheduled.get(state.request.request_id, 0)

    def new_request(self, state: Running) -> NewRequest:
        tables = tuple([block.block_id for block in table] for table in state.tables)
        return NewRequest(state.request.request_id, tables, state.request.num_computed_tokens)

    def step(self, choice: int) -> None:
        """Every request that runs gets some tokens computed, if there are blocks for them."""
        chunk, grow = 1 + choice % 9, choice % 2 == 1
        scheduled = {}
        free = self.pool.num_free
        for state in list(self.running):
            request = state.request
            if request.num_computed_tokens >= request.num_tokens:
                if not grow:
                    continue
                request.append([9])
            count = min(chunk, request.num_tokens - request.num_computed_tokens)
            need = sum(max(0, -(-(request.num_computed_tokens + count) // 4) - len(t)) for t in state.tables)
            if need > free:
                continue
            free -= need
            scheduled[request.request_id] = count
        self.schedule(scheduled)

    def finish(self, index: int) -> None:
        if not self.running:
            return
        state = self.running.pop(index % len(self.running))
        assert self.side.request_finished(state.request) == (False, None)
        self.finished.add(state.request.request_id)
        self.free(state)

    def abort_while_loading(self, index: int) -> None:
        if not self.loading:
            return
        state = self.loading[index % len(self.loading)]
        if not state.aborted:
            state.aborted = True
            self.side.request_finished(state.request)

    def preempt(self, index: int) -> None:
        if not self.running:
            return
        state = self.running.pop(index % len(self.running))
        self.free(state)
        state.request.num_computed_tokens = 0
        self.preempted.add(state.request.request_id)
        self.waiting.insert(0, state.request)

    def free(self, state: Running) -> None:
        for table in state.tables:
            self.pool.free_blocks(block for block in reversed(table) if not block.is_null)

    # -- ranks -----------------------------------------------------------------------------------------------------

    def execute(self, _: int = 0) -> None:
        if not self.flight:
            return
        writes, jobs = self.flight.pop(0)
        for block, key in writes:
            block.content = self.content(key)
        self.jobs += jobs

    def content(self, key: bytes, weights: int | None = None) -> bytes:
        return key + (self.weights if weights is None else weights).to_bytes(2)

    def report(self, choice: int, sure: bool = False) -> None:
        """One rank says that a job is over: its copy has used the blocks until now."""
        if not self.jobs:
            return
        index, done = choice, sure or choice % 5 > 0
        job = self.jobs[index % len(self.jobs)]
        job.ranks -= 1
        number = job.job.number
        if isinstance(job.job, StoreJob):
            job.failed |= not done
            if not job.ranks:
                self.jobs.remove(job)
                self.stored(job)
            self.side.take_report(
                RankReport(
                    stored={number: 1},
                    not_stored=frozenset() if done else frozenset({number}),
                    not_admitted=frozenset({number} if not done and choice % 2 else ()),
                )
            )
            return
        here = all((each.group, key) in self.daemon.blocks for each in job.job.blocks for key in hashes_of(each))
        job.failed |= not (done and here)
        if not job.ranks:
            self.jobs.remove(job)
            self.loaded(job, job.job)
        self.side.take_report(
            RankReport(loaded={number: 1}, not_loaded=frozenset({number}) if job.failed else frozenset())
        )

    def stored(self, job: Job) -> None:
        for each in job.job.blocks:
            for key, block_id in zip(hashes_of(each), each.ids(), strict=True):
                content = self.pool.blocks[block_id].content
                name = job.hashes[key] + each.group.to_bytes(4, "big")
                assert content == self.content(name, job.weights), "a store read another block's content"
                if not job.failed:
                    self.daemon.blocks[each.group, key] = content

    def loaded(self, job: Job, load: LoadJob) -> None:
        (state,) = (each for each in self.loading if each.request.request_id == load.request_id)
        self.loading.remove(state)
        request = state.request
        written = set()
        if not job.failed:
            for each in load.blocks:
                for key, block_id in zip(hashes_of(each), each.ids(), strict=True):
                    block = self.pool.blocks[block_id]
                    assert block.block_hash is None, "a load wrote to a block that is cached"
                    block.content = self.daemon.blocks[each.group, key]
                    written.add(block_id)
        if state.aborted or job.failed:
            self.free(state)
            if not state.aborted:
                self.waiting.insert(0, request)
            return
        for of, table in zip(self.groups, state.tables, strict=True):
            for i in range(of.first_needed(state.loading), state.loading // 4):
                block = table[i]
                if block.block_id in written:
                    assert block.content == self.content(self.key(of, request, i), job.weights), "wrong KV was loaded"
                else:
                    assert block.content is not None, "vLLM goes on with a block that was not loaded"
                    assert block.content[:-2] == self.key(of, request, i), "vLLM goes on with another block"
                self.pool.cache(block, self.key(of, request, i))
        request.num_computed_tokens = state.loading
        self.running.append(state)

    def serve_all(self, _: int) -> None:
        """All goes well for a while."""
        self.daemon.reason = ""
        self.attach()
        for _ in range(40):
            if self.waiting:
                self.admit()
            self.step(8)
            while self.flight:
                self.execute()
            while self.jobs:
                self.report(0, sure=True)
            for state in list(self.running):
                if state.request.num_computed_tokens >= state.request.num_tokens:
                    self.finish(self.running.index(state))
            if not (self.waiting or self.running or self.loading or self.side.has_pending_push_work()):
                return

    def gpu_forgets(self, _: int) -> None:
        for block in self.pool.free_block_queue.blocks:
            self.pool.uncache(block)

    # -- the daemon ------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        self.side.take_report(RankReport(attached=dict.fromkeys(range(self.world_size), self.daemon.epoch)))

    def daemon_is(self, choice: int) -> None:
        what = ("attach", "attach", "lose", "restart", "hang", "answer", "answer")[choice % 7]
        if what == "attach":
            self.attach()
        elif what == "lose":
            self.side.take_report(RankReport(attached={0: 0}))
        elif what == "restart":
            if not self.forgets:
                return
            self.daemon.epoch += 1
            self.daemon.blocks.clear()
            self.daemon.leases.clear()
        else:
            self.daemon.reason = NO_ANSWER if what == "hang" else ""

    def evict(self, index: int) -> None:
        if not self.daemon.blocks or not self.forgets:
            return
        name = list(self.daemon.blocks)[index % len(self.daemon.blocks)]
        if name not in self.leased(self.daemon.leases):
            del self.daemon.blocks[name]

    def leased(self, leases: Iterable[int]) -> set[tuple[int, bytes]]:
        """Blocks that one of these keeps."""
        return {
            (each, packed[i : i + 32])
            for lease in leases
            for each, packed in self.daemon.leases.get(lease, {}).items()
            for i in range(0, len(packed), 32)
        }

    def another_engine(self, choice: int) -> None:
        """It shares the namespace, has the weights of the start, and goes on selection."""
        request = Request("theirs", [choice % 2] * (7 + choice // 2 % 16))
        for each in self.groups:
            for index in range(len(request.block_hashes)):
                key = self.key(each, request, index)
                self.daemon.blocks[each.index, key[:32]] = self.content(key, 0)

    def reset(self, choice: int) -> None:
        """The weights are changed, behind the steps in flight, and vLLM empties its cache if no block is in use."""
        if not self.forgets:
            return
        while choice % 2 and self.running:
            self.preempt(0)
        while self.flight:
            self.execute()
        self.weights += 1
        empty = self.pool.num_free == self.pool.num_gpu_blocks - 1
        if empty:
            for block in self.pool.blocks:
                self.pool.uncache(block)
        done = self.side.reset_cache()
        assert done or not empty
        assert not done or all(each.block_hash is None and not each.ref_cnt for each in self.pool.blocks[1:])
        self.refused = not done

    def time_passes(self, choice: int) -> None:
        passed = (0.01, 0.2, 2 * OFFER_SECONDS)[choice % 3]
        self.clock.now += passed
        if passed > OFFER_SECONDS:
            self.daemon.expire()

    # -- what must hold --------------------------------------------------------------------------------------------

    def owners(self) -> dict[int, int]:
        counts: dict[int, int] = {}
        for state in (*self.running, *self.loading):
            for table in state.tables:
                for block in table:
                    if not block.is_null:
                        counts[block.block_id] = counts.get(block.block_id, 0) + 1
        return counts

    def job_of(self, job: StoreJob | LoadJob) -> Job:
        keys = [key for each in job.blocks for key in hashes_of(each)]
        hashes = {key: self.side._weights_version.keys(key) for key in keys}  # a mask twice is none
        made = Job(job, self.world_size, self.daemon.epoch, self.weights, hashes)
        made.leased = isinstance(job, LoadJob) and made.blocks <= self.leased(self.daemon.kept)
        return made

    def check(self) -> None:
        self.side.take_counts()
        assert not self.side.counters.take()  # nothing is counted that is not told
        owners = self.owners()
        held = {block.block_id for block in self.pool.blocks[1:] if block.ref_cnt > owners.get(block.block_id, 0)}
        assert all(block.ref_cnt >= owners.get(block.block_id, 0) for block in self.pool.blocks)
        assert self.waits or len(held) <= 7
        loads = 0
        for job in (*self.jobs, *(job for _, jobs in self.flight for job in jobs)):
            loads += isinstance(job.job, LoadJob)
            if isinstance(job.job, StoreJob):
                assert {each for blocks in job.job.blocks for each in blocks.ids()} <= held
            elif job.leased and job.epoch == self.daemon.epoch:
                assert job.blocks <= self.leased(self.daemon.kept)
        short = self.daemon.leases.keys() - self.daemon.kept
        assert len(short) <= len(self.waiting) + loads, "leases of offers pile up"
        if not self.side.has_pending_push_work():
            assert not held
            assert not self.daemon.leases.keys() & self.daemon.kept

    def come_to_rest(self) -> None:
        self.daemon.reason = ""
        self.attach()
        for request in self.waiting:
            self.side.request_finished(request)
        self.waiting.clear()
        while self.running:
            self.finish(0)
        self.schedule({})
        for _ in range(1000):
            self.clock.now += 10  # what was declined is tried again
            if not (self.side.has_pending_push_work() or self.flight or self.jobs or self.loading):
                break
            self.schedule({})
            while self.flight:
                self.execute()
            while self.jobs:
                self.report(0, sure=True)
            while self.running:
                self.finish(0)
        assert not self.side.has_pending_push_work(), "an idle engine never comes to rest"
        assert self.pool.num_free == self.pool.num_gpu_blocks - 1
        self.daemon.expire()
        assert not self.daemon.leases
        counters = self.side.counters
        if not (self.forgets or counters.given_up_blocks or counters.not_admitted_stores):
            cached = {block.block_hash for block in self.pool.blocks if block.block_hash is not None}
            assert {(int.from_bytes(key[-4:], "big"), key[:-4]) for key in cached} <= set(self.daemon.blocks)


def hashes_of(blocks: GroupBlocks) -> list[bytes]:
    return [blocks.hashes[i : i + 32] for i in range(0, len(blocks.hashes), 32)]


OPERATIONS = (
    *(Engine.arrive,) * 5,
    *(Engine.admit,) * 6,
    *(Engine.step,) * 6,
    *(Engine.execute,) * 5,
    *(Engine.report,) * 6,
    *(Engine.finish,) * 2,
    *(Engine.serve_all,) * 2,
    *(Engine.gpu_forgets,) * 2,
    Engine.abort_while_loading,
    Engine.preempt,
    Engine.daemon_is,
    Engine.evict,
    *(Engine.reset,) * 2,
    Engine.another_engine,
    Engine.time_passes,
)


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("name", GROUPS)
@settings(max_examples=examples(100), suppress_health_check=list(HealthCheck))
@given(
    world_size=st.integers(1, 2),
    forgets=st.booleans(),
    script=st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 1000)), min_size=60, max_size=120),
)
def test_whatever_order_things_happen_in(
    name: str, lazy: bool, world_size: int, forgets: bool, script: list[Any]
) -> None:
    engine = Engine(GROUPS[name], lazy, world_size, forgets)
    for operation, choice in script:
        operation(engine, choice)
        engine.check()
    engine.come_to_rest()
