"""The client: one object per rank, or per scheduler, which only makes lookups."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import Any

from kvsidecar.client.buffers import KVBuffers
from kvsidecar.client.inbox import Inbox
from kvsidecar.client.jobs import Jobs
from kvsidecar.client.ledger import Ledger
from kvsidecar.client.local_operator import Operator
from kvsidecar.client.lookups import LeaseRenewal, LookupCalls, PendingLookup
from kvsidecar.client.messages import (
    MAX_TTL_SECONDS,
    LookupQuery,
    Registration,
    Watching,
    prompts_report,
    whole_seconds,
)
from kvsidecar.client.operator import OperatorCalls
from kvsidecar.client.ordering import Completion, EventRing, Order
from kvsidecar.client.supervisor import Dialling, Supervisor
from kvsidecar.client.types import DEFAULT, Blocks, Default, JobDone, LookupResult, ResidencyChange
from kvsidecar.client.waiting import Monitor
from kvsidecar.errors import ClientError, DaemonUnreachable
from kvsidecar.protocol.paths import default_socket_path
from kvsidecar.support.breaker import Backoff, BreakerState, CircuitBreaker
from kvsidecar.types import (
    MAX_IDLE_SECONDS,
    NO_NEXT_USE,
    Direction,
    GroupLayout,
    LookupMode,
    Namespace,
    Priority,
    Readiness,
    State,
)


class Client(OperatorCalls):
    """A connection to the daemon of this node. All methods may be called from any thread.

    Call `attach` once. When the daemon is lost, the client ends every outstanding job, continues without offload, and
    attaches again by itself when a daemon is back.

    `store`, `load` and `poll` never wait for the daemon. `lookup`, `release` and `renew` wait at most ``step_budget``
    seconds, and not at all while the daemon is lost or hangs. The others wait at most ``timeout`` seconds.

    Args:
        socket: path of the daemon's gRPC socket; by default ``$KVSIDECAR_SOCKET``, then the daemon's own default.
        name: free text that the daemon shows in its log.
        timeout: default time limit of a call, in seconds.
        step_budget: default time limit of a lookup, release or renewal, in seconds. They take less than 1 ms on an idle
            machine; the default leaves room for a busy one.
        job_timeout: default time after which a copy that has not started never starts, in seconds; None for no limit.
        max_outstanding: most jobs that have not ended; more are declined.
        reconnect: delays between attempts to connect.
        breaker: stops lookups while the daemon hangs.
        local_protocol: use the local protocol instead of gRPC, if the daemon offers it.
        quiet: the log says how the connection is (attached, ready, lost, attached again) only at the level DEBUG,
            because another client of the same engine says it.
    """

    def __init__(
        self,
        socket: str | None = None,
        *,
        name: str = "",
        timeout: float = 5.0,
        step_budget: float = 0.1,
        job_timeout: float | None = 30.0,
        max_outstanding: int = 4096,
        reconnect: Backoff | None = None,
        breaker: CircuitBreaker | None = None,
        local_protocol: bool = True,
        quiet: bool = False,
    ) -> None:
        self.socket = socket or os.environ.get("KVSIDECAR_SOCKET") or default_socket_path()
        self._timeout = timeout
        self._job_timeout = job_timeout
        self._ledger = Ledger(max_outstanding)
        self._monitor = Monitor()
        self._changed = self._monitor.changed
        self._dialling = Dialling(
            self.socket,
            name,
            local_protocol,
            timeout,
            step_budget,
            breaker or CircuitBreaker(),
            reconnect or Backoff(),
            quiet,
        )
        self._new_supervisor()
        self._closed = False
        self._inbox: Inbox | None = None
        self._operator = Operator(self.socket, timeout, name)

    def _new_supervisor(self, *, idle: bool = False) -> None:
        self._supervisor = Supervisor(self._dialling, self._ledger, self._monitor, idle=idle)
        self._jobs = Jobs(self._supervisor, self._ledger, self._monitor, self._job_timeout)
        self._lookups = LookupCalls(self._supervisor, self._dialling)

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
        events: EventRing | None = None,
        options: Mapping[str, str] | None = None,
        served_name: str = "",
        retry: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Register this rank's memory. Does not wait for the pool to be pinned.

        Attaching ends the leases that this client took before.

        Args:
            instance: name of the engine deployment, the same for all of its ranks.
            namespace: what must be equal for two instances to share blocks.
            buffers: this rank's memory; must stay allocated until `close` has returned True.
            groups: this rank's KV cache groups; their regions index ``buffers.allocations``.
            events: for stores that wait for the engine on the device.
            options: options that determine the namespace, with which `kvsidecar status` shows how namespaces of one
                model differ: short values that are not secret, or ``#`` and a digest.
            served_name: the name that requests give the model, for `kvsidecar status` and routers. Blocks are shared
                whatever it is.
            retry: return at once, and attach in the background whenever a daemon answers.
            timeout: seconds to wait without ``retry``.

        Raises:
            DaemonUnreachable: no daemon answers. `attach` may be called again. Not raised with ``retry``.
            AttachRefused: the daemon refuses the registration; the text says what to change. With ``retry``, this is
                logged instead, and the client tries again: another daemon may accept it.
            ClientError: this client was attached or closed before, or was closed meanwhile.
        """
        if self._supervisor.has_registration or self._closed:
            raise ClientError("this client was attached or closed before: make a new Client")
        timeout = self._timeout if timeout is None else timeout
        handles = tuple(events.handles) if events is not None else ()
        registration = Registration(
            instance, namespace, buffers, tuple(groups), rank, world_size, handles, dict(options or {}), served_name
        )
        self._jobs.events = events
        supervisor = self._supervisor
        supervisor.start(registration, once=not retry)
        if retry or supervisor.wait_session(timeout):
            return
        if self._closed:
            raise ClientError("this client was closed while it attached")
        error = supervisor.error
        supervisor.close(0.0)
        self._new_supervisor(idle=supervisor.idle)
        raise error or DaemonUnreachable(
            f"the daemon at {self.socket} did not answer the registration in {timeout:g} s"
        )

    @property
    def attached(self) -> bool:
        """Whether jobs are accepted: False before `attach` and while the daemon is lost. Never waits."""
        return self._supervisor.session is not None

    def wait_attached(self, timeout: float) -> bool:
        """Wait until this rank is attached, at most ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self.attached, timeout)

    @property
    def epoch(self) -> int:
        """Epoch of the daemon run that this client is connected to; 0 if there is none."""
        transport = self._supervisor.transport
        return 0 if transport is None else transport.connection.epoch

    @property
    def attached_epoch(self) -> int:
        """Epoch of the daemon run that this rank is attached to; 0 if there is none. Never waits."""
        session = self._supervisor.session
        return 0 if session is None else session.epoch

    @property
    def lost_reason(self) -> str:
        """Why there is no connection; empty while there is one, and before the first attempt."""
        return str(self._supervisor.error or "")

    @property
    def readiness(self) -> Readiness:
        """The daemon's last report; it reports every change. Never waits."""
        session = self._supervisor.session
        if session is not None:
            return session.readiness
        if error := self._supervisor.error:
            return Readiness(State.FAILED, reason=str(error))
        return Readiness(State.STARTING, reason="not attached")

    def wait_ready(self, timeout: float) -> Readiness:
        """Wait until this rank is attached and the daemon is ready or has failed, at most ``timeout`` seconds.

        Raises:
            DaemonUnreachable: the daemon is lost, and did not come back in time.
        """
        over = (State.READY, State.FAILED)
        with self._changed:
            self._changed.wait_for(lambda: self.attached and self.readiness.state in over, timeout)
            if not self.attached and self._supervisor.error is not None:
                raise DaemonUnreachable(str(self._supervisor.error))
            return self.readiness

    @property
    def local_protocol(self) -> bool:
        """Whether the local protocol is in use; False while there is no connection."""
        transport = self._supervisor.transport
        return transport is not None and transport.is_local

    @property
    def device_order(self) -> bool:
        """Whether ``after=DEVICE`` waits on the device: the daemon could open the events."""
        session = self._supervisor.session
        return session is not None and session.device_order

    @property
    def device_order_refused(self) -> str:
        """Why ``after=DEVICE`` waits on the host; empty if it does not, and before the daemon has answered."""
        return self._jobs.device_order_refused

    @property
    def breaker_state(self) -> BreakerState:
        """Whether lookups are sent."""
        return self._dialling.breaker.state

    # -- jobs ------------------------------------------------------------------------------------------------------

    def store(
        self,
        blocks: Sequence[Blocks],
        *,
        after: Completion | Order | None = None,
        timeout: float | Default | None = DEFAULT,
        traceparent: str | None = None,
        ttl: float | None = None,
        priority: Priority = Priority.NORMAL,
        idle_ttl: float | None = None,
    ) -> int:
        """Copy blocks from the device to the pool. Returns the job's number at once.

        The blocks must keep their content until the job has ended or `flush` has returned.

        Args:
            after: what the copy must wait for: a copy that starts before the kernels that write these blocks have
                completed copies old content. An event recorded after those kernels: the store is sent when it has
                completed. Or ``DEVICE``: all work that was enqueued on the engine's current stream before this call.
                That needs ``attach(events=...)``; the wait is on the device, or on the host if the device cannot.
            timeout: seconds after which a copy that has not started never starts.
            traceparent: W3C traceparent of the request that the job is for. A daemon with tracing shows the job in that
                trace, and ignores an invalid one.
            ttl: seconds after which these blocks are misses, rounded up; None: as configured for their share, or never.
                Blocks that are already present keep their time.
            priority: ``LOW`` blocks are evicted before, and ``HIGH`` ones after, others of their share. Blocks that are
                already present keep their priority.
            idle_ttl: seconds after their last use after which these blocks are misses, rounded up; at most 4,194,303
                (48 days). Otherwise like ``ttl``.
        """
        job = self._jobs.new(Direction.STORE, blocks, timeout, traceparent)
        job.ttl_seconds = whole_seconds("ttl", ttl, MAX_TTL_SECONDS)
        job.idle_ttl_seconds = whole_seconds("idle_ttl", idle_ttl, MAX_IDLE_SECONDS)
        job.priority = Priority(priority)
        return self._jobs.submit(job, after)

    def load(
        self,
        blocks: Sequence[Blocks],
        *,
        lease: int | None = None,
        after: Completion | None = None,
        timeout: float | Default | None = DEFAULT,
        traceparent: str | None = None,
    ) -> int:
        """Copy blocks from the pool to the device. Returns the job's number at once.

        The blocks must not be used or freed before the job has ended: DMA cannot be cancelled. Only `poll` and `wait`
        report that it has ended, even if the daemon dies.

        Args:
            timeout, traceparent: as in `store`.
        """
        job = self._jobs.new(Direction.LOAD, blocks, timeout, traceparent)
        job.lease = lease or 0
        return self._jobs.submit(job, after)

    def poll(self) -> list[JobDone]:
        """The jobs that have ended since the last call. Never waits. Beyond 65,536, the oldest results are dropped.

        Does not check jobs that were submitted since the last call if there are no others.
        """
        return self._jobs.poll()

    def wait(self, jobs: Iterable[int], timeout: float) -> dict[int, JobDone]:
        """Wait for these jobs, at most ``timeout`` seconds. Returns the results that were not reported before; `poll`
        does not return them again."""
        return self._jobs.wait(tuple(jobs), timeout)

    @property
    def outstanding(self) -> int:
        """Jobs that have not ended."""
        with self._monitor.lock:
            return self._ledger.count

    def flush(self, jobs: Sequence[int] = (), *, timeout: float | None = None, cancel: bool = False) -> frozenset[int]:
        """Wait until these jobs (by default all stores) no longer access the device's blocks.

        Args:
            timeout: in seconds.
            cancel: decline jobs that have not started, as ``cancelled``. Otherwise the daemon runs them first.

        Returns:
            The jobs that may still access them at the deadline; if there are none, all blocks may be overwritten.
        """
        return self._jobs.flush(jobs, self._timeout if timeout is None else timeout, cancel=cancel)

    def give_up(self, reason: str) -> None:
        """End the session with a daemon that hangs, and attach again when one answers. Never waits.

        None of its copies begins any more, even if the daemon resumes. Each outstanding job ends, as
        ``daemon_lost``, as soon as its copy is over: at once if it had not begun. A job that has not ended 10 s after
        its timeout has the same effect.

        Args:
            reason: for the log.
        """
        self._supervisor.give_up(reason)

    def set_idle(self, idle: bool, *, soon: bool = False) -> None:
        """Tell the daemon whether this rank's GPU is idle: stores then need not leave room for the engine's own copies.
        Never waits, and costs nothing without a change.

        Args:
            soon: send it with the next job, which costs no message of its own, or at the next `poll`.
        """
        if idle != self._supervisor.idle:
            self._supervisor.set_idle(idle, soon=soon)

    # -- what the pool holds ---------------------------------------------------------------------------------------

    def watch(self, namespace: Namespace, on_news: Callable[[], object] = lambda: None) -> None:
        """Follow which blocks of a namespace can be looked up: `take_residency` returns them, and every change. Call it
        once, instead of `attach`. Returns at once; the client connects in the background whenever a daemon answers.

        Args:
            on_news: called in another thread when there is something to take, after there was nothing.
        """
        if self._supervisor.has_registration or self._closed:
            raise ClientError("this client was attached or closed before: make a new Client")
        self._inbox = Inbox(on_news)
        self._supervisor.start(Watching(namespace, self._inbox))

    @property
    def has_residency(self) -> bool:
        """Whether `take_residency` has something to return. Never waits."""
        return bool(self._inbox)

    def take_residency(self, most_bytes: int = 1 << 20) -> list[ResidencyChange]:
        """The changes since the last call, in order: about ``most_bytes`` of them, and at least one if there is any.
        Never waits. A watcher that takes nothing for long misses changes, and receives everything again later."""
        return [] if self._inbox is None else self._inbox.take(most_bytes)

    # -- lookups and leases ----------------------------------------------------------------------------------------

    def lookup(
        self,
        namespace: Namespace,
        groups: Mapping[int, bytes | Sequence[bytes]],
        *,
        mode: LookupMode = LookupMode.PREFIX,
        lease_seconds: float = 0.0,
        fetch_seconds: float = 0.0,
        prefill_rate: float = 0.0,
        wanted: Mapping[int, Sequence[bool]] | None = None,
        fetch_tokens: int = 0,
        lease: int | None = None,
        lease_last: Mapping[int, int] | None = None,
        tails: Mapping[int, int] | None = None,
        timeout: float | None = None,
    ) -> LookupResult:
        """Look up which of these blocks the daemon can load, by KV cache group; none if it does not answer.

        There may be any number of hashes; more than 8,192 are sent in several messages.

        Args:
            groups: block hashes by group, in prefix order; joined in one `bytes`, or as a sequence.
            lease_seconds: protect the hits from eviction for this long; 0 takes no lease.
            fetch_seconds: how long the caller can wait for misses that a slower tier has; 0: nothing is fetched. This
                call does not wait: look up again while the result says that blocks are coming.
            prefill_rate: tokens that the caller computes per second, to decide what is worth fetching; 0: unknown.
            wanted: in `LookupMode.BITMAP`, which misses to fetch: by group, one flag per hash (missing ones: False);
                for groups of which a hit does not need every block. The answer says which misses a slower tier holds.
                None: each group's first misses in a row.
            fetch_tokens: tokens that the caller need not compute if everything wanted is fetched.
            lease: of an earlier lookup: it then protects these hits too, from now on. It is released if this lookup is
                not answered. None: a new one.
            lease_last: in `LookupMode.BITMAP`, by group, how many of its hits to lease, the last ones; for groups of
                which only the end of a prefix is needed. All of groups that are missing here.
            tails: in `LookupMode.BITMAP`, by group, how many of its hashes to look for: the last ones before the end of
                what all groups that are missing here have in a row, and the one behind it; all, if it has no more. For
                groups of which only the end of a prefix is needed; `GroupHits.first` says where the answer begins. The
                first group has none, and those with the same object as hashes send it once. Then at most 8,192 hashes
                are looked for.
            timeout: seconds, instead of ``step_budget``.

        Raises:
            ClientError: the daemon refuses the request; the text says what to change.
            ValueError: a time is negative or not a number.
        """
        query = LookupQuery(
            namespace,
            groups,
            mode,
            lease_seconds,
            fetch_seconds,
            prefill_rate,
            wanted,
            fetch_tokens,
            lease or 0,
            lease_last,
            tails,
        )
        return self._lookups.lookup(query, timeout)

    def begin_lookup(
        self,
        namespace: Namespace,
        groups: Mapping[int, bytes | Sequence[bytes]],
        *,
        mode: LookupMode = LookupMode.PREFIX,
        lease_seconds: float = 0.0,
        fetch_seconds: float = 0.0,
        prefill_rate: float = 0.0,
        wanted: Mapping[int, Sequence[bool]] | None = None,
        fetch_tokens: int = 0,
        lease: int | None = None,
        lease_last: Mapping[int, int] | None = None,
        tails: Mapping[int, int] | None = None,
    ) -> PendingLookup | None:
        """Send a lookup, and take the answer later: several lookups then share one wait.

        Never waits. Arguments and errors are those of `lookup`.

        Returns:
            None: it cannot be sent, because the daemon is lost or hangs.
        """
        query = LookupQuery(
            namespace,
            groups,
            mode,
            lease_seconds,
            fetch_seconds,
            prefill_rate,
            wanted,
            fetch_tokens,
            lease or 0,
            lease_last,
            tails,
        )
        return self._lookups.begin(query)

    def touch_nowait(
        self, namespace: Namespace, groups: Mapping[int, bytes | Sequence[bytes]], pause: float | None = None
    ) -> bool:
        """Report that the blocks of one request were used without a lookup, because the engine's own cache had them.

        Those that the daemon has count as used now, the head of the request last, so that it is evicted last. Never
        waits. Until the first connection is made or has failed, the latest touches, up to 1 MiB, are kept, and sent
        then.

        Args:
            groups: as for `lookup`, with any number of hashes; more than 8,192 are sent in several messages.
            pause: seconds until the request's prompt is expected to be used again, infinity if it will not be; None: it
                is not known. With `Eviction.RHYTHM`, the daemon relies on it until then; with `Eviction.LRU`, blocks
                that will not be used again do not count as used.

        Returns:
            False: it was not sent, because the daemon is lost or hangs, or this client is closed.

        Raises:
            ClientError: see `lookup`.
            ValueError: the pause is not positive; or see `lookup`.
        """
        seconds = NO_NEXT_USE if pause == inf else whole_seconds("pause", pause, NO_NEXT_USE - 1)
        query = LookupQuery(namespace, groups, LookupMode.BITMAP, touch=True, pause_seconds=seconds)
        return not self._closed and self._lookups.touch_nowait(query)

    def report_prompts_nowait(self, namespace: Namespace, needed_tokens: int, loaded_tokens: int) -> bool:
        """Report what prompts that have begun since the last report have gained. `kvsidecar status`, the page and the
        metrics show a hit rate from it; the daemon cannot tell from lookups which of their hits an engine had itself.
        Never waits.

        Args:
            needed_tokens: in whole blocks, that the engine's own cache did not have.
            loaded_tokens: those of them that were loaded, and not computed.

        Returns:
            False: it was not sent, because the daemon is lost or hangs, or this client is closed.

        Raises:
            ValueError: a number is negative, or more than 4,294,967,295.
        """
        report = prompts_report(namespace, needed_tokens, loaded_tokens)
        return not self._closed and self._lookups.report_nowait(report)

    def renew_nowait(self, lease: int, lease_seconds: float) -> LeaseRenewal:
        """`renew` without waiting for the answer."""
        return self._lookups.renew_nowait(lease, lease_seconds)

    def release_nowait(self, lease: int) -> None:
        """`release` without waiting for the answer. If the daemon is lost or busy, the lease expires instead."""
        self._lookups.release_nowait(lease)

    def release(self, lease: int | None, *, timeout: float | None = None) -> bool:
        """End a lease. False if it is None, as after a lookup without hits; if it had ended before; or if the daemon
        did not answer: then it expires."""
        return lease is not None and self._lookups.release(lease, timeout)

    def renew(self, lease: int, lease_seconds: float, *, timeout: float | None = None) -> float:
        """Extend a lease to this long from now. Returns the seconds granted; 0 if it had ended before, or the daemon
        did not answer."""
        return self._lookups.renew(lease, lease_seconds, timeout)

    # -- closing ---------------------------------------------------------------------------------------------------

    def close(self, timeout: float | None = None) -> bool:
        """Finish the outstanding jobs, detach, and end all threads.

        Returns:
            True if the daemon has unmapped this rank's memory, or its process has ended: the memory may be freed. False
            if neither was certain after ``timeout`` seconds: a load may still write to it. See `unmapped`.
        """
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout)
        self._closed = True
        self._jobs.close(deadline - time.monotonic())
        self._supervisor.close(max(0.0, deadline - time.monotonic()))
        self._operator.close()
        # A session that ended behind its fence before `close` did not wait for it.
        return self.unmapped(deadline - time.monotonic())

    def unmapped(self, timeout: float = 0.0) -> bool:
        """After `close`: whether the daemon has unmapped this rank's memory, or its processes have ended.

        Args:
            timeout: how long to wait for their end, in seconds.
        """
        lost = self._supervisor.lost_daemon
        return lost is None or lost.gone(timeout)

    def _call(self, method: str, request: object) -> Any:
        return self._operator.call(method, request)
