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
from kvsidecar.integrations.vllm.groups import Group, GroupKind
from kvsidecar.integrations.vllm.lookups import OFFER_SECONDS
from kvsidecar.integrations.vllm.metadata import GroupBlocks, LoadJob, RankReport, StepPlan, StoreJob
from kvsidecar.integrations.vllm.scheduler import SchedulerSide
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
    key_of,
    side,
)
from tests.marks import examples

GROUPS = {
    "full": (full(),),
    "eagle": (full(eagle=True, lag_tokens=1),),
    "hybrid": (full(0), group(1, GroupKind.SLIDING_WINDOW, 4, window=6)),
}


@dataclass(eq=False)
class Running:
    request: Request
    tables: list[list[Block]] = field(default_factory=list)
    loading: int = 0
    """Tokens that are computed when the load is over."""
    aborted: bool = False
    spoiled: bool = False
    """Whether some of the blocks that it has hit are not right."""
    cached: int = 0
    """Blocks that are in the prefix cache, or are not worth it any more."""


@dataclass(eq=False)
class Flight:
    """A step whose output is not processed."""

    step: Step
    orders: StepPlan
    jobs: list[Job]
    zeroed: list[Block]
    """What is new in it."""
    loaded: list[tuple[Block, bytes]]
    """What another connector loads in it, with the keys."""
    writes: list[tuple[Block, bytes, list[tuple[Block, bytes]]]]
    """What it computes, with the keys, and on which blocks."""
    fails: bool = False
    """Whether the other connector's load does."""


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
            block_ids=self.block_ids,
            of=SchedulerSide,
            **extra,
        )
        self.world_size = world_size
        self.waiting: list[Request] = []
        self.running: list[Running] = []
        self.loading: list[Running] = []
        self.preempted: set[str] = set()
        self.finished: set[str] = set()
        self.flight: list[Flight] = []
        self.jobs: list[Job] = []
        self.got: set[int] = set()
        """Numbers of the plans that the ranks got."""
        self.lost: dict[int, list[Job]] = {}
        """Jobs of the plans that they did not get."""
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

    def block_ids(self, request_id: str) -> list[list[int]]:
        states = [each for each in (*self.running, *self.loading) if each.request.request_id == request_id]
        return [[block.block_id for block in table] for each in states for table in each.tables]

    def local_hit(self, request: Request) -> tuple[int, list[list[Block]]]:
        """As vLLM's own prefix cache: the longest one that all groups can go on behind."""
        for tokens in range((request.num_tokens - 1) // 4 * 4, 0, -4):
            tables: list[list[Block]] = []
            for each in self.groups:
                need = each.first_needed(tokens)
                one = self.pool.cached_block_hash_to_block.get_one_block
                found = [one(key_of(each, request, i)) for i in range(need, tokens // 4)]
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
        # Another connector beside this one may have more, and loads it in the step that computes the rest.
        other = (
            0
            if external or len(self.groups) > 1
            else min(choice // 8 % 3 * 4, (request.num_tokens - 1 - local) // 4 * 4)
        )
        tokens = max(tokens, min(request.num_tokens, local + other + 1)) if other else tokens
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
        state = Running(request, tables, local + external if external else 0, cached=local // 4)
        self.side.update_state_after_alloc(request, LiveTables(tables), external)
        if external:
            self.loading.append(state)
            while self.flight:  # vLLM frees no block that a step in flight may write, where loads could come
                self.execute()
            for table in tables:
                for block in table[local // 4 :]:
                    block.content = None
            self.schedule({})
        else:
            request.num_computed_tokens = local + other
            self.running.append(state)
            self.schedule({request.request_id: tokens - local - other}, new=state, other=other, fails=choice % 3 == 0)

    def schedule(
        self,
        scheduled: dict[str, int],
        new: Running | None = None,
        displaced: Running | None = None,
        other: int = 0,
        fails: bool = False,
    ) -> None:
        """One step: blocks are allocated and entered in the cache now, and written when the step is executed.

        Args:
            displaced: is preempted when it has got its blocks, because a request of a higher priority needs some.
            other: tokens that another connector loads for ``new`` in this step.
            fails: whether that load fails.
        """
        flight = Flight(Step(), StepPlan(), [], [], [], [], fails)
        if new is not None:
            flight.zeroed += [block for table in new.tables for block in table[new.cached :] if not block.is_null]
        cached = CachedRequests()
        for state in list(self.running):
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
                flight.zeroed += extra
                full_blocks = min(end // 4, len(request.block_hashes))
                if full_blocks > state.cached:
                    self.pool.cache_full_blocks(request, table, state.cached, full_blocks, each)
                keys = [key_of(each, request, i) for i in range(full_blocks)]
                first = request.num_computed_tokens // 4
                if state is new:
                    flight.loaded += zip(
                        table[first - other // 4 : first], keys[first - other // 4 : first], strict=True
                    )
                for i in range(first if state is not displaced else full_blocks, full_blocks):
                    before = [each for each in zip(table[:i], keys, strict=False) if not each[0].is_null]
                    flight.writes.append((table[i], keys[i], before))
                for i in range(min(each.first_needed(request.num_computed_tokens), len(table))):
                    if not table[i].is_null:  # left the window
                        self.pool.free_blocks([table[i]])
                        table[i] = self.pool.null_block
            state.cached = max(state.cached, min(end // 4, len(request.block_hashes)))
            if state is displaced:
                del scheduled[request.request_id]
                self.preempt(self.running.index(state))
            elif state is not new:
                cached.req_ids.append(request.request_id)
                cached.new_block_ids.append(tuple(added))
        flight.step = Step(scheduled, self.preempted, self.finished, [self.new_request(new)] if new else [], cached)
        flight.orders = orders = self.side.build_plan(flight.step)
        self.preempted, self.finished = set(), set()
        assert not (self.refused and (orders.stores or orders.loads))
        flight.jobs = [self.job_of(each) for each in (*orders.stores, *orders.loads)]
        self.flight.append(flight)
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

    def displace(self, choice: int) -> None:
        """A step in which the request that was scheduled first is preempted again."""
        victim = next(
            (each for each in self.running if each.request.num_computed_tokens < each.request.num_tokens), None
        )
        if victim is None:
            return
        count = min(1 + choice % 9, victim.request.num_tokens - victim.request.num_computed_tokens)
        end = victim.request.num_computed_tokens + count
        if sum(max(0, -(-end // 4) - len(table)) for table in victim.tables) <= self.pool.num_free:
            self.schedule({victim.request.request_id: count}, displaced=victim)

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
        """A step is executed, and vLLM processes its output."""
        if not self.flight:
            return
        flight = self.flight.pop(0)
        self.compute(flight)
        self.take_orders(flight.orders, flight.jobs)
        invalid = {block.block_id for block, _ in flight.loaded} if flight.fails else set()
        self.side.begin_output(flight.step, invalid)
        if invalid:
            self.compute_again(flight.step, invalid)
        self.side.end_output()

    def compute(self, flight: Flight) -> None:
        for block in flight.zeroed:
            block.content = None
        for block, key in flight.loaded:
            block.content = None if flight.fails else self.content(key)
        for block, key, before in flight.writes:
            right = all(each.content is not None and each.content[:-2] == name for each, name in before)
            block.content = self.content(key) if right else None

    def compute_again(self, step: Step, invalid: set[int]) -> None:
        """As vLLM with the policy ``recompute``: the first request with an invalid block computes it again, and the
        others believe that it is right then. What later steps have computed is delivered."""
        for state in self.loading:
            state.spoiled |= any(block.block_id in invalid for table in state.tables for block in table)
        marked: set[int] = set()
        for state in self.running:
            request = state.request
            computed = request.num_computed_tokens - step.num_scheduled_tokens.get(request.request_id, 0)
            (table,) = state.tables
            mine = [i for i in range(-(-computed // 4)) if table[i].block_id in invalid]
            own = [i for i in mine if table[i].block_id not in marked]
            marked.update(table[i].block_id for i in own)
            if own:
                request.num_computed_tokens = own[0] * 4
            elif mine:
                request.num_computed_tokens = computed

    def take_orders(self, orders: StepPlan, jobs: list[Job]) -> None:
        """The ranks get a plan, and those of lost steps that they did not get."""
        self.jobs += jobs
        for lost in orders.lost:
            if lost.number not in self.got:
                self.got.add(lost.number)
                self.jobs += self.lost.pop(lost.number)
        self.got.add(orders.number)

    def lose_steps(self, choice: int) -> None:
        """A rank raises an error, and the engine goes on nevertheless: vLLM aborts all requests, and drops the steps in
        flight, of which the ranks may have got the first ones."""
        if not self.flight:
            return
        flights, self.flight = self.flight, []
        self.side.abort_all()
        for i, flight in enumerate(flights):
            if i < choice % 3:
                self.compute(flight)
                self.take_orders(flight.orders, flight.jobs)
            else:
                self.lost[flight.orders.number] = flight.jobs
        for request in self.waiting:
            self.side.request_finished(request)
        self.waiting.clear()
        while self.running:
            self.finish(0)
        for index in range(len(self.loading)):
            self.abort_while_loading(index)

    def content(self, key: bytes, weights: int | None = None) -> bytes:
        return key + (self.weights if weights is None else weights).to_bytes(2)

    def report(self, choice: int, sure: bool = False) -> None:
        """One rank says that a job is over: its copy has used the blocks until now."""
        if not self.jobs:
            return
        index, done = choice, sure or choice % 5 > 0
        job = self.jobs[index % len(self.jobs)]
        job.ranks -= 1
        number, rank = job.job.number, 1 << job.ranks
        if isinstance(job.job, StoreJob):
            job.failed |= not done
            if not job.ranks:
                self.jobs.remove(job)
                self.stored(job)
            self.side.take_report(
                RankReport(
                    stored={number: rank},
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
            RankReport(loaded={number: rank}, not_loaded=frozenset({number}) if job.failed else frozenset())
        )

    def stored(self, job: Job) -> None:
        for each in job.job.blocks:
            for key, block_id in zip(hashes_of(each), each.ids(), strict=True):
                content = self.pool.blocks[block_id].content
                name = job.hashes[key] + each.group.to_bytes(4, "big")
                assert content == self.content(name, job.weights), "a store read what is not the content of its hash"
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
        if state.aborted or state.spoiled or job.failed:
            self.free(state)
            if not state.aborted:
                self.waiting.insert(0, request)
            return
        for of, table in zip(self.groups, state.tables, strict=True):
            for i in range(of.first_needed(state.loading), state.loading // 4):
                block = table[i]
                if block.block_id in written:
                    assert block.content == self.content(key_of(of, request, i), job.weights), "wrong KV was loaded"
                else:
                    assert block.content is not None, "vLLM goes on with a block that was not loaded"
                    assert block.content[:-2] == key_of(of, request, i), "vLLM goes on with another block"
            if state.cached < state.loading // 4:
                first = max(state.cached, of.first_needed(state.loading))
                self.pool.cache_full_blocks(request, table, first, state.loading // 4, of)
        state.cached = state.loading // 4
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
                key = key_of(each, request, index)
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
        self.side.begin_reset()
        empty = self.pool.num_free == self.pool.num_gpu_blocks - 1
        if empty:
            for block in self.pool.blocks:
                self.pool.uncache(block)
        done = self.side.reset_cache()
        assert done or not empty
        assert not done or all(each.block_hash is None and not each.ref_cnt for each in self.pool.blocks[1:])
        self.refused = not done
        self.side.end_reset()

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
        lost = [job for jobs in self.lost.values() for job in jobs]
        for job in (*self.jobs, *lost, *(job for flight in self.flight for job in flight.jobs)):
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
    *(Engine.displace,) * 2,
    Engine.lose_steps,
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
