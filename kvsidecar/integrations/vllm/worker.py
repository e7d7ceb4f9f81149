"""The connector's worker side: registration, the jobs of each step, and their results. Imports neither vLLM nor torch.

One per worker process, used by the engine's thread alone. Nothing here waits for the daemon but the end of a
registration; `register` only starts a thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kvsidecar.client import DEVICE, Blocks, Client, Completion, EventRing, JobDone, Namespace, Outcome
from kvsidecar.errors import Refusal
from kvsidecar.integrations.vllm.metadata import GroupBlocks, LoadJob, RankReport, StepPlan, StoreJob
from kvsidecar.integrations.vllm.ranks import Place, RankMemory

_log = logging.getLogger("kvsidecar.vllm")

CLOSE_SECONDS = 10.0


class Mark(Completion, Protocol):
    def query(self) -> bool:
        """Whether the work recorded before it is over."""


class Order(Protocol):
    """How copies are ordered on the device, such as by `kvsidecar.integrations.vllm.memory.DeviceOrder`."""

    @property
    def ring(self) -> EventRing | None: ...

    def mark(self) -> Mark:
        """An event behind everything that the engine's current stream was given so far."""


@dataclass(slots=True)
class Transfers:
    """Copies that have ended since the last call of `WorkerSide.take_transfers`, of one direction."""

    nbytes: int = 0
    seconds: float = 0.0
    """Seconds of DMA alone."""
    sizes: list[int] = field(default_factory=list)
    """Bytes of each job that copied something."""
    declined: int = 0
    """Stores for which the pool had no room."""

    def add(self, done: JobDone) -> bool:
        """Returns whether there is anything to tell."""
        if done.reason in (Refusal.POOL_FULL, Refusal.POOL_FRAGMENTED):
            self.declined += 1
        if done.nbytes:
            self.nbytes += done.nbytes
            self.seconds += done.copy_seconds
            self.sizes.append(done.nbytes)
        return bool(self.sizes or self.declined)


@dataclass(slots=True)
class LoadResults:
    """Requests whose loads have ended since the last call."""

    finished: set[str] = field(default_factory=set)
    """With those that failed."""
    failed: set[str] = field(default_factory=set)
    failed_block_ids: set[int] = field(default_factory=set)


class WorkerSide:
    """
    Args:
        namespace: the same that the scheduler's side looks up in.
        instance: name of the engine, the same for all of its ranks and different from any other's.
        new_client: a registration that was ended is followed by another one with a client of its own.
    """

    def __init__(self, namespace: Namespace, instance: str, place: Place, new_client: Callable[[], Client]) -> None:
        self.namespace = namespace
        self._instance = instance
        self._place = place
        self._new_client = new_client
        self._client: Client | None = None
        self._held: frozenset[int] = frozenset()
        self._order: Order | None = None
        self._reported_epoch = 0
        # Of this step, not submitted yet. Who sees that there are none need not call: behind a step's own work nothing
        # here is in the core's caches, and each call that does nothing takes about a microsecond.
        self.new_stores: tuple[StoreJob, ...] = ()
        self.new_loads: tuple[LoadJob, ...] = ()
        self._idle = False
        """As the client was told."""
        self._unsaid = False
        """That goes to the daemon with the next poll, if with no job before."""
        self._loads_after: Mark | None = None
        # By the client's number.
        self._stores: dict[int, StoreJob] = {}
        self._loads: dict[int, LoadJob] = {}
        self._left: list[tuple[Client, list[LoadJob]]] = []
        """Clients that were closed before their daemon had let go of the memory, and their loads."""
        # To be reported.
        self._stored: dict[int, int] = {}
        self._not_stored: set[int] = set()
        self._loaded: dict[int, int] = {}
        self._not_loaded: set[int] = set()
        self._results = LoadResults()
        self._store_transfers = Transfers()
        self._load_transfers = Transfers()
        self._transferred = False
        """Whether these hold anything."""

    # -- registration ----------------------------------------------------------------------------------------------

    def register(self, memory: RankMemory, order: Order | None = None) -> None:
        """Share this rank's memory, as soon as there is a daemon. Returns at once.

        Args:
            order: of the device, if it has one; the one of an earlier registration stays.
        """
        self._order = order or self._order
        order = self._order
        self._held = frozenset(layout.group for layout in memory.groups)
        self._client, self._idle = self._new_client(), False
        self._client.attach(
            instance=self._instance,
            namespace=self.namespace,
            buffers=memory.buffers,
            groups=memory.groups,
            rank=self._place.rank,
            world_size=self._place.world_size,
            events=order.ring if order is not None else None,
            retry=True,
        )

    def unregister(self) -> bool:
        """End the registration: no copy runs after this. True: the daemon holds no mapping of the memory any more."""
        client, self._client = self._client, None
        if client is None:
            return True
        unmapped = client.close(CLOSE_SECONDS)
        for done in client.poll():
            self._ended(done)
        for store in self._stores.values():
            self._store_ended(store, done=False)  # also where it may still run: a late read of the device harms nobody
        if unmapped:
            # Nothing can touch the blocks now, whatever the daemon did not come to say.
            for load in self._loads.values():
                self._load_ended(load, done=False)
        else:
            self._left.append((client, list(self._loads.values())))
            _log.error(
                "kvsidecar: the daemon has not unmapped the KV cache within %g s; requests with running loads wait "
                "until its process has exited",
                CLOSE_SECONDS,
            )
        self._stores.clear()
        self._loads.clear()
        return unmapped

    @property
    def registered(self) -> bool:
        return self._client is not None

    def wait_attached(self, timeout: float) -> bool:
        """Wait for the registration that was begun, at most ``timeout`` seconds; not while the daemon is known to be
        away."""
        client = self._client
        return client is not None and (client.attached or (not client.lost_reason and client.wait_attached(timeout)))

    # -- a step ----------------------------------------------------------------------------------------------------

    def bind(self, orders: StepPlan) -> None:
        """The orders of this step. Before its forward pass is enqueued."""
        if self.new_loads or self.new_stores:
            self.submit_rest()
        self.new_stores, self.new_loads = orders.stores, orders.loads
        if self._client is None:
            return
        if orders.idle != self._idle:
            self._idle = orders.idle
            self._client.set_idle(orders.idle, soon=True)
            self._unsaid = True
        if orders.loads and self._order is not None:
            # The blocks may be written by steps in flight and by this step's zeroing: the copies come after those.
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
            blocks = [_blocks(each) for each in load.blocks if each.group in self._held]
            if client is None:
                self._load_ended(load, done=False)
            elif not blocks:
                self._load_ended(load, done=True)  # other ranks hold the layers of these groups
            else:
                job = client.load(blocks, after=after, traceparent=load.traceparent)
                self._loads[job] = load

    def submit_stores(self) -> None:
        """After this step's kernels are enqueued: the copies read what they, and those before them, write."""
        stores, self.new_stores = self.new_stores, ()
        client = self._client
        for store in stores:
            mine = [each for each in store.blocks if each.group in self._held and self._place.stores(each.group)]
            if client is None:
                self._store_ended(store, done=False)
            elif not mine:
                self._store_ended(store, done=True)
            else:
                order = self._order
                after = None if order is None else order.mark() if order.ring is None else DEVICE
                blocks = [_blocks(each) for each in mine]
                self._stores[client.store(blocks, after=after, traceparent=store.traceparent)] = store

    def submit_rest(self) -> None:
        """At the end of a step: what it had no other moment for. vLLM 0.26 saves nothing in steps without a forward."""
        if self.new_loads:
            self.submit_loads()
        if self.new_stores:
            self.submit_stores()

    def poll(self) -> None:
        """See which copies have ended. Never waits."""
        if not (self._stores or self._loads or self._unsaid or self._left):
            return
        self._unsaid = False
        client = self._client
        if self._left:
            self._settle_left(0 if client is None else client.epoch)
        if client is None:
            return
        for done in client.poll():
            self._ended(done)

    # -- reports ---------------------------------------------------------------------------------------------------

    def take_loads(self) -> LoadResults:
        results = self._results
        if results.finished:
            self._results = LoadResults()
        return results

    def take_report(self) -> RankReport | None:
        """What the scheduler's side does not know yet; None for nothing."""
        client = self._client
        epoch = 0 if client is None else client.attached_epoch
        if epoch == self._reported_epoch and not (self._stored or self._loaded):
            return None
        attached = {} if epoch == self._reported_epoch else {self._place.rank: epoch}
        report = RankReport(
            attached, self._stored, frozenset(self._not_stored), self._loaded, frozenset(self._not_loaded)
        )
        self._reported_epoch = epoch
        self._stored, self._not_stored, self._loaded, self._not_loaded = {}, set(), {}, set()
        return report

    def take_transfers(self) -> tuple[Transfers, Transfers] | None:
        """Stores and loads; None if there were none."""
        if not self._transferred:
            return None
        both = self._store_transfers, self._load_transfers
        self._transferred = False
        self._store_transfers, self._load_transfers = Transfers(), Transfers()
        return both

    # -- inside ----------------------------------------------------------------------------------------------------

    def _settle_left(self, epoch: int) -> None:
        """Report the loads of clients that were closed, once nothing can write to their blocks any more."""
        left, self._left = self._left, []
        for client, loads in left:
            if not client.unmapped(epoch):
                self._left.append((client, loads))
                continue
            for load in loads:
                self._load_ended(load, done=False)

    def _ended(self, done: JobDone) -> None:
        if (store := self._stores.pop(done.job, None)) is not None:
            self._transferred |= self._store_transfers.add(done)
            self._store_ended(store, done=done.outcome is Outcome.DONE)
            return
        load = self._loads.pop(done.job, None)
        if load is None:
            return
        self._transferred |= self._load_transfers.add(done)
        if done.outcome is not Outcome.DONE:
            _log.warning(
                "kvsidecar: the load of request %s %s: %s %s", load.request_id, done.outcome, done.reason, done.error
            )
        self._load_ended(load, done=done.outcome is Outcome.DONE)

    def _store_ended(self, store: StoreJob, *, done: bool) -> None:
        self._stored[store.number] = 1
        if not done:
            self._not_stored.add(store.number)

    def _load_ended(self, load: LoadJob, *, done: bool) -> None:
        self._loaded[load.number] = 1
        self._results.finished.add(load.request_id)
        if not done:
            self._not_loaded.add(load.number)
            self._results.failed.add(load.request_id)
            for each in load.blocks:
                self._results.failed_block_ids.update(each.ids())


def _blocks(of: GroupBlocks) -> Blocks:
    return Blocks(of.group, of.hashes, of.block_ids)
