"""Peers (clients that the kernel has identified, see `kvsidecar.core.peer`) and sessions (ranks with memory).

The identity of a peer comes from the kernel (SO_PEERCRED), never from the client. A session is one rank's
registration. A session ends in one order only: no new jobs, running copies drained, memory unmapped, leases dropped.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.space_blocks import Space
from kvsidecar.copier.copiers import Copier, Copiers
from kvsidecar.copier.link import Imported, Opened
from kvsidecar.core.access import Access, Caller, Identity, permit
from kvsidecar.core.job import Job
from kvsidecar.core.namespace_options import NamespaceOptions
from kvsidecar.core.peer import Peer
from kvsidecar.core.quota import Quota
from kvsidecar.core.registration import RankRegistration, checking_aliases
from kvsidecar.errors import (
    AccessDenied,
    DeviceError,
    DeviceLost,
    ImportRefused,
    InvalidRequest,
    KVSidecarError,
    LimitExceeded,
    Refusal,
    Unavailable,
    UnknownPeer,
)
from kvsidecar.support import failpoints, log
from kvsidecar.support.loop_time import LoopTime
from kvsidecar.support.peer import Credentials
from kvsidecar.support.tasks import TaskSet
from kvsidecar.types import Direction, GroupLayout, Namespace

_log = log.get("instances")

TOKEN_BYTES = 16
ID_BITS = 48
"""Sessions, leases and epochs are random numbers that survive a trip through JSON (2**53)."""
SPACES_STEP = 8
"""Spaces that are opened in one step of the loop; each takes some 40 us."""
MAX_RANKS = 256
"""Ranks that one user may attach."""
MAX_RANK_GROUPS = 8192
"""KV cache groups that all ranks of one user may have together. Each may have a space of its own, which takes 4 KiB and
the texts of its namespace."""
MAX_WATCHES = 256
"""Streams on which one user may watch what the pool holds. An engine has one."""


@dataclass(frozen=True, slots=True)
class SessionGroup:
    """One KV cache group of a session, and its space in the cache."""

    layout: GroupLayout
    space: Space
    kinds: tuple[str, ...] = ()
    """The kinds of copies of many of its blocks, for a trace."""


@dataclass(slots=True)
class Work:
    """The outstanding work of all ranks of one user."""

    jobs: int = 0
    blocks: int = 0
    """Sum of their `RankSession.outstanding_blocks`."""
    waits: int = 0
    """Jobs that flushes wait for; a job counts once for each of them."""


@dataclass(slots=True, eq=False)
class RankSession:
    """One attached rank."""

    id: int
    peer: Peer
    registration: RankRegistration
    copier: Copier
    process: int
    """The copier's process that has imported the memory."""
    memories: tuple[Imported, ...]
    groups: Mapping[int, SessionGroup]
    attached_at: float
    tasks: TaskSet
    """Its flushes. Unexpected errors of its jobs are reported as theirs."""
    of_user: Work = field(default_factory=Work)
    """Counts its jobs with those of the user's other ranks."""
    jobs: dict[int, Job] = field(default_factory=dict)
    """Jobs that are not over, by the numbers that the client chose."""
    beginning: list[Job] = field(default_factory=list)
    """Jobs with blocks that are not reserved or referenced yet, in order. Only the first one proceeds."""
    num_events: int = 0
    """Interprocess events of the engine's ring; none if stores are ordered on the host."""
    device_order_refused: str = ""
    """Why a registered ring is not used."""
    denied: bool = False
    """The policy has changed and no longer gives the namespace to this user."""
    outstanding_blocks: int = 0
    """Blocks of `jobs`; a job without any counts as one."""
    idle: bool = False
    """The engine reported that its GPU is idle."""
    copied_bytes: dict[Direction, int] = field(default_factory=lambda: dict.fromkeys(Direction, 0))
    on_lost: Callable[[KVSidecarError], object] | None = None
    """Ends the stream of the rank with an error; None while it has none."""
    ending: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, job: Job) -> None:
        self.jobs[job.number] = job
        self.outstanding_blocks += job.num_blocks or 1
        self.of_user.jobs += 1
        self.of_user.blocks += job.num_blocks or 1

    def remove(self, job: Job) -> None:
        del self.jobs[job.number]
        self.outstanding_blocks -= job.num_blocks or 1
        self.of_user.jobs -= 1
        self.of_user.blocks -= job.num_blocks or 1

    async def drain(self) -> None:
        """Wait until its jobs and flushes are over. DMA cannot be cancelled, whether or not its client has gone."""
        while self.jobs:
            await asyncio.wait([job.over() for job in self.jobs.values()])
        await self.tasks.join()

    @property
    def weight(self) -> int:
        """How many turns it gets on the link: the weight of the share that pays for its namespace."""
        return next(iter(self.groups.values())).space.share.weight

    @property
    def imported_bytes(self) -> int:
        return sum(memory.nbytes for memory in self.memories)

    @property
    def lost(self) -> str:
        """Why nothing can be copied for it any more: its process has ended. Empty while it has not."""
        if self.copier.pid == self.process:
            return self.copier.down
        return self.copier.down or "the copier has been replaced"


class Instances:
    """All peers and sessions of the daemon. Used from the event loop.

    Args:
        on_task_error: called with (task name, error) when a job raises an unexpected error.
        access: decides what a peer may do.
        loop_time: registrations that take long to check get theirs from it.
    """

    def __init__(
        self,
        cache: BlockCache,
        copiers: Copiers,
        clock: Callable[[], float],
        on_task_error: Callable[[str, BaseException], None],
        access: Access,
        loop_time: LoopTime | None = None,
    ) -> None:
        self._cache = cache
        self._time = LoopTime() if loop_time is None else loop_time
        self._copiers = copiers
        self._clock = clock
        self._on_task_error = on_task_error
        self._access = access
        self._peers: dict[bytes, Peer] = {}
        self._sessions: dict[int, RankSession] = {}
        self._tokens_of: dict[int, dict[bytes, None]] = {}
        self._ranks_of = Quota(MAX_RANKS, "ranks attached")
        self._groups_of = Quota(MAX_RANK_GROUPS, "KV cache groups of ranks attached")
        self.watches_of = Quota(MAX_WATCHES, "watches")
        self.options = NamespaceOptions()
        """What attached ranks have reported about their namespaces; for people."""

    # -- access ----------------------------------------------------------------------------------------------------

    @property
    def access(self) -> Access:
        return self._access

    @access.setter
    def access(self, access: Access) -> None:
        """Decide again for all connected clients. Their connections stay open: a client takes the end of its connection
        for the end of the daemon, and would give up stores that still read its memory."""
        self._access = access
        for peer in self._peers.values():
            assert peer.caller.identity is not None
            peer.caller = replace(peer.caller, grant=access.grant(peer.caller.identity))
        for session in self._sessions.values():
            session.denied = not session.peer.caller.grant.may_use(session.registration.namespace)

    # -- peers -----------------------------------------------------------------------------------------------------

    def add_peer(
        self,
        who: Credentials,
        client: str,
        fds: tuple[int, ...],
        *,
        groups: frozenset[int] = frozenset(),
        copiers: frozenset[int] | None = frozenset(),
        fence: int | None = None,
        on_closed: Callable[[int], None] = lambda _: None,
    ) -> Peer:
        """A client was identified. Takes ownership of ``fds`` and ``fence``.

        Args:
            groups: supplementary groups.
            copiers: see `Peer.copiers`.
            on_closed: called with how many of ``fds`` were closed before it has gone.
        """
        token, identity = secrets.token_bytes(TOKEN_BYTES), Identity(who.uid, groups | {who.gid})
        caller = Caller(identity, self._access.grant(identity), token)
        peer = Peer(token, *who, client, fds, caller, copiers, fence, on_closed)
        self._peers[token] = peer
        self._tokens_of.setdefault(who.uid, {})[token] = None
        return peer

    def peer(self, token: bytes) -> Peer:
        """The live peer with this token.

        Raises:
            UnknownPeer: there is none.
        """
        peer = self._peers.get(token)
        if peer is None:
            raise UnknownPeer(
                "the token does not belong to an open Attach stream or connection to the attach socket: send that of "
                "the stream's Registered, or of the connection's Welcome, and keep the stream or connection open"
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
        """The client has gone: its leases end now. Returns its sessions, still to be ended."""
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
        self._copiers.pacing.set_busy(frozenset(session.copier.uuid for session in busy))

    def __iter__(self) -> Iterator[RankSession]:
        return iter(tuple(self._sessions.values()))

    def __len__(self) -> int:
        return len(self._sessions)

    def imported_bytes(self) -> dict[str, int]:
        """Bytes of mapped engine memory by device UUID. An allocation mapped for two sessions counts once."""
        seen: dict[str, dict[bytes, int]] = {}
        for session in self._sessions.values():
            for memory in session.memories:
                seen.setdefault(session.copier.uuid, {})[memory.key] = memory.nbytes
        return {device: sum(allocations.values()) for device, allocations in seen.items()}

    async def register(self, registration: RankRegistration) -> RankSession:
        """Attach one rank: all or nothing. Descriptors of physical memory are closed in any case.

        Raises:
            InvalidRequest, NamespaceMismatch, UnknownPeer, NotPermitted, LimitExceeded, AccessDenied, DeviceNotFound,
                ImportRefused: nothing is left behind.
        """
        try:
            return await self._admit(registration)
        finally:
            if (peer := self._peers.get(registration.token)) is not None:
                peer.spend(registration.allocations)

    async def _admit(self, registration: RankRegistration) -> RankSession:
        await self._time.run(registration.checking())
        peer = self.peer(registration.token)
        permit(peer.caller, registration.namespace)
        if peer.fence is not None and (peer.registering or any(each.peer is peer for each in self._sessions.values())):
            raise InvalidRequest(
                "a connection with a fence takes one rank: this one already has one, or it has not ended yet"
            )
        self._count(peer.uid, len(registration.groups))
        peer.registering += 1
        try:
            return await self._register(registration, peer)
        except BaseException:
            self._uncount(peer.uid, len(registration.groups))
            raise
        finally:
            peer.registering -= 1
            if peer.gone:
                peer.close_fds()

    def _count(self, uid: int, groups: int) -> None:
        """Count one more rank of this user, with this many groups. Raises LimitExceeded."""
        self._ranks_of.take(uid)
        try:
            self._groups_of.take(uid, groups)
        except LimitExceeded:
            self._ranks_of.give_back(uid)
            raise

    def _uncount(self, uid: int, groups: int) -> None:
        self._ranks_of.give_back(uid)
        self._groups_of.give_back(uid, groups)

    async def _register(self, registration: RankRegistration, peer: Peer) -> RankSession:
        sources = [peer.source(allocation) for allocation in registration.allocations]
        copier = self._copiers.copier(registration.device)
        opening = self._opening_spaces(registration, peer.uid)
        try:
            spaces = await self._time.run(opening)
        finally:
            opening.close()  # cancelled meanwhile, it closes what it has opened
        session_id = secrets.randbits(ID_BITS) | 1
        opened: Opened | None = None
        process = 0
        try:
            opened, process = await copier.open(
                session_id, sources, registration.groups, registration.event_handles, peer.fence
            )
            if peer.copiers is not None and process not in peer.copiers:
                raise Unavailable("the device's copier has been replaced: connect again", refusal=Refusal.DEVICE_LOST)
            for memory, allocation in zip(opened.memories, registration.allocations, strict=True):
                if memory.nbytes < allocation.size:
                    raise ImportRefused(
                        f"an allocation was registered with {allocation.size} bytes but has {memory.nbytes}"
                    )
            await self._time.run(checking_aliases(registration, [memory.key for memory in opened.memories]))
            # In a thread, as the import: a delay here must not stop the loop, which sees clients disconnect.
            await asyncio.to_thread(lambda: failpoints.hit("attach.after_import"))
            # The peer may have disconnected while the driver worked; then nothing would end this session.
            permit(self.peer(registration.token).caller, registration.namespace)
            # Last, and without an await until the session is listed: of two users that register the same memory at
            # once, one must see the other.
            self._refuse_memory_of_others(copier, opened.memories, peer)
            if copier.down or copier.pid != process:
                raise DeviceLost(f"{copier.uuid}: {copier.down or 'the copier has been replaced'}")
        except BaseException:
            await self._give_back(copier, None if opened is None else (session_id, process), spaces)
            raise
        session = RankSession(
            id=session_id,
            peer=peer,
            registration=registration,
            copier=copier,
            process=process,
            memories=opened.memories,
            groups={
                layout.group: SessionGroup(layout, space, kinds)
                for layout, space, kinds in zip(registration.groups, spaces, opened.kinds, strict=True)
            },
            attached_at=self._clock(),
            tasks=TaskSet(self._on_task_error),
            of_user=next((each.of_user for each in self._sessions.values() if each.peer.uid == peer.uid), Work()),
            num_events=opened.num_events,
            device_order_refused=opened.events_refused,
        )
        self._sessions[session.id] = session
        self._tell_busy()
        self._compare(registration, peer.uid)
        return session

    def _compare(self, registration: RankRegistration, uid: int) -> None:
        """Log once why a new namespace shares nothing with the others of its model."""
        other = self.options.add(registration.namespace, registration.options, uid, registration.served_name)
        if other is not None:
            _log.info(
                "a namespace of its own",
                instance=registration.instance,
                model=registration.namespace.model,
                differs_in=", ".join(self.options.differences(registration.namespace, other)),
            )

    async def end(self, session: RankSession, *, gone: bool) -> None:
        """End a session in order: no new jobs, copies drained, memory unmapped. Returns when it has ended. May be
        called more than once, also meanwhile.

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
        # Unmapping under a running copy would be a fault in the copier's context.
        await session.drain()
        await self._give_back(
            session.copier, (session.id, session.process), [group.space for group in session.groups.values()]
        )
        del self._sessions[session.id]
        self._uncount(session.peer.uid, len(session.groups))
        session.ended.set()

    def _refuse_memory_of_others(self, copier: Copier, memories: Sequence[Imported], peer: Peer) -> None:
        """Refuse memory of another user's rank. Its handle opens for any process that knows it, and the daemon would
        copy the first user's KV to the second user, or write over it.

        Raises:
            AccessDenied: a session of another uid has one of these allocations.
        """
        wanted = {memory.key for memory in memories}
        for session in self._sessions.values():
            others = session.copier is copier and session.peer.uid != peer.uid
            if others and not wanted.isdisjoint(memory.key for memory in session.memories):
                raise AccessDenied(
                    "an allocation is registered already by a process of another user: only ranks of one user may "
                    "register the same memory"
                )

    def _opening_spaces(self, registration: RankRegistration, uid: int) -> Generator[None, None, list[Space]]:
        """Open a space for each group, in small steps."""
        spaces: list[Space] = []
        try:
            for layout in registration.groups:
                spaces.append(
                    self._cache.open_space(
                        registration.namespace, layout.group, layout.num_shards, layout.shard, layout.shard_bytes, uid
                    )
                )
                if len(spaces) % SPACES_STEP == 0:
                    yield
        except BaseException:
            for space in spaces:
                self._cache.close_space(space)
            raise
        return spaces

    async def _give_back(self, copier: Copier, session: tuple[int, int] | None, spaces: list[Space]) -> None:
        """Close everything that a session has open.

        Args:
            session: its id, and the process that has its memory; None if no process has.
        """
        for space in spaces:
            self._cache.close_space(space)
        if session is not None:
            try:
                await copier.close_session(*session)
            except DeviceError as error:
                # The rest must be given back all the same.
                _log.error("engine memory was not unmapped", device=copier.uuid, error=str(error))
            except Exception as error:  # noqa: BLE001 - reported; as above
                self._on_task_error("close-session", error)
