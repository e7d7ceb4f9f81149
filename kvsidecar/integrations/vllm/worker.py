"""The connector's worker side: registration, the jobs of each step, and their results. Imports neither vLLM nor torch.

There is one per worker process, used by the engine's thread alone. Only `unregister` and `wait_attached` wait for the
daemon.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvsidecar.client import DEVICE, Blocks, Client, GroupLayout, JobDone, Outcome
from kvsidecar.errors import Refusal
from kvsidecar.integrations.namespace_facts import EngineIdentity
from kvsidecar.integrations.offload_condition import node_id
from kvsidecar.integrations.rank_memory import RankMemory
from kvsidecar.integrations.refused_jobs import UnfitJobs
from kvsidecar.integrations.vllm.adapters import AdapterLoads
from kvsidecar.integrations.vllm.metadata import LoadJob, RankReport, StepPlan, StoreJob
from kvsidecar.integrations.vllm.ranks import Place
from kvsidecar.integrations.vllm.step_loads import StepLoads
from kvsidecar.integrations.vllm.written import MAX_STEPS

if TYPE_CHECKING:
    from kvsidecar.integrations.device_order import DeviceOrder

_log = logging.getLogger("kvsidecar.vllm")

CLOSE_SECONDS = 10.0
MAX_ENDS = 256
"""Most ends of jobs that a rank can report again: more than end in the steps that vLLM may lose at once."""


@dataclass(slots=True)
class Transfers:
    """Copies in one direction that have ended since the last `WorkerSide.take_transfers`."""

    nbytes: int = 0
    seconds: float = 0.0
    """Seconds of DMA alone."""
    sizes: list[int] = field(default_factory=list)
    """Bytes of each job that copied any."""
    declined: int = 0
    """Stores for which the pool had no room."""

    def add(self, done: JobDone) -> bool:
        """Add a job. Returns whether there is anything to report."""
        if done.reason in (Refusal.POOL_FULL, Refusal.POOL_FRAGMENTED, Refusal.TABLE_FULL):
            self.declined += 1
        if done.nbytes:
            self.nbytes += done.nbytes
            self.seconds += done.copy_seconds
            self.sizes.append(done.nbytes)
        return bool(self.sizes or self.declined)


@dataclass(slots=True)
class LoadResults:
    """Requests whose loads have ended since the last `WorkerSide.take_loads`."""

    finished: set[str] = field(default_factory=set)
    """All of these requests, including failed ones."""
    failed: set[str] = field(default_factory=set)
    failed_block_ids: set[int] = field(default_factory=set)
    failed_in_step: set[int] = field(default_factory=set)
    """Ids of blocks with which this step has computed, although they were not loaded. Their requests are in neither of
    the other sets."""


class WorkerSide:
    """The worker side of one rank.

    Args:
        identity: contains the namespace in which this rank stores.
        instance: name of the engine, the same for all of its ranks and unique on the node.
        new_client: makes a client for each registration.
        adapters: the adapters that this rank loads; None: the engine has no adapters.
        step_loads: the loads within steps; None: the engine has none.
    """

    def __init__(
        self,
        identity: EngineIdentity,
        instance: str,
        place: Place,
        new_client: Callable[[], Client],
        *,
        adapters: AdapterLoads | None = None,
        step_loads: StepLoads | None = None,
    ) -> None:
        self.step_loads = step_loads
        self.identity, self._instance, self._place = identity, instance, place
        self._new_client, self._adapters = new_client, adapters
        self._known_changes = 0
        """Number of changed adapters that the plan of this step takes into account."""
        self._client: Client | None = None
        self._layouts: tuple[GroupLayout, ...] = ()
        self._held: frozenset[int] = frozenset()
        self._order: DeviceOrder | None = None
        self._reported_epoch = 0
        # Jobs of this step that were not submitted yet. Callers check these fields before a call: the step leaves the
        # CPU's caches cold, and a call that does nothing takes about a microsecond.
        self.new_stores: tuple[StoreJob, ...] = ()
        self.new_loads: tuple[LoadJob, ...] = ()
        self._plans: deque[int] = deque(maxlen=MAX_STEPS)
        """Numbers of the last plans that this rank got."""
        self._idle = False
        """Whether the GPU is idle, as last reported to the client."""
        self._idle_unsent = False
        """Whether a change of ``_idle`` waits for the next job or poll."""
        self._loads_after: Any = None
        """An event of the engine's stream, which this step's loads wait for; None for nothing."""
        # By job number of the client.
        self._stores: dict[int, StoreJob] = {}
        self._loads: dict[int, LoadJob] = {}
        self._closed: list[tuple[Client, list[LoadJob]]] = []
        """Clients that were closed before the daemon had unmapped the memory, and their loads."""
        self._news: list[RankReport] = []
        """Changes to be reported."""
        self._ends: deque[RankReport] = deque(maxlen=MAX_ENDS)
        """The last reports of the ends of jobs, which vLLM may lose."""
        self._unfit_jobs = UnfitJobs(_log)
        self._results = LoadResults()
        self._store_transfers = Transfers()
        self._load_transfers = Transfers()
        self._transferred = False
        """Whether the transfers contain anything."""

    # -- registration ----------------------------------------------------------------------------------------------

    def register(self, memory: RankMemory, order: DeviceOrder | None = None) -> None:
        """Share this rank's memory as soon as a daemon answers. Returns at once.

        Args:
            order: the events of a GPU; by default those of the last registration.
        """
        self._order = order = order or self._order
        self._layouts = memory.groups
        self._held = frozenset(layout.group for layout in memory.groups)
        self._client, self._idle = self._new_client(), False
        self._client.attach(
            instance=self._instance,
            namespace=self.identity.namespace,
            buffers=memory.buffers,
            groups=memory.groups,
            rank=self._place.rank,
            world_size=self._place.world_size,
            events=order.ring if order is not None else None,
            options=self.identity.options,
            served_name=self.identity.served_name,
            retry=True,
        )

    def unregister(self) -> bool:
        """End the registration. Returns whether the daemon has unmapped the memory."""
        client, self._client = self._client, None
        if client is None:
            return True
        unmapped = client.close(CLOSE_SECONDS)
        for done in client.poll():
            self._ended(done)
        for store in self._stores.values():
            self._store_ended(store, done=False)  # even if it may still run: a late read harms nothing
        loads = list(self._loads.values())
        if self.step_loads is not None:
            loads += [each.load for each in self.step_loads.running]  # of a step that an error has ended
            self.step_loads.running.clear()
        if unmapped:
            # Nothing can write to the blocks any more, even of loads that the daemon did not report.
            for load in loads:
                self._load_ended(load, done=False)
        else:
            self._closed.append((client, loads))
            _log.error(
                "kvsidecar: the daemon has not unmapped the KV cache within %g s: requests with running loads wait "
                "until its process has exited",
                CLOSE_SECONDS,
            )
        self._stores.clear()
        self._loads.clear()
        return unmapped

    def woke(self, *, same_weights: bool) -> None:
        """Note that the engine has woken from sleep.

        Args:
            same_weights: whether the weights are known to be those of the start.
        """
        self._tell(RankReport(woken={self._place.rank: same_weights}))

    @property
    def registered(self) -> bool:
        return self._client is not None

    def wait_attached(self, timeout: float) -> bool:
        """Wait for the registration, at most ``timeout`` seconds, and not at all while the daemon is lost."""
        client = self._client
        return client is not None and (client.attached or (not client.lost_reason and client.wait_attached(timeout)))

    # -- a step ----------------------------------------------------------------------------------------------------

    def bind(self, plan: StepPlan) -> None:
        """Take the plan of this step, before its forward pass is enqueued."""
        if self.new_loads or self.new_stores:
            self.submit_rest()
        self.new_stores, self.new_loads, self._known_changes = plan.stores, plan.loads, plan.adapter_changes
        if plan.repeat:
            self._news += self._ends
        if plan.number:
            for lost in plan.lost:
                if lost.number not in self._plans:
                    self._plans.append(lost.number)
                    self.new_stores, self.new_loads = self.new_stores + lost.stores, self.new_loads + lost.loads
            self._plans.append(plan.number)
        if self._client is None:
            return
        if plan.give_up:
            self._client.give_up("no store has ended for seconds, and the engine needs the GPU's blocks")
        if plan.idle != self._idle:
            self._idle = plan.idle
            self._client.set_idle(plan.idle, soon=True)
            self._idle_unsent = True
        if self.new_loads and self._order is not None:
            # Steps in flight and this step's zeroing may write to the blocks: the copies wait for them.
            self._loads_after = self._order.mark()

    def submit_loads(self) -> None:
        loads, self.new_loads = self.new_loads, ()
        if not loads:
            return
        after, self._loads_after = self._loads_after, None
        if after is not None and after.query():
            after = None
        client = self._client
        for load in loads:
            mine = [each for each in load.blocks if each.group in self._held]
            if client is None or not self._computes_like(load) or (load.in_step and self.step_loads is None):
                self._load_ended(load, done=False)
            elif not mine:
                self._load_ended(load, done=True)  # only other ranks hold layers of these groups
            else:
                blocks = [Blocks(each.group, each.hashes, each.block_ids) for each in mine]
                if load.in_step and self.step_loads is not None:
                    self.step_loads.begin(client, load, blocks, after)
                else:
                    job = client.load(blocks, after=after, traceparent=load.traceparent)
                    self._loads[job] = load

    @property
    def _unknown_changes(self) -> bool:
        """Whether this rank has loaded other content of an adapter than the scheduler side knew of in this step."""
        return self._adapters is not None and self._adapters.changes > self._known_changes

    def _computes_like(self, load: LoadJob) -> bool:
        """Whether the request continues with the adapter's content with which these blocks were computed."""
        if not load.adapter or self._adapters is None:
            return True
        if not self._unknown_changes and self._adapters.keeps(load.adapter):
            return True
        _log.warning(
            "kvsidecar: adapter %d has changed since its content was looked up: request %s is computed without a hit",
            load.adapter,
            load.request_id,
        )
        return False

    def submit_stores(self) -> None:
        """Submit this step's stores. To be called after its kernels are enqueued: the copies read what they and earlier
        ones write."""
        stores, self.new_stores = self.new_stores, ()
        client = self._client
        # Blocks of the last steps may have been computed with an adapter that was replaced under their request.
        unsound = self._unknown_changes
        for store in stores:
            mine = [each for each in store.blocks if each.group in self._held and self._place.stores(each.group)]
            if client is None or unsound:
                self._store_ended(store, done=False)
            elif not mine:
                self._store_ended(store, done=True)
            else:
                order = self._order
                after = None if order is None else order.mark() if order.ring is None else DEVICE
                # One rank's notes are enough. Its shard is sealed after they have arrived, and so the whole block.
                noted = self._place.rank == 0
                blocks = [
                    Blocks(each.group, each.hashes, each.block_ids, each.notes if noted else b"") for each in mine
                ]
                job = client.store(
                    blocks,
                    after=after,
                    traceparent=store.traceparent,
                    priority=store.retention.priority,
                    ttl=store.retention.ttl,
                    idle_ttl=store.retention.idle_ttl,
                )
                self._stores[job] = store

    def submit_rest(self) -> None:
        """Submit the remaining jobs at the end of a step: vLLM 0.26 calls no hook in steps without a forward pass."""
        self.submit_loads()
        self.submit_stores()

    def end_step_loads(self) -> None:
        """End the loads within this step. To be called after its kernels are enqueued, which have waited for them."""
        if self.step_loads is None or not self.step_loads.running:
            return
        for each in self.step_loads.end():
            for done in each.ended:
                self._note_unfit(done)
                self._load_job_ended(each.load, done)
            self._load_ended(each.load, done=not each.failed)

    def poll(self) -> None:
        """Collect the results of jobs. Never waits."""
        if not (self._stores or self._loads or self._idle_unsent or self._closed):
            return
        self._idle_unsent = False
        if self._closed:
            self._settle_closed()
        for done in self._client.poll() if self._client is not None else ():
            self._ended(done)

    # -- reports ---------------------------------------------------------------------------------------------------

    def take_loads(self) -> LoadResults:
        results = self._results
        if results.finished or results.failed_in_step:
            self._results = LoadResults()
        return results

    def take_report(self) -> RankReport | None:
        """The changes since the last report; None if there are none."""
        client = self._client
        epoch = 0 if client is None else client.attached_epoch
        if epoch != self._reported_epoch:
            self._reported_epoch = epoch
            pool_bytes = 0 if client is None else client.readiness.pool_bytes
            pool_blocks = max((layout.most_blocks(pool_bytes) for layout in self._layouts), default=0)
            self._tell(RankReport({self._place.rank: epoch}, pool_blocks=pool_blocks))
        if self._adapters is not None and (loads := self._adapters.take()):
            self._tell(RankReport(adapters={self._place.rank: loads}))
        news, self._news = self._news, []
        return news[0].merged(*news[1:]) if news else None

    def take_first_report(self) -> RankReport:
        """The report at the engine's start, which contains the node on which this rank runs."""
        return replace(self.take_report() or RankReport(), nodes={self._place.rank: node_id()})

    def take_transfers(self) -> tuple[Transfers, Transfers] | None:
        """Stores and loads; None if there were none."""
        if not self._transferred:
            return None
        both = self._store_transfers, self._load_transfers
        self._transferred = False
        self._store_transfers, self._load_transfers = Transfers(), Transfers()
        return both

    # -- inside ----------------------------------------------------------------------------------------------------

    def _tell(self, news: RankReport) -> None:
        """Add to the next report."""
        self._news.append(news)

    def _tell_end(self, end: RankReport) -> None:
        """Add the end of a job to the next report, and keep it in case that this is lost."""
        self._ends.append(end)
        self._tell(end)

    @property
    def _bit(self) -> int:
        """This rank's bit in a report."""
        return 1 << self._place.rank

    def _settle_closed(self) -> None:
        """Report the loads of closed clients once nothing can write to their blocks any more."""
        closed, self._closed = self._closed, []
        for client, loads in closed:
            if not client.unmapped():
                self._closed.append((client, loads))
                continue
            for load in loads:
                self._load_ended(load, done=False)

    def _ended(self, done: JobDone) -> None:
        self._note_unfit(done)
        if (store := self._stores.pop(done.job, None)) is not None:
            self._transferred |= self._store_transfers.add(done)
            if done.reason == Refusal.NOT_ADMITTED:
                self._tell(RankReport(not_admitted=frozenset([store.number])))
            self._store_ended(store, done=done.outcome is Outcome.DONE)
            return
        load = self._loads.pop(done.job, None)
        if load is not None:
            self._load_job_ended(load, done)
            self._load_ended(load, done=done.outcome is Outcome.DONE)

    def _load_job_ended(self, load: LoadJob, done: JobDone) -> None:
        self._transferred |= self._load_transfers.add(done)
        if done.outcome is not Outcome.DONE:
            _log.warning(
                "kvsidecar: the load of request %s %s: %s %s", load.request_id, done.outcome, done.reason, done.error
            )

    def _note_unfit(self, done: JobDone) -> None:
        if self._unfit_jobs.note(done):
            self._tell(RankReport(refused=1))

    def _store_ended(self, store: StoreJob, *, done: bool) -> None:
        number = store.number
        self._tell_end(RankReport(stored={number: self._bit}, not_stored=frozenset() if done else frozenset([number])))

    def _load_ended(self, load: LoadJob, *, done: bool) -> None:
        number = load.number
        self._tell_end(RankReport(loaded={number: self._bit}, not_loaded=frozenset() if done else frozenset([number])))
        if load.in_step:
            if not done:
                self._results.failed_in_step.update(*[each.ids() for each in load.blocks])
            return
        self._results.finished.add(load.request_id)
        if not done:
            self._results.failed.add(load.request_id)
            for each in load.blocks:
                self._results.failed_block_ids.update(each.ids())
