"""Peers (processes on the attach socket) and sessions (ranks with registered memory).

The identity of a peer comes from the kernel (SO_PEERCRED), never from the client. A session is one rank's
registration. A session ends in one order only: no new jobs, running copies drained, memory unmapped, leases dropped.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvsidecar.cache.block import Space
from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.copier.hub import DeviceHub
from kvsidecar.core.access import Access, Caller, Identity
from kvsidecar.core.copy_plan import BoundGroup, bind
from kvsidecar.core.job import Job
from kvsidecar.core.quota import Quota
from kvsidecar.core.registration import CudaAllocation, FdAllocation, RankRegistration
from kvsidecar.device.base import CudaIpcSource, Device, DeviceEvent, DeviceMemory, MemfdSource, MemorySource
from kvsidecar.errors import (
    AccessDenied,
    DeviceError,
    ImportRefused,
    InvalidRequest,
    NotPermitted,
    Refusal,
    UnknownPeer,
)
from kvsidecar.support import failpoints, log
from kvsidecar.support.tasks import RoundRobin, TaskSet
from kvsidecar.types import TOKEN_METADATA, Direction, GroupLayout, Namespace

_log = log.get("instances")

TOKEN_BYTES = 16
ID_BITS = 48
"""Sessions, leases and epochs are random numbers that survive a trip through JSON (2**53)."""
MAX_RANKS = 256
"""Ranks that one user may attach."""


@dataclass(slots=True)
class Peer:
    """One process connected to the attach socket."""

    token: bytes
    pid: int
    """In the daemon's PID namespace; 0 if the kernel cannot name it there."""
    uid: int
    gid: int
    client: str
    """Free text of the client, for logs."""
    fds: tuple[int, ...]
    """Memfds it sent; owned by this peer."""
    caller: Caller
    """Its identity and grant. The grant is decided when it connects, and again when the policy changes."""
    registering: int = 0
    """Registrations under way: a driver call in a thread may be using the descriptors."""
    gone: bool = False

    def close_fds(self) -> None:
        """Close the descriptors unless a registration uses them: another client's could get the same numbers."""
        if not self.registering:
            for fd in self.fds:
                os.close(fd)
            self.fds = ()


@dataclass(frozen=True, slots=True)
class SessionGroup:
    """One KV cache group of a session, at its addresses on the device, and its space in the cache."""

    layout: GroupLayout
    bound: BoundGroup
    space: Space


@dataclass(slots=True, eq=False)
class RankSession:
    """One attached rank."""

    id: int
    peer: Peer
    registration: RankRegistration
    device: Device
    memories: tuple[DeviceMemory, ...]
    groups: Mapping[int, SessionGroup]
    attached_at: float
    tasks: TaskSet
    """They run its jobs and flushes. A client that goes away does not stop its copies."""
    jobs: dict[int, Job] = field(default_factory=dict)
    """Jobs that are not over, by the numbers that the client chose."""
    events: tuple[DeviceEvent, ...] = ()
    """Ring of the engine's interprocess events; empty if stores are ordered on the host."""
    device_order_refused: str = ""
    """Why a registered ring is not used."""
    denied: bool = False
    """The policy has changed and no longer gives the namespace to this user."""
    outstanding_blocks: int = 0
    """Blocks of `jobs`; a job without any counts as one."""
    idle: bool = False
    """The engine reported that its GPU is idle."""
    copied_bytes: dict[Direction, int] = field(default_factory=lambda: dict.fromkeys(Direction, 0))
    unsettled: bool = False
    """A copy of a job that is over may still touch the memory."""
    ending: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, job: Job) -> None:
        self.jobs[job.number] = job
        self.outstanding_blocks += job.num_blocks or 1

    def remove(self, job: Job) -> None:
        del self.jobs[job.number]
        self.outstanding_blocks -= job.num_blocks or 1

    @property
    def imported_bytes(self) -> int:
        return sum(memory.nbytes for memory in self.memories)


class Instances:
    """All peers and sessions of the daemon. Used from the event loop.

    Args:
        on_task_error: called with (task name, error) when a job raises an unexpected error.
        access: decides what a peer may do.
    """

    def __init__(
        self,
        cache: BlockCache,
        hub: DeviceHub,
        clock: Callable[[], float],
        on_task_error: Callable[[str, BaseException], None],
        access: Access,
    ) -> None:
        self._cache = cache
        self._hub = hub
        self._clock = clock
        self._on_task_error = on_task_error
        self._access = access
        self._peers: dict[bytes, Peer] = {}
        self._sessions: dict[int, RankSession] = {}
        self._tokens_of: dict[int, dict[bytes, None]] = {}
        self._ranks_of = Quota(MAX_RANKS, "ranks attached")
        self.turns = RoundRobin()
        """Shares the event loop among registrations that take long to check."""

    # -- access ----------------------------------------------------------------------------------------------------

    @property
    def access(self) -> Access:
        return self._access

    @access.setter
    def access(self, access: Access) -> None:
        """Decide anew for all connected clients. Their connections stay open: a client takes the end of its connection
        for the end of the daemon, and would give up stores that still read its memory."""
        self._access = access
        for peer in self._peers.values():
            assert peer.caller.identity is not None
            peer.caller = replace(peer.caller, grant=access.grant(peer.caller.identity))
        for session in self._sessions.values():
            session.denied = not session.peer.caller.grant.may_use(session.registration.namespace)

    # -- peers -----------------------------------------------------------------------------------------------------

    def add_peer(
        self, *, pid: int, uid: int, gid: int, client: str, fds: tuple[int, ...], groups: frozenset[int] = frozenset()
    ) -> Peer:
        """A process has connected to the attach socket. Takes ownership of ``fds``.

        Args:
            groups: supplementary groups.
        """
        token, identity = secrets.token_bytes(TOKEN_BYTES), Identity(uid, groups | {gid})
        peer = Peer(token, pid, uid, gid, client, fds, Caller(identity, self._access.grant(identity), token))
        self._peers[peer.token] = peer
        self._tokens_of.setdefault(uid, {})[peer.token] = None
        return peer

    def peer(self, token: bytes) -> Peer:
        """The live peer with this token.

        Raises:
            UnknownPeer: there is none.
        """
        peer = self._peers.get(token)
        if peer is None:
            raise UnknownPeer(
                "the token is not one of a live attach-socket connection: connect to the attach socket first, keep "
                "that connection open, and send the token it answered"
            )
        return peer

    def attached_namespaces(self, uid: int | None) -> frozenset[Namespace]:
        """The namespaces of this user's attached ranks."""
        return frozenset(each.registration.namespace for each in self._sessions.values() if each.peer.uid == uid)

    def tokens_of(self, token: object) -> list[bytes]:
        """The tokens of all live peers of the user of this one."""
        uid = self.uid_of(token)
        return [] if uid is None else list(self._tokens_of[uid])

    def uid_of(self, token: object) -> int | None:
        """The user of the live peer with this token; None if there is none."""
        peer = self._peers.get(token)  # type: ignore[call-overload]
        return None if peer is None else peer.uid

    def may_use_lease(self, lease: int, uid: int | None) -> bool:
        """Whether a lease is this user's, or of no known user. For others it must look like one that never was."""
        if self._access.policy is None:
            return True
        found = self._cache.lease(lease, self._clock())
        return found is None or found.owner is None or self.uid_of(found.owner) == uid

    def remove_peer(self, peer: Peer) -> tuple[RankSession, ...]:
        """The process has gone from the attach socket: its leases end now. Returns its sessions, still to be ended."""
        if self._peers.pop(peer.token, None) is not None:
            del self._tokens_of[peer.uid][peer.token]
            if not self._tokens_of[peer.uid]:
                del self._tokens_of[peer.uid]
        peer.gone = True
        self._cache.drop_owner(peer.token)
        peer.close_fds()
        return tuple(session for session in self._sessions.values() if session.peer is peer)

    # -- sessions --------------------------------------------------------------------------------------------------

    def lives(self, session: int) -> bool:
        """Whether there is a session with this id, possibly one that is ending."""
        return session in self._sessions

    def set_idle(self, session: RankSession, idle: bool) -> None:
        """The engine reports that its GPU has become idle, or busy."""
        session.idle = idle
        self._tell_busy()

    def _tell_busy(self) -> None:
        """Stores leave room for an engine's own copies only on devices where an engine is busy."""
        busy = (each for each in self._sessions.values() if not each.idle and not each.ending)
        self._hub.busy = frozenset(session.device.uuid for session in busy)

    def __iter__(self) -> Iterator[RankSession]:
        return iter(tuple(self._sessions.values()))

    def __len__(self) -> int:
        return len(self._sessions)

    def imported_bytes(self) -> dict[str, int]:
        """Bytes of mapped engine memory by device UUID. An allocation mapped for two sessions counts once."""
        seen: dict[str, dict[bytes, int]] = {}
        for session in self._sessions.values():
            for memory in session.memories:
                seen.setdefault(session.device.uuid, {})[memory.key] = memory.nbytes
        return {device: sum(allocations.values()) for device, allocations in seen.items()}

    async def register(self, registration: RankRegistration) -> RankSession:
        """Attach one rank: all or nothing.

        Raises:
            InvalidRequest, NamespaceMismatch, UnknownPeer, NotPermitted, LimitExceeded, AccessDenied, DeviceNotFound,
                ImportRefused: nothing is left behind.
        """
        await self.turns.run(registration.checking())
        peer = self.peer(registration.token)
        permit(peer.caller, registration.namespace)
        self._ranks_of.take(peer.uid)
        peer.registering += 1
        try:
            return await self._register(registration, peer)
        except BaseException:
            self._ranks_of.give_back(peer.uid)
            raise
        finally:
            peer.registering -= 1
            if peer.gone:
                peer.close_fds()

    async def _register(self, registration: RankRegistration, peer: Peer) -> RankSession:
        sources = [_source(allocation, peer) for allocation in registration.allocations]
        device = await self._hub.device(registration.device)
        spaces = self._open_spaces(registration)
        memories: list[DeviceMemory] = []
        events: tuple[DeviceEvent, ...] = ()
        try:
            for source, allocation in zip(sources, registration.allocations, strict=True):
                memory = await asyncio.to_thread(device.import_memory, source)
                memories.append(memory)
                if memory.nbytes < allocation.size:
                    raise ImportRefused(
                        f"an allocation was registered with {allocation.size} bytes but has {memory.nbytes}"
                    )
            # In a thread, as the import: a delay here must not stop the loop, which sees clients disconnect.
            await asyncio.to_thread(lambda: failpoints.hit("attach.after_import"))
            events, refused = await self._open_events(device, registration.event_handles)
            bound = await self.turns.run(_binding(registration.groups, [memory.address for memory in memories]))
            # The peer may have disconnected while the driver worked; then nothing would end this session.
            permit(self.peer(registration.token).caller, registration.namespace)
            # Last, and without an await until the session is listed: of two users that register the same memory at
            # once, one must see the other.
            self._refuse_memory_of_others(device, memories, peer)
            groups = {
                layout.group: SessionGroup(layout, each, space)
                for layout, each, space in zip(registration.groups, bound, spaces, strict=True)
            }
        except BaseException:
            await _close_events(events)
            await self._give_back(device, memories, spaces)
            raise
        session = RankSession(
            id=secrets.randbits(ID_BITS) | 1,
            peer=peer,
            registration=registration,
            device=device,
            memories=tuple(memories),
            groups=groups,
            attached_at=self._clock(),
            tasks=TaskSet(self._on_task_error),
            events=events,
            device_order_refused=refused,
        )
        self._sessions[session.id] = session
        self._tell_busy()
        return session

    async def end(self, session: RankSession, *, gone: bool) -> None:
        """End a session in order: no new jobs, copies drained, memory unmapped. Returns when it has ended; a session
        with a copy of unknown outcome ends with this process only. May be called more than once, also meanwhile.

        Args:
            gone: the process has ended. Its jobs that have not started are cancelled: the event of a dead process
                that they may wait for never comes (measured). Otherwise they are finished.
        """
        if gone:
            for job in session.jobs.values():
                job.cancel(Refusal.CANCELLED)
        if session.ending:
            await session.ended.wait()
            return
        session.ending = True
        self._tell_busy()
        # DMA cannot be cancelled. Unmapping under a running copy would be a fault in the daemon's own context.
        await session.tasks.join()
        if session.unsettled:
            await session.ended.wait()  # no reply may say that the memory is free while a copy may touch it
        await _close_events(session.events)
        spaces = [group.space for group in session.groups.values()]
        await self._give_back(session.device, list(session.memories), spaces)
        del self._sessions[session.id]
        self._ranks_of.give_back(session.peer.uid)
        session.ended.set()

    def _refuse_memory_of_others(self, device: Device, memories: Sequence[DeviceMemory], peer: Peer) -> None:
        """Refuse memory of another user's rank. Its handle opens for any process that knows it, and the daemon would
        copy the first user's KV to the second user, or write over it.

        Raises:
            AccessDenied: a session of another uid has one of these allocations.
        """
        wanted = {memory.key for memory in memories}
        for session in self._sessions.values():
            others = session.device is device and session.peer.uid != peer.uid
            if others and not wanted.isdisjoint(memory.key for memory in session.memories):
                raise AccessDenied(
                    "an allocation is registered already by a process of another user: only ranks of one user may "
                    "register the same memory"
                )

    async def _open_events(self, device: Device, handles: Sequence[bytes]) -> tuple[tuple[DeviceEvent, ...], str]:
        """The ring; or an empty one and the reason. A rank whose events do not open orders its stores on the host."""
        events: list[DeviceEvent] = []
        try:
            for handle in handles:
                events.append(await asyncio.to_thread(device.import_event, handle))  # noqa: PERF401
        except ImportRefused as error:
            await _close_events(events)
            return (), str(error)
        return tuple(events), ""

    def _open_spaces(self, registration: RankRegistration) -> list[Space]:
        spaces: list[Space] = []
        try:
            for layout in registration.groups:
                spaces.append(  # noqa: PERF401 - those that are open must be closed if the next one fails
                    self._cache.open_space(
                        registration.namespace, layout.group, layout.num_shards, layout.shard, layout.shard_bytes
                    )
                )
        except BaseException:
            for space in spaces:
                self._cache.close_space(space)
            raise
        return spaces

    async def _give_back(self, device: Device, memories: list[DeviceMemory], spaces: list[Space]) -> None:
        for space in spaces:
            self._cache.close_space(space)
        for memory in memories:
            try:
                await asyncio.to_thread(device.release_memory, memory)
            except DeviceError as error:
                # A lost device unmaps nothing; the rest must be given back all the same.
                _log.error("engine memory was not unmapped", device=device.uuid, error=str(error))


def permit(caller: Caller, namespace: Namespace) -> None:
    """Refuse a namespace that is not the caller's, whether or not it has blocks.

    Raises:
        NotPermitted, UnknownPeer
    """
    if caller.grant.may_use(namespace):
        return
    if caller.identity is None:
        raise unidentified()
    raise NotPermitted(f"the policy gives {caller.identity} no namespace {str(namespace)!r}")


def unidentified() -> UnknownPeer:
    """The refusal of a client without a token by a daemon with a policy."""
    return UnknownPeer(
        "this daemon has a policy: connect to the attach socket, keep that connection open, and send the token it "
        f"answered in the metadata {TOKEN_METADATA}"
    )


def _binding(layouts: Sequence[GroupLayout], bases: Sequence[int]) -> Generator[None, None, list[BoundGroup]]:
    bound = []
    for layout in layouts:
        bound.append(bind(layout, bases))
        yield
    return bound


async def _close_events(events: Sequence[DeviceEvent]) -> None:
    for event in events:
        await asyncio.to_thread(event.close)


def _source(allocation: CudaAllocation | FdAllocation, peer: Peer) -> MemorySource:
    match allocation:
        case CudaAllocation():
            return CudaIpcSource(allocation.handle)
        case FdAllocation():
            if not 0 <= allocation.fd_index < len(peer.fds):
                raise InvalidRequest(
                    f"fd_index {allocation.fd_index} names none of the {len(peer.fds)} descriptors sent over the "
                    "attach socket"
                )
            return MemfdSource(peer.fds[allocation.fd_index])
