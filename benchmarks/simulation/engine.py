"""Simulated engines. They speak the wire's messages, own their memory, and check every byte they are given."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass

import grpc

from benchmarks.simulation.machine import Allocation, Event, Violation
from benchmarks.simulation.shapes import HASHES, NUM_BLOCKS, NUM_KEYS, Shape, content, make_layout, rows_of
from benchmarks.simulation.world import DEVICES, Call, Lease, World
from kvsidecar.core.peer import Peer
from kvsidecar.protocol.wire import layout_to_wire, namespace_to_wire, pack_ids
from kvsidecar.support.peer import Credentials
from kvsidecar.types import PROTOCOL, Direction, GroupLayout
from kvsidecar.v1 import sidecar_pb2 as pb


@dataclass(eq=False)
class Job:
    direction: Direction
    blocks: list[tuple[int, int, int]]
    """(group, key, block id)"""
    lease: Lease | None = None
    kernel: Event | None = None
    """What the store comes after, while the kernel that writes its blocks has not run."""
    ring: int = 0
    let_go: bool = False
    """A flush has said that its blocks are the engine's again."""


class Engine:
    """One engine process with one rank or more."""

    def __init__(self, world: World, name: str, shape: Shape) -> None:
        self.world = world
        self.name = name
        self.shape = shape
        self.leases: list[Lease] = []
        self.found: dict[int, list[int]] = {}
        """What the last lookup found."""
        self.closing = False
        self.dead = False
        device = world.rng.choice(DEVICES)
        self.ranks = [Rank(self, number, device) for number in range(shape.num_ranks)]

    @property
    def over(self) -> bool:
        return self.closing or self.dead

    # -- what a scheduler does -------------------------------------------------------------------------------------

    def lookup(self) -> None:
        """Ask what is there, mostly with a lease on it."""
        rng = self.world.rng
        if rng.random() < 0.7:  # most engines do not ask for what they know to be over
            self.leases = [lease for lease in self.leases if lease.expires_at > self.world.loop.time()]
        keys = {group.group: rng.sample(range(NUM_KEYS), rng.randint(1, 4)) for group in self.shape.groups}
        request = pb.LookupRequest(
            namespace=namespace_to_wire(self.shape.namespace),
            mode=rng.choice((pb.LookupRequest.MODE_PREFIX, pb.LookupRequest.MODE_BITMAP)),
            lease_ms=rng.choice((0, 500, 5000, 60000)),
            token=self.ranks[0].peer.token,
        )
        for group, chain in keys.items():
            request.groups.add(group=group, hashes=b"".join(HASHES[key] for key in chain))
        self.world.tasks.spawn(self._lookup(request, keys), name="lookup")

    async def _lookup(self, request: pb.LookupRequest, keys: dict[int, list[int]]) -> None:
        call = Call()
        asked_at = self.world.loop.time()
        try:
            reply = await self.world.service.Lookup(request, call)  # type: ignore[arg-type]
        except grpc.aio.AbortError:
            gone = self.over or request.token != self.ranks[0].peer.token or self.ranks[0].peer.gone
            if not gone or call.refused is None or call.refused[0] is not grpc.StatusCode.UNAUTHENTICATED:
                raise Violation(f"a lookup was refused: {call.refused}") from None
            return
        found = {}
        for hits in reply.groups:
            chain = keys[hits.group]
            if hits.bitmap:
                found[hits.group] = [key for i, key in enumerate(chain) if hits.bitmap[i >> 3] >> (i & 7) & 1]
            else:
                found[hits.group] = chain[: hits.hits]
        self.found = {group: chain for group, chain in found.items() if chain}
        if reply.lease and not self.over and request.token == self.ranks[0].peer.token:
            lease = Lease(reply.lease, found, asked_at + reply.lease_ms / 1000)
            self.leases.append(lease)
            self.world.leases[self.shape.namespace].append(lease)

    def renew(self) -> None:
        if self.leases:
            lease = self.world.rng.choice(self.leases)
            self.world.tasks.spawn(self._renew(lease), name="renew")

    async def _renew(self, lease: Lease) -> None:
        asked_at = self.world.loop.time()
        reply = await self.world.service.Renew(pb.RenewRequest(lease=lease.id, lease_ms=3000), Call())  # type: ignore[arg-type]
        if reply.renewed:
            lease.expires_at = asked_at + reply.lease_ms / 1000

    def release(self) -> None:
        if self.leases:
            lease = self.leases.pop(self.world.rng.randrange(len(self.leases)))
            lease.ended = True
            request = pb.ReleaseRequest(lease=lease.id)
            self.world.tasks.spawn(self.world.service.Release(request, Call()), name="release")  # type: ignore[arg-type]

    def clear(self) -> None:
        """An operator forgets this namespace."""
        request = pb.ClearRequest(namespace=namespace_to_wire(self.shape.namespace))
        self.world.tasks.spawn(self._clear(request), name="clear")

    async def _clear(self, request: pb.ClearRequest) -> None:
        await self.world.service.Clear(request, Call())  # type: ignore[arg-type]
        self.world.note(f"{self.shape.namespace.model} is cleared")
        for lease in self.world.leases[self.shape.namespace]:
            lease.ended = True

    # -- ends ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Detach in order."""
        self.closing = True
        for rank in self.ranks:
            rank.call.half_close()

    def die(self) -> Iterable[tuple[str, Rank]]:
        """SIGKILL. What the daemon will hear of it, each at a time of the scheduler's choice."""
        self.dead = True
        for rank in self.ranks:
            rank.call.broken = True
            yield "attach socket", rank
            yield "stream", rank


class Rank:
    """One rank: its memory, its stream, its jobs. Attaches at once."""

    def __init__(self, engine: Engine, number: int, device: str) -> None:
        self.engine = engine
        self.world = world = engine.world
        self.name = f"{engine.name}.{number}"
        self.attached = False
        self.refused: tuple[grpc.StatusCode, str] | None = None
        self.jobs: dict[int, Job] = {}
        self.flushes: dict[int, list[int]] = {}
        self._numbers = itertools.count(1)
        self._fill = itertools.cycle(range(1, 256))
        rng: random.Random = world.rng
        sizes = [0] * rng.choice((1, 2))
        groups = engine.shape.groups
        self.layouts: dict[int, GroupLayout] = {
            group.group: make_layout(group, number, engine.shape.num_ranks, rng, sizes) for group in groups
        }
        self.allocations: list[Allocation] = [
            world.machine.allocate(f"{self.name}[{index}]", max(size, 64), gap=rng.random() < 0.5)
            for index, size in enumerate(sizes)
        ]
        self.free = {group: list(range(NUM_BLOCKS)) for group in self.layouts}
        self.garbage: dict[tuple[int, int], int] = {}
        ring = [world.machine.event() for _ in range(2)] if rng.random() < 0.5 else []
        self.ring: dict[int, Event] = {index + 1: event for index, (_, event) in enumerate(ring)}
        self.free_events = list(self.ring)
        self._ring_handles = [handle for handle, _ in ring]
        self._register = (number, device)
        self.peer: Peer
        self.watched: frozenset[int]
        """The processes of copiers whose death it can see."""
        self.call: Call
        self.task: asyncio.Task[None]
        self.attach()

    def attach(self) -> None:
        """Connect and register, for the first time or again."""
        world, engine = self.world, self.engine
        number, device = self._register
        self.detached = False
        """Its stream has ended, and it has not attached again."""
        self.watched = frozenset(world.copiers.pidfds())
        self.peer = world.instances.add_peer(Credentials(1, 1, 1), self.name, (), copiers=self.watched)
        self.call = Call(self._heard, world.wire)
        self.task = world.loop.create_task(world.service.Attach(None, self.call))  # type: ignore[arg-type]
        register = pb.Register(
            protocol=PROTOCOL,
            token=self.peer.token,
            instance=engine.name,
            namespace=namespace_to_wire(engine.shape.namespace),
            rank=number,
            world_size=engine.shape.num_ranks,
            device=device,
            allocations=[pb.Allocation(cuda_ipc_handle=each.handle, size=len(each.data)) for each in self.allocations],
            groups=[layout_to_wire(layout) for layout in self.layouts.values()],
            event_handles=self._ring_handles,
        )
        self.call.send(pb.AttachRequest(register=register))

    def detach(self) -> None:
        """The stream of a living engine has ended: its copier has. All copies are over: its memory is its own."""
        if not isinstance(error := self.task.exception(), grpc.aio.AbortError):
            raise Violation(f"the stream of {self.name} has failed: {error!r}")
        late = not self.attached  # its first message may have been under way for too long
        expected = (grpc.StatusCode.UNAVAILABLE, *[grpc.StatusCode.RESOURCE_EXHAUSTED] * late)
        if self.call.refused is None or self.call.refused[0] not in expected:
            raise Violation(f"the stream of {self.name} has ended: {self.call.refused}")
        if any(each.mapped_by for each in self.allocations):
            raise Violation(f"the stream of {self.name} has ended, and its memory is still mapped")
        self.detached, self.attached = True, False
        for job in self.jobs.values():
            if job.ring:
                self.ring[job.ring].done = True
                self.free_events.append(job.ring)
            if job.direction is Direction.LOAD:
                self._give_up_load(job)
            elif not job.let_go:
                self._take_back(job)
        self.jobs.clear()
        self.flushes.clear()
        if self is self.engine.ranks[0]:  # its leases end with its connection
            for lease in self.engine.leases:
                lease.ended = True
            self.engine.leases.clear()

    # -- what a worker process does --------------------------------------------------------------------------------

    def store(self, chains: dict[int, list[int]]) -> None:
        """Write the contents of these keys into free blocks, and store them; or promise to write them later."""
        job = Job(Direction.STORE, self._take_blocks(chains))
        if not job.blocks:
            return
        number = next(self._numbers)
        if self.free_events and self.world.rng.random() < 0.5:
            job.ring = self.free_events.pop()
            job.kernel = self.ring[job.ring]
            job.kernel.done = False
        else:
            self._compute(job)
        self.jobs[number] = job
        self.call.send(
            pb.AttachRequest(
                store=pb.Store(job=number, blocks=_wire(job), event=job.ring, deadline_ms=self._deadline())
            )
        )

    def run_kernel(self) -> bool:
        """The compute that a store waits for runs now. False if there is none."""
        for job in self.jobs.values():
            if job.kernel is not None:
                self._compute(job)
                job.kernel.done = True
                job.kernel = None
                return True
        return False

    def load(self, chains: dict[int, list[int]], lease: Lease | None) -> None:
        job = Job(Direction.LOAD, self._take_blocks(chains), lease)
        if not job.blocks:
            return
        for group, _, block_id in job.blocks:
            self._mark(group, block_id, writing=True)
        number = next(self._numbers)
        self.jobs[number] = job
        message = pb.Load(job=number, lease=lease.id if lease else 0, blocks=_wire(job), deadline_ms=self._deadline())
        self.call.send(pb.AttachRequest(load=message))

    def flush(self) -> None:
        """Preemption: the blocks of some stores, or of all, are wanted back."""
        rng = self.world.rng
        stores = [n for n, job in self.jobs.items() if job.direction is Direction.STORE and job.kernel is None]
        late = any(job.kernel is not None for job in self.jobs.values())
        named = rng.sample(stores, rng.randint(1, len(stores))) if stores and (late or rng.random() < 0.7) else []
        if not named and late:
            return  # "all" would name stores whose kernels have still to write these blocks
        number = next(self._numbers)
        mode = rng.choice((pb.Flush.MODE_FINISH, pb.Flush.MODE_CANCEL))
        self.flushes[number] = named or stores
        flush = pb.Flush(flush=number, jobs=named, timeout_ms=rng.choice((0, 100, 30000)), mode=mode)
        self.call.send(pb.AttachRequest(flush=flush))

    def _deadline(self) -> int:
        return self.world.rng.choice((0,) * 12 + (1, 1000))

    # -- what it hears ---------------------------------------------------------------------------------------------

    def _heard(self, reply: pb.AttachReply) -> None:
        match reply.WhichOneof("message"):
            case "registered":
                self.attached = True
                if any(each.mapped_by - self.watched for each in self.allocations):
                    raise Violation(f"{self.name} is attached to a process that it cannot watch")
                if self.ring and not reply.registered.device_order:
                    raise Violation(f"{self.name} was refused its events: {reply.registered.device_order_refused}")
            case "done":
                self._ended(reply.done)
            case "flushed":
                self._flushed(reply.flushed)

    def _ended(self, done: pb.JobDone) -> None:
        job = self.jobs.pop(done.job, None)
        if job is None:
            raise Violation(f"{self.name}: job {done.job} ended twice")
        outcome = pb.JobDone.Outcome.Name(done.outcome)
        self.world.note(f"{self.name} job {done.job} {job.direction} {outcome} {done.reason} {done.copied_blocks}")
        if done.reason in ("invalid_request", "checksum") or done.error.startswith("internal"):
            raise Violation(f"{self.name}: a good {job.direction} was answered {done.reason}: {done.error}")
        if job.ring:
            if job.kernel is not None and done.copied_blocks:
                raise Violation(f"{self.name}: a store was done before the kernel that it comes after")
            self.ring[job.ring].done = True
            self.free_events.append(job.ring)
        if job.direction is Direction.STORE:
            if not job.let_go:
                self._take_back(job)
        else:
            self._loaded(job, done)

    def _flushed(self, flushed: pb.Flushed) -> None:
        self.world.note(f"{self.name} flushed {len(flushed.pending)} pending")
        for number in self.flushes.pop(flushed.flush):
            job = self.jobs.get(number)
            if number not in flushed.pending and job is not None:
                job.let_go = True
                self._take_back(job)

    def _loaded(self, job: Job, done: pb.JobDone) -> None:
        if done.outcome == pb.JobDone.OUTCOME_DECLINED:
            self._check_promise(job, done.reason)
        for group, key, block_id in job.blocks:
            layout = self.layouts[group]
            model = self.engine.shape.namespace.model
            expected = content(model, group, key, layout.shard, layout.shard_bytes)
            for allocation, device, shard in rows_of(layout, block_id):
                got = self.allocations[allocation].data[device]
                if done.outcome == pb.JobDone.OUTCOME_DONE:
                    if not (got == expected[shard]).all():
                        raise Violation(f"{self.name}: a load of key {key} of group {group} brought other bytes")
                elif done.outcome == pb.JobDone.OUTCOME_DECLINED and not (got == self.garbage[group, block_id]).all():
                    raise Violation(f"{self.name}: a load was declined ({done.reason}) and has written")
        self._give_up_load(job)

    def _give_up_load(self, job: Job) -> None:
        for group, _, block_id in job.blocks:
            self._mark(group, block_id, writing=False)
            self.free[group].append(block_id)

    def _check_promise(self, job: Job, reason: str) -> None:
        lease = job.lease
        if lease is None or lease.ended or self.world.loop.time() >= lease.expires_at or self.engine.over:
            return
        if reason in ("not_found", "stale_lease"):
            raise Violation(f"{self.name}: a load under a live lease was declined: {reason}")

    # -- its memory ------------------------------------------------------------------------------------------------

    def _take_blocks(self, chains: dict[int, list[int]]) -> list[tuple[int, int, int]]:
        blocks = []
        for group, keys in chains.items():
            for key in keys[: len(self.free[group])]:
                free = self.free[group]
                block_id = free.pop(self.world.rng.randrange(len(free)))
                self._scribble(group, block_id)
                blocks.append((group, key, block_id))
        return blocks

    def _compute(self, job: Job) -> None:
        """Write the content of the keys; a store may read them from now on."""
        for group, key, block_id in job.blocks:
            layout = self.layouts[group]
            data = content(self.engine.shape.namespace.model, group, key, layout.shard, layout.shard_bytes)
            for allocation, device, shard in rows_of(layout, block_id):
                self.allocations[allocation].data[device] = data[shard]
            self._mark(group, block_id, reading=True)

    def _take_back(self, job: Job) -> None:
        """The engine uses the blocks of a store for something else, at once."""
        for group, _, block_id in job.blocks:
            self._mark(group, block_id, reading=False)
            self._scribble(group, block_id)
            self.free[group].append(block_id)

    def _scribble(self, group: int, block_id: int) -> None:
        value = self.garbage[group, block_id] = next(self._fill)
        for allocation, device, _ in rows_of(self.layouts[group], block_id):
            self.allocations[allocation].data[device] = value

    def _mark(self, group: int, block_id: int, *, reading: bool | None = None, writing: bool | None = None) -> None:
        for allocation, device, _ in rows_of(self.layouts[group], block_id):
            if reading is not None:
                self.allocations[allocation].reading[device] = reading
            if writing is not None:
                self.allocations[allocation].writing[device] = writing


def _wire(job: Job) -> list[pb.Blocks]:
    groups: dict[int, list[tuple[int, int]]] = {}
    for group, key, block_id in job.blocks:
        groups.setdefault(group, []).append((key, block_id))
    return [
        pb.Blocks(
            group=group,
            hashes=b"".join(HASHES[key] for key, _ in chain),
            block_ids=pack_ids([block_id for _, block_id in chain]),
        )
        for group, chain in groups.items()
    ]
