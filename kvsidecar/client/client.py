"""The client: one object per rank (or per scheduler, which only looks up)."""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc

from kvsidecar.client import attach_socket
from kvsidecar.client.buffers import KVBuffers
from kvsidecar.errors import AttachRefused, ClientError, DaemonUnreachable
from kvsidecar.paths import attach_path, default_socket_path
from kvsidecar.types import PROTOCOL, GroupLayout, LookupMode, Namespace, Outcome, State
from kvsidecar.v1 import sidecar_pb2 as pb
from kvsidecar.v1 import sidecar_pb2_grpc as pb_grpc
from kvsidecar.wire import MODE_TO_WIRE, OUTCOME_FROM_WIRE, STATE_FROM_WIRE, layout_to_wire, namespace_to_wire

DAEMON_LOST = "daemon_lost"
"""Reason of a job that ended because the connection to the daemon did."""


class Completion(Protocol):
    """Something to wait for before a copy may start; ``torch.cuda.Event`` is one."""

    def synchronize(self) -> None:
        """Return when the work recorded before it is over. Called in a thread of the client."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of one KV cache group: ``hashes[i]`` is the content of block ``block_ids[i]`` of this rank."""

    group: int
    hashes: Sequence[bytes]
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class JobDone:
    """The end of one job. Bytes and seconds."""

    job: int
    outcome: Outcome
    reason: str = ""
    """Why it was declined or failed: a name of `kvsidecar.types.Refusal`, or `DAEMON_LOST`."""
    error: str = ""
    copied_blocks: int = 0
    skipped_blocks: int = 0
    """Stores only: blocks that the daemon has already, or that another rank is storing."""
    nbytes: int = 0
    copy_seconds: float = 0.0
    """Of the DMA alone."""
    queue_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Readiness:
    """What the daemon said last of itself. Bytes and seconds."""

    state: State
    pool_bytes: int = 0
    pinned_bytes: int = 0
    pin_bytes_per_second: float = 0.0
    eta_seconds: float | None = None
    reason: str = ""

    @property
    def ready(self) -> bool:
        return self.state is State.READY


@dataclass(frozen=True, slots=True)
class GroupHits:
    hits: int
    """Readable blocks: length of the prefix, or how many of all."""
    found: tuple[bool, ...] = ()
    """`LookupMode.BITMAP` only: one flag per hash."""


@dataclass(frozen=True, slots=True)
class LookupResult:
    ready: bool
    """False: the pool is not pinned yet (or the daemon drains), and every hit is 0."""
    groups: Mapping[int, GroupHits]
    lease: int | None = None
    lease_seconds: float = 0.0
    """Granted; may be shorter than asked."""


@dataclass(slots=True)
class _Outgoing:
    """One message still to be built: the engine's thread pays for a queue's put, not for protobuf."""

    after: Completion | None
    job: int = 0
    store: Sequence[Blocks] | None = None
    load: Sequence[Blocks] | None = None
    lease: int = 0
    message: pb.AttachRequest | None = None

    def build(self) -> pb.AttachRequest:
        if self.store is not None:
            return pb.AttachRequest(store=pb.Store(job=self.job, blocks=_blocks(self.store)))
        if self.load is not None:
            return pb.AttachRequest(load=pb.Load(job=self.job, lease=self.lease, blocks=_blocks(self.load)))
        assert self.message is not None
        return self.message


class Client:
    """A connection to the daemon of this node. All methods may be called from any thread.

    `store`, `load` and `poll` never wait for the daemon. The others do, at most ``timeout`` seconds.

    Args:
        socket: path of the daemon's gRPC socket; by default ``$KVSIDECAR_SOCKET``, then the same default as the
            daemon's.
        name: free text that the daemon shows in its log.
        timeout: seconds that a call may wait for the daemon, unless it says otherwise.
    """

    def __init__(self, socket: str | None = None, *, name: str = "", timeout: float = 5.0) -> None:
        self.socket = socket or os.environ.get("KVSIDECAR_SOCKET") or default_socket_path()
        self.epoch = 0
        """Of the daemon run this client is connected to; 0 before."""
        self._name = name
        self._timeout = timeout
        self._channel = grpc.insecure_channel(f"unix:{self.socket}")
        self._stub = pb_grpc.SidecarStub(self._channel)
        self._link: attach_socket.Link | None = None
        self._readiness = Readiness(State.STARTING, reason="not attached")
        self._changed = threading.Condition()
        # All below belong to _changed's lock, except that an empty _finished may be seen without it.
        self._attached = False
        self._lost = ""
        self._running: set[int] = set()
        self._finished: dict[int, JobDone] = {}
        self._flushed: dict[int, frozenset[int]] = {}
        self._numbers = itertools.count(1)
        self._ordered: queue.SimpleQueue[_Outgoing | None] = queue.SimpleQueue()
        self._outgoing: queue.SimpleQueue[_Outgoing | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    # -- the rank --------------------------------------------------------------------------------------------------

    def attach(
        self,
        *,
        instance: str,
        namespace: Namespace,
        buffers: KVBuffers,
        groups: Sequence[GroupLayout],
        rank: int = 0,
        world_size: int = 1,
        timeout: float | None = None,
    ) -> None:
        """Register this rank's memory. Succeeds at once while the pool is still being pinned.

        Args:
            instance: name of the engine deployment, the same for all of its ranks.
            namespace: what must be equal for two instances to share blocks.
            buffers: this rank's memory; must stay allocated until `close` has returned.
            groups: this rank's KV cache groups; their regions index ``buffers.allocations``.

        Raises:
            DaemonUnreachable: no daemon answers.
            AttachRefused: the daemon refuses the registration; the text says what to change.
        """
        if self._attached or self._threads:
            raise ClientError("this client was attached before: use a new one")
        timeout = self._timeout if timeout is None else timeout
        fds = [allocation.fd for allocation in buffers.allocations if allocation.fd is not None]
        link = attach_socket.connect(attach_path(self.socket), fds=fds, client=self._name, timeout=timeout)
        self._link, stale = link, self._link
        if stale is not None:
            stale.close()
        register = pb.Register(
            protocol=PROTOCOL,
            token=link.token,
            instance=instance,
            namespace=namespace_to_wire(namespace),
            rank=rank,
            world_size=world_size,
            device=buffers.device,
            groups=[layout_to_wire(layout) for layout in groups],
        )
        for allocation in buffers.allocations:
            if allocation.fd is not None:
                register.allocations.add(fd_index=fds.index(allocation.fd), size=allocation.size)
            else:
                register.allocations.add(cuda_ipc_handle=allocation.cuda_ipc_handle, size=allocation.size)
        self._outgoing.put(_Outgoing(None, message=pb.AttachRequest(register=register)))
        replies = self._stub.Attach(self._requests())
        for target, arguments in ((self._read, (replies,)), (self._order, ())):
            thread = threading.Thread(
                target=target, args=arguments, name=f"kvsidecar-{target.__name__[1:]}", daemon=True
            )
            thread.start()
            self._threads.append(thread)
        with self._changed:
            answered = self._changed.wait_for(lambda: self._attached or self._lost, timeout)
        if not answered:
            replies.cancel()
            raise DaemonUnreachable(f"the daemon at {self.socket} did not answer the registration in {timeout:g} s")
        if not self._attached:
            raise AttachRefused(self._lost)

    @property
    def attached(self) -> bool:
        """False before `attach`, and after the connection to the daemon was lost."""
        return self._attached

    @property
    def readiness(self) -> Readiness:
        """What the daemon said last; it tells every change by itself. Never waits."""
        return self._readiness

    def wait_ready(self, timeout: float) -> Readiness:
        """Wait until the daemon is ready, has failed, or is lost, or ``timeout`` seconds have passed.

        Raises:
            DaemonUnreachable: the connection was lost.
        """

        def settled() -> bool:
            return bool(self._lost) or self._readiness.state in (State.READY, State.FAILED)

        with self._changed:
            self._changed.wait_for(settled, timeout)
            if self._lost:
                raise DaemonUnreachable(self._lost)
            return self._readiness

    # -- jobs ------------------------------------------------------------------------------------------------------

    def store(self, blocks: Sequence[Blocks], *, after: Completion | None = None) -> int:
        """Copy blocks from the device to the pool. Returns the job's number at once.

        Args:
            after: the store is sent when this is over. Give the event that was recorded behind the kernels that
                write these blocks: a store that starts earlier copies what was there before.
        """
        return self._submit(_Outgoing(after, store=blocks))

    def load(self, blocks: Sequence[Blocks], *, lease: int | None = None, after: Completion | None = None) -> int:
        """Copy blocks from the pool to the device. Returns the job's number at once.

        The blocks must not be used, freed or given to anybody else before the job is over: DMA cannot be cancelled.
        """
        return self._submit(_Outgoing(after, load=blocks, lease=lease or 0))

    def poll(self) -> list[JobDone]:
        """The jobs that have ended since the last call. Never waits."""
        if not self._finished:
            return []
        with self._changed:
            done = list(self._finished.values())
            self._finished.clear()
            return done

    def wait(self, jobs: Iterable[int], timeout: float) -> dict[int, JobDone]:
        """Wait for these jobs, at most ``timeout`` seconds. Returns those that have ended; `poll` skips them then."""
        wanted = tuple(jobs)
        with self._changed:
            self._changed.wait_for(lambda: all(job in self._finished for job in wanted), timeout)
            return {job: self._finished.pop(job) for job in wanted if job in self._finished}

    def flush(self, jobs: Sequence[int] = (), *, timeout: float | None = None) -> frozenset[int]:
        """Wait until these store jobs (by default all) no longer read the device.

        Returns:
            The jobs that still do after ``timeout`` seconds: empty means that all blocks may be overwritten.
        """
        timeout = self._timeout if timeout is None else timeout
        deadline = time.monotonic() + timeout
        with self._changed:
            unfinished = frozenset(job for job in (jobs or self._running) if job in self._running)
            if not unfinished:
                return frozenset()
        number = next(self._numbers)
        message = pb.AttachRequest(
            flush=pb.Flush(flush=number, jobs=sorted(unfinished), timeout_ms=int(timeout * 1000))
        )
        # Behind the stores that still wait for their events: the daemon cannot flush what it has not been told of.
        self._ordered.put(_Outgoing(None, message=message))
        with self._changed:
            self._changed.wait_for(lambda: number in self._flushed or self._lost, deadline + 0.1 - time.monotonic())
            return self._flushed.pop(number, unfinished & self._running)

    # -- lookups and leases ----------------------------------------------------------------------------------------

    def lookup(
        self,
        namespace: Namespace,
        groups: Mapping[int, Sequence[bytes]],
        *,
        mode: LookupMode = LookupMode.PREFIX,
        lease_seconds: float = 0.0,
        timeout: float | None = None,
    ) -> LookupResult:
        """Which of these blocks the daemon can load, by KV cache group.

        Args:
            groups: block hashes by group, in prefix order.
            lease_seconds: forbid their eviction for this long; 0 takes no lease.

        Raises:
            DaemonUnreachable: no answer in time.
        """
        request = pb.LookupRequest(
            namespace=namespace_to_wire(namespace),
            mode=MODE_TO_WIRE[mode],
            lease_ms=int(lease_seconds * 1000),
            token=self._token() if lease_seconds else b"",
        )
        for group, hashes in groups.items():
            request.groups.add(group=group, hashes=b"".join(hashes))
        reply = self._call(self._stub.Lookup, request, timeout)
        return LookupResult(
            ready=reply.ready,
            groups={
                each.group: GroupHits(each.hits, _bits(each.bitmap, len(groups[each.group]))) for each in reply.groups
            },
            lease=reply.lease or None,
            lease_seconds=reply.lease_ms / 1000,
        )

    def release(self, lease: int) -> bool:
        """End a lease. False if it had ended before."""
        reply: pb.ReleaseReply = self._call(self._stub.Release, pb.ReleaseRequest(lease=lease))
        return reply.released

    def renew(self, lease: int, lease_seconds: float) -> float:
        """Let a lease live for this long from now. Returns the seconds granted; 0 if it had ended before."""
        request = pb.RenewRequest(lease=lease, lease_ms=int(lease_seconds * 1000))
        reply: pb.RenewReply = self._call(self._stub.Renew, request)
        return reply.lease_ms / 1000 if reply.renewed else 0.0

    # -- operators -------------------------------------------------------------------------------------------------

    def status(self) -> pb.StatusReply:
        """Everything the daemon says of itself."""
        reply: pb.StatusReply = self._call(self._stub.Status, pb.StatusRequest())
        return reply

    def clear(self, namespace: Namespace | None = None) -> int:
        """Forget the blocks of a namespace, or of all. Returns how many can no longer be looked up."""
        request = (
            pb.ClearRequest(all=True) if namespace is None else pb.ClearRequest(namespace=namespace_to_wire(namespace))
        )
        reply: pb.ClearReply = self._call(self._stub.Clear, request)
        return reply.blocks

    def drain(self) -> None:
        """Tell the daemon to take no new work."""
        self._call(self._stub.Drain, pb.DrainRequest())

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self, timeout: float | None = None) -> None:
        """Detach. When this returns within ``timeout`` the daemon has unmapped the memory: it may be freed."""
        timeout = self._timeout if timeout is None else timeout
        self._ordered.put(None)
        for thread in self._threads:
            thread.join(timeout)
        self._channel.close()
        if self._link is not None:
            self._link.close()
            self._link = None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- threads ---------------------------------------------------------------------------------------------------

    def _submit(self, outgoing: _Outgoing) -> int:
        job = outgoing.job = next(self._numbers)
        with self._changed:
            if not self._attached:
                reason = DAEMON_LOST if self._lost else "not_attached"
                self._finished[job] = JobDone(job, Outcome.DECLINED, reason, self._lost)
                self._changed.notify_all()
                return job
            self._running.add(job)
        (self._outgoing if outgoing.after is None else self._ordered).put(outgoing)
        return job

    def _order(self) -> None:
        """Thread: sends each job when what it comes after is over (DESIGN: store order ``HOST``)."""
        while (outgoing := self._ordered.get()) is not None:
            if outgoing.after is not None:
                try:
                    outgoing.after.synchronize()
                except Exception as error:  # noqa: BLE001 - an engine's event may raise anything; the job must end
                    self._finish(JobDone(outgoing.job, Outcome.FAILED, "event_failed", str(error)))
                    continue
            self._outgoing.put(outgoing)
        self._outgoing.put(None)

    def _requests(self) -> Iterator[pb.AttachRequest]:
        """Iterated in a thread of gRPC; its end half-closes the stream."""
        while (outgoing := self._outgoing.get()) is not None:
            yield outgoing.build()

    def _read(self, replies: Iterable[pb.AttachReply]) -> None:
        """Thread: takes what the daemon says until the stream ends, however it ends."""
        lost = "the daemon ended the connection"
        try:
            for reply in replies:
                self._take(reply)
        except grpc.RpcError as error:
            lost = _details(error)
        with self._changed:
            self._attached = False
            self._lost = lost
            self._readiness = Readiness(State.FAILED, reason=lost)
            for job in sorted(self._running):
                self._finished[job] = JobDone(job, Outcome.FAILED, DAEMON_LOST, lost)
            self._running.clear()
            self._changed.notify_all()
        # Ends the generator that gRPC iterates, and the ordering thread: nobody listens to them any more.
        self._ordered.put(None)

    def _take(self, reply: pb.AttachReply) -> None:
        match reply.WhichOneof("message"):
            case "registered":
                with self._changed:
                    self.epoch = reply.registered.epoch
                    self._readiness = _readiness(reply.registered.readiness)
                    self._attached = True
                    self._changed.notify_all()
            case "done":
                self._finish(_job_done(reply.done))
            case "flushed":
                with self._changed:
                    self._flushed[reply.flushed.flush] = frozenset(reply.flushed.pending)
                    self._changed.notify_all()
            case "readiness":
                with self._changed:
                    self._readiness = _readiness(reply.readiness)
                    self._changed.notify_all()

    def _finish(self, done: JobDone) -> None:
        with self._changed:
            self._running.discard(done.job)
            self._finished[done.job] = done
            self._changed.notify_all()

    # -- calls -----------------------------------------------------------------------------------------------------

    def _token(self) -> bytes:
        if self._link is None:
            self._link = attach_socket.connect(
                attach_path(self.socket), fds=(), client=self._name, timeout=self._timeout
            )
            self.epoch = self._link.epoch
        return self._link.token

    def _call(self, method: grpc.UnaryUnaryMultiCallable, request: object, timeout: float | None = None):  # type: ignore[no-untyped-def,type-arg]
        try:
            return method(request, timeout=self._timeout if timeout is None else timeout)
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise DaemonUnreachable(f"no kvsidecar answers at {self.socket}: {_details(error)}") from error
            raise ClientError(_details(error)) from error


def _details(error: grpc.RpcError) -> str:
    return error.details() or error.code().name


def _bits(bitmap: bytes, count: int) -> tuple[bool, ...]:
    return tuple(bool(bitmap[i >> 3] >> (i & 7) & 1) for i in range(count)) if bitmap else ()


def _blocks(blocks: Sequence[Blocks]) -> list[pb.Blocks]:
    return [
        pb.Blocks(group=each.group, hashes=b"".join(each.hashes), block_ids=list(each.block_ids)) for each in blocks
    ]


def _job_done(message: pb.JobDone) -> JobDone:
    return JobDone(
        job=message.job,
        outcome=OUTCOME_FROM_WIRE.get(message.outcome, Outcome.FAILED),
        reason=message.reason,
        error=message.error,
        copied_blocks=message.copied_blocks,
        skipped_blocks=message.skipped_blocks,
        nbytes=message.bytes,
        copy_seconds=message.copy_seconds,
        queue_seconds=message.queue_seconds,
    )


def _readiness(message: pb.Readiness) -> Readiness:
    return Readiness(
        state=STATE_FROM_WIRE.get(message.state, State.STARTING),
        pool_bytes=message.pool_bytes,
        pinned_bytes=message.pinned_bytes,
        pin_bytes_per_second=message.pin_bytes_per_second,
        eta_seconds=message.eta_seconds if message.HasField("eta_seconds") else None,
        reason=message.reason,
    )
