"""Handles requests of both transports: gRPC (`service.py`) and the local protocol (`local_protocol.py`)."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from kvsidecar import __version__
from kvsidecar.copier.copiers import Copier
from kvsidecar.core.access import Caller, permit, unidentified
from kvsidecar.core.hashes import PackedHashes
from kvsidecar.core.jobs import JobRunner
from kvsidecar.core.lookups import Clearing, LookupService
from kvsidecar.core.metrics import Metrics
from kvsidecar.core.peer import Peer
from kvsidecar.core.readiness import DaemonReadiness
from kvsidecar.core.registration import MAX_GROUPS
from kvsidecar.core.sessions import ID_BITS, Instances, RankSession
from kvsidecar.core.watches import Watches
from kvsidecar.errors import (
    InvalidRequest,
    KVSidecarError,
    LimitExceeded,
    NotPermitted,
    ProtocolMismatch,
    Refusal,
    Unavailable,
    Unfinished,
    UnknownPeer,
)
from kvsidecar.protocol.wire import namespace_from_wire, readiness_to_wire
from kvsidecar.server import convert
from kvsidecar.server.attach_stream import AttachStream, Send
from kvsidecar.server.watch_stream import WatchStream
from kvsidecar.support import failpoints, log
from kvsidecar.support.steps import Steps
from kvsidecar.support.tasks import TaskSet
from kvsidecar.support.user_time import UserTime
from kvsidecar.types import PROTOCOL, TOKEN_METADATA, Direction, LookupMode, Namespace
from kvsidecar.v1 import sidecar_pb2 as pb

INTERNAL = "internal error; see the daemon's log"

REASONS: Mapping[type[KVSidecarError], Refusal] = {
    NotPermitted: Refusal.DENIED,
    UnknownPeer: Refusal.UNIDENTIFIED,
    LimitExceeded: Refusal.LIMIT,
    Unfinished: Refusal.UNFINISHED,
    InvalidRequest: Refusal.INVALID_REQUEST,
}
"""The reason that is counted for each error. (A registration that is refused for another reason has its own.)"""

_GONE = "the process, or the connection to the attach socket, that"

_log = log.get("rpc")
_caused = log.limited("rpc")


@dataclass(kw_only=True, eq=False)
class Handler:
    """Handles all requests. A method refuses with a `KVSidecarError`; the transport answers with its status code.

    Args:
        tasks: owns work that must outlive the connection, such as ending sessions.
        make_status: builds, in steps, the reply to Status for this caller, or a page of it.
        watches: the watchers of what the pool holds.
        steps: turns of the messages of Attach streams.
        user_time: users' time for requests over the local protocol.
    """

    epoch: int
    instances: Instances
    runner: JobRunner
    lookups: LookupService
    readiness: DaemonReadiness
    metrics: Metrics
    tasks: TaskSet
    make_status: Callable[[Caller, pb.StatusPage | None], Generator[None, None, pb.StatusReply]]
    watches: Watches
    steps: Steps
    user_time: UserTime = field(default_factory=UserTime)
    _watching: set[WatchStream] = field(default_factory=set)
    _streams: dict[int, AttachStream] = field(default_factory=dict)
    """Streams that take jobs, by session."""

    # -- callers ---------------------------------------------------------------------------------------------------

    def caller(self, token: bytes) -> Caller:
        """The caller with this token; without a token, an anonymous one. Raises UnknownPeer if the token is invalid."""
        return self.instances.peer(token).caller if token else self.instances.access.anonymous

    @property
    def open_to_all(self) -> bool:
        """Whether lookups and leases need no identity: without a policy, all who can connect may use everything."""
        return self.instances.access.policy is None

    def count_refusal(self, error: KVSidecarError) -> None:
        """Count a refusal. The transport calls this when it is going to answer with an error, or ends a stream."""
        if (reason := REASONS.get(type(error))) is not None:
            self.metrics.refuse(reason)
        if isinstance(error, InvalidRequest):
            _caused.warning("a request was refused as invalid", error=str(error))

    # -- attach ----------------------------------------------------------------------------------------------------

    def open(self, session: RankSession, send: Send, on_lost: Callable[[KVSidecarError], object]) -> AttachStream:
        """Send the reply to a registration, and return the rank's stream.

        Args:
            on_lost: ends the stream with an error, whatever its client sends: the client's process is gone, or the
                copier with the rank's memory.
        """
        session.on_lost = on_lost
        registered = self._registered(session.id, session.peer)
        registered.device_order = bool(session.num_events)
        registered.device_order_refused = session.device_order_refused
        send(pb.AttachReply(registered=registered))
        if session.lost:  # since it was registered, when nobody could be told yet
            on_lost(_lost(session))
        stream = AttachStream(session, send, self.instances, self.readiness, self.runner, self.watches)
        self._streams[session.id] = stream
        stream.on_close = lambda _: self._streams.pop(session.id, None)
        return stream

    def watch(
        self,
        first: pb.Watch,
        send: Send,
        unread_bytes: Callable[[], int],
        on_lost: Callable[[KVSidecarError], object],
    ) -> WatchStream:
        """Send the reply to the first message of a watcher's stream, and return the stream.

        Args:
            unread_bytes: returns the bytes sent but not yet read by the client.
            on_lost: see `open`.

        Raises:
            KVSidecarError: the watcher is refused.
        """
        check_protocol(first.protocol)
        peer, namespace = self.instances.peer(first.token), _namespace(first.namespace)
        permit(peer.caller, namespace)
        stream = WatchStream(
            peer, namespace, send, unread_bytes, on_lost, self.instances.watches_of, self.watches, self.readiness
        )
        self._watching.add(stream)
        stream.on_close = self._watching.discard
        # The number is no rank's: a watcher has nothing that could outlive the stream.
        stream.begin(self._registered(secrets.randbits(ID_BITS) | 1, peer))
        return stream

    def _registered(self, session: int, peer: Peer) -> pb.Registered:
        readiness = readiness_to_wire(self.readiness.now)
        return pb.Registered(
            epoch=self.epoch, session=session, readiness=readiness, version=__version__, token=peer.token
        )

    def peer_gone(self, peer: Peer) -> None:
        """End the watches of a client whose process is gone, and the sessions of its ranks."""
        self.end_watches(peer)
        for session in self.instances.remove_peer(peer):
            self.tasks.spawn(self._drop(session), name="end-session-of-gone-peer")

    def end_watches(self, peer: Peer) -> None:
        for stream in tuple(self._watching):
            if stream.peer is peer:
                stream.lost(UnknownPeer(f"{_GONE} this watch belongs to has ended"))

    def permit_watches(self) -> None:
        """After a change of the policy, end the streams of clients that may not watch any more."""
        for stream in tuple(self._watching):
            try:
                permit(stream.peer.caller, stream.namespace)
            except KVSidecarError as error:
                stream.lost(error)

    async def end(self, session: RankSession, *, gone: bool) -> None:
        """End a session, see `Instances.end`. Returns when its memory is unmapped."""
        first = not session.ending
        await self.instances.end(session, gone=gone)
        if first:
            _log.info("rank detached", instance=session.registration.instance, rank=session.registration.rank)
        session.on_lost = None

    async def _drop(self, session: RankSession) -> None:
        """End the session of a rank whose process is gone, then the rest of its stream."""
        on_lost = session.on_lost
        await self.end(session, gone=True)
        if on_lost is not None:
            on_lost(UnknownPeer(f"{_GONE} this rank belongs to has ended"))

    def copier_lost(self, copier: Copier) -> None:
        """Handle the end of the process that copied for a device, and of its copies: its ranks must attach again."""
        for session in self.instances:
            if session.copier is copier and session.on_lost is not None:
                session.on_lost(_lost(session))

    async def register(self, first: Any) -> RankSession | KVSidecarError:
        """Register the rank of a stream's first message, or return why it is refused."""
        try:
            return await self._register(first)
        except KVSidecarError as error:
            denied = isinstance(error, NotPermitted | LimitExceeded)
            self.metrics.refuse(REASONS[type(error)] if denied else Refusal.REGISTER_REFUSED)
            _caused.warning("attach refused", reason=str(error))
            return error
        except Exception as error:  # noqa: BLE001 - the client must get a reply
            _caused.error("a registration failed unexpectedly", error=str(error), exc_info=error)
            return KVSidecarError(INTERNAL)

    async def _register(self, first: Any) -> RankSession:
        if isinstance(first, InvalidRequest):  # it did not parse
            raise first
        if not isinstance(first, pb.AttachRequest) or first.WhichOneof("message") != "register":
            raise InvalidRequest("the first message of an Attach stream must be `register`")
        message: pb.Register = first.register
        check_protocol(message.protocol)
        if self.readiness.refusal is Refusal.DRAINING:
            raise Unavailable("the daemon is draining and accepts no new ranks", refusal=Refusal.DRAINING)
        registration = await self.steps.loop_time.run(convert.registration_from(message))
        session = await self.instances.register(registration)
        self.metrics.models.attached(registration.namespace.model)
        _log.info(
            "rank attached",
            instance=registration.instance,
            rank=registration.rank,
            world_size=registration.world_size,
            device=registration.device,
            pid=session.peer.pid,
            imported_bytes=session.imported_bytes,
        )
        return session

    async def job(self, session: int, message: pb.Store | pb.Load, direction: Direction, token: bytes) -> pb.JobDone:
        """Run a job of this client's rank that comes in a call of its own; see `AttachStream.call`. Raises
        KVSidecarError."""
        peer, stream = self.instances.peer(token), self._streams.get(session)
        if stream is None or stream.session.peer is not peer:
            raise UnknownPeer(f"no session {session} was registered with this token, or its stream has ended")
        return await stream.call(message, direction, self.steps.loop_time.turn)

    # -- lookups and leases ----------------------------------------------------------------------------------------

    def lookup(self, request: pb.LookupRequest, caller: Caller) -> pb.LookupReply:
        failpoints.hit("lookup.before_answer")
        self.steps.called()
        namespace = _namespace(request.namespace)
        permit(caller, namespace)
        if request.needed_tokens or request.loaded_tokens:
            self.lookups.report(namespace, request.needed_tokens, request.loaded_tokens)
            return pb.LookupReply(epoch=self.epoch)
        groups = _groups(request, namespace, "a lookup")
        mode = convert.mode_from(request.mode)
        bitmap = mode is LookupMode.BITMAP
        tails = [group.tail for group in request.groups] if bitmap and not request.touch else []
        if any(tails):
            groups = [(group, hashes or groups[0][1]) for group, hashes in groups]
        owner = self.instances.peer(request.token).token if request.token else None
        result = self.lookups.lookup(
            namespace,
            groups,
            mode,
            lease_seconds=request.lease_ms / 1000,
            owner=owner,
            lease=request.lease,
            lease_last=[group.lease_last for group in request.groups] if bitmap else (),
            touch=request.touch,
            pause=convert.pause_from(request.pause_seconds),
            fetch_seconds=request.fetch_ms / 1000,
            prefill_rate=request.prefill_rate,
            choice=convert.choice_from(request, namespace.hash_bytes) if request.choose and bitmap else None,
            tails=tails,
        )
        reply = pb.LookupReply(ready=result.ready, epoch=self.epoch, asking=result.asking)
        if result.lease:
            reply.lease, reply.lease_ms = result.lease, int(result.lease_seconds * 1000)
        for group in result.groups:
            hits = reply.groups.add(group=group.group, hits=group.hits, coming=group.coming)
            if bitmap:
                hits.bitmap = convert.bitmap_to(group.found)
            if any(tails):
                hits.first, hits.count = group.first, len(group.found)
            if group.held:
                hits.held = convert.bitmap_to(group.held)
        return reply

    def answered(self, request: pb.LookupRequest, arrived: float) -> None:
        """Count an answered lookup that arrived at this time of `user_time`'s clock. (A report looks nothing up.)"""
        if not (request.needed_tokens or request.loaded_tokens):
            self.metrics.lookup_seconds.observe(self.user_time.clock() - arrived)

    def release(self, request: pb.ReleaseRequest, caller: Caller) -> pb.ReleaseReply:
        self._identify(caller)
        mine = self.instances.may_use_lease(request.lease, caller.uid)
        return pb.ReleaseReply(released=mine and self.lookups.release(request.lease))

    def renew(self, request: pb.RenewRequest, caller: Caller) -> pb.RenewReply:
        self._identify(caller)
        mine = self.instances.may_use_lease(request.lease, caller.uid)
        granted = self.lookups.renew(request.lease, request.lease_ms / 1000) if mine else 0
        return pb.RenewReply(renewed=granted > 0, lease_ms=int(granted * 1000))

    def _identify(self, caller: Caller) -> None:
        """Raises UnknownPeer if there is a policy and the caller is anonymous."""
        if caller.identity is None and not self.open_to_all:
            raise unidentified()

    # -- operators -------------------------------------------------------------------------------------------------

    async def status(self, request: pb.StatusRequest, caller: Caller) -> pb.StatusReply:
        page = request.page if request.HasField("page") else None
        reply = await self.steps.loop_time.run(self.make_status(caller, page))
        reply.session_ended = bool(request.session) and not self.instances.lives(request.session)
        return reply

    async def clear(self, request: pb.ClearRequest, caller: Caller) -> pb.ClearReply:
        if request.HasField("namespace") + request.all + bool(request.share) != 1:
            raise InvalidRequest("clear takes either a namespace, a share or `all`")
        namespace = _namespace(request.namespace) if request.HasField("namespace") else None
        if request.groups and (namespace is None or request.unused_seconds or len(request.groups) > MAX_GROUPS):
            raise InvalidRequest(
                f"hashes to clear require a namespace, no time without use, and at most {MAX_GROUPS} groups"
            )
        self._permit_clear(namespace, caller)
        blocks = await self.steps.loop_time.run(self._clear(request, namespace))
        what = str(namespace) if namespace else request.share or "all"
        _log.info("cleared", namespace=what, unused_seconds=request.unused_seconds, blocks=blocks)
        return pb.ClearReply(blocks=blocks)

    def _clear(self, request: pb.ClearRequest, namespace: Namespace | None) -> Clearing:
        if request.groups and namespace is not None:
            return self.lookups.clear_blocks(namespace, _groups(request, namespace, "a clear"))
        if request.unused_seconds:
            return self.lookups.clear_unused(namespace, request.share, request.unused_seconds)
        return self.lookups.clear(namespace, request.share)

    async def pin(self, request: pb.PinRequest, caller: Caller) -> pb.PinReply:
        _admit(caller, "pin blocks")
        namespace = _namespace(request.namespace)
        groups = _groups(request, namespace, "a pin")
        owner = str(caller.identity or "anonymous")
        holding = self.lookups.hold(request.name, owner, namespace, groups, request.seconds)
        hold = await self.steps.loop_time.run(holding)
        _log.info("pinned", name=hold.name, by=owner, namespace=str(namespace), blocks=hold.blocks, bytes=hold.nbytes)
        return pb.PinReply(blocks=hold.blocks, bytes=hold.nbytes)

    def unpin(self, request: pb.UnpinRequest, caller: Caller) -> pb.UnpinReply:
        _admit(caller, "unpin blocks")
        if unpinned := self.lookups.end_hold(request.name):
            _log.info("unpinned", name=request.name, by=str(caller.identity or "anonymous"))
        return pb.UnpinReply(unpinned=unpinned)

    def drain(self, _request: pb.DrainRequest, caller: Caller) -> pb.DrainReply:
        _admit(caller, "drain")
        self.readiness.drain("an operator asked to drain")
        _log.info("draining", by=str(caller.identity or "anonymous"))
        return pb.DrainReply()

    def cancel_drain(self, _request: pb.CancelDrainRequest, caller: Caller) -> pb.CancelDrainReply:
        _admit(caller, "cancel a drain")
        if cancelled := self.readiness.cancel_drain():
            _log.info("drain cancelled", by=str(caller.identity or "anonymous"))
        return pb.CancelDrainReply(cancelled=cancelled)

    def _permit_clear(self, namespace: Namespace | None, caller: Caller) -> None:
        """Let an engine clear its own namespace: one that the policy grants it, or without a policy one in which it is
        attached. Raises NotPermitted, UnknownPeer."""
        if caller.grant.admin:
            return
        if namespace is None:
            raise _not_admin(caller, "clear all namespaces")
        if not self.open_to_all:
            permit(caller, namespace)
        elif namespace not in self.instances.attached_namespaces(caller.uid):
            raise _not_admin(caller, "clear a namespace in which they have no rank attached")


def check_protocol(version: int) -> None:
    """Raises ProtocolMismatch if a client speaks another version of the protocol."""
    if version != PROTOCOL:
        raise ProtocolMismatch(
            f"the daemon speaks protocol {PROTOCOL}, the client {version}: use the same kvsidecar release on both sides"
        )


def _admit(caller: Caller, what: str) -> None:
    if not caller.grant.admin:
        raise _not_admin(caller, what)


def _not_admin(caller: Caller, what: str) -> KVSidecarError:
    if caller.identity is None:
        return UnknownPeer(
            f"only admins may {what}: send the token of an open Attach stream or connection to the attach socket in "
            f"the metadata {TOKEN_METADATA}"
        )
    return NotPermitted(f"only admins may {what}, and {caller.identity} is not an admin")


_CACHED_BYTES = 1024
"""Larger namespaces are not cached, so that no client can fill the cache with megabytes of text."""


def _lost(session: RankSession) -> Unavailable:
    return Unavailable(f"{session.copier.uuid}: {session.lost}: attach again", refusal=Refusal.DEVICE_LOST)


def _groups(request: Any, namespace: Namespace, what: str) -> list[tuple[int, PackedHashes]]:
    """The blocks that a request names. Raises InvalidRequest."""
    if len(request.groups) > MAX_GROUPS:
        raise InvalidRequest(f"{what} in {len(request.groups)} groups is over the limit of {MAX_GROUPS}")
    return [(group.group, PackedHashes(group.hashes, namespace.hash_bytes)) for group in request.groups]


def _namespace(message: pb.Namespace) -> Namespace:
    """A valid namespace, cached because schedulers send the same one in every step. Raises InvalidRequest."""
    packed = message.SerializeToString()
    return (_unpack if len(packed) <= _CACHED_BYTES else _unpack.__wrapped__)(packed)


@lru_cache(maxsize=256)
def _unpack(packed: bytes) -> Namespace:
    namespace = namespace_from_wire(pb.Namespace.FromString(packed))
    if problem := namespace.problem():
        raise InvalidRequest(problem)
    return namespace
