"""One Attach stream: one rank registered with one run of the daemon."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvsidecar.client.inbox import Inbox
from kvsidecar.client.ledger import Flush, Ledger, Phase, SubmittedJob
from kvsidecar.client.messages import TransportError, job_done_from, to_milliseconds
from kvsidecar.client.ordering import RingSlots
from kvsidecar.client.send_queue import SendQueue
from kvsidecar.client.transport import Transport
from kvsidecar.client.types import EVENT_FAILED, JobDone
from kvsidecar.client.waiting import Monitor
from kvsidecar.protocol.wire import readiness_from_wire
from kvsidecar.support.units import format_size
from kvsidecar.types import Outcome, Readiness, State
from kvsidecar.v1 import sidecar_pb2 as pb

_log = logging.getLogger("kvsidecar.client")

_IDLE = {idle: (pb.AttachRequest(idle=pb.Idle(idle=idle)),) for idle in (False, True)}
"""Shared, and never modified."""


class AttachSession:
    """Sends jobs and handles the daemon's replies until the stream ends.

    The client's lock guards its fields.

    Args:
        register: the first message.
        ring_size: entries of the event ring in it.
        wake: called when the stream has ended.
        inbox: where a watcher's changes go.
        tell: logs a text with its arguments at a level.
        greeting: what to log when the daemon has accepted the registration of a rank.
    """

    def __init__(
        self,
        transport: Transport,
        register: pb.AttachRequest,
        ledger: Ledger,
        monitor: Monitor,
        *,
        ring_size: int,
        wake: Callable[[], None],
        inbox: Inbox | None = None,
        tell: Callable[..., None] = _log.log,
        greeting: str = "attached",
    ) -> None:
        self._inbox, self._tell, self._greeting = inbox, tell, greeting
        self._ending = False
        """Whether to receive even what a watcher has no room for."""
        self._ledger = ledger
        self._monitor = monitor
        self._wake = wake
        self.id = 0
        """The daemon's number of the session; 0 until it has answered."""
        self.epoch = 0
        self.readiness = Readiness(State.STARTING, reason="not attached")
        self.device_order = False
        self.device_order_refused = ""
        self.ended = False
        self.unsent: tuple[pb.AttachRequest, ...] = ()
        """Sent with the next job, or by `send_unsent`."""
        self._flushes: dict[int, tuple[Flush, list[int]]] = {}
        """Flushes that the daemon has not answered, by number, and the jobs that each request named."""
        self._ring = RingSlots(ring_size, ledger.is_outstanding)
        self._receive_lock = threading.Lock()
        """Held while replies are received and handled, which keeps them in order. Taken before the client's lock."""
        self._send_queue = SendQueue(ledger)
        self._stream = transport.open_stream(self._send_queue, monitor)
        with monitor.lock:
            self._put(register)
        self._thread = threading.Thread(target=self._read, name="kvsidecar-read", daemon=True)
        self._thread.start()

    @property
    def error(self) -> TransportError | None:
        """Why the stream has ended; None if the daemon ended it in order."""
        return self._stream.error

    @property
    def quiesced(self) -> bool:
        """See `DaemonStream.quiesced`. A watcher has neither copies nor memory."""
        return self._stream.quiesced or self._inbox is not None

    # -- sending ------------------------------------------------------------------------------------------------------

    def send(self, job: SubmittedJob) -> None:
        """Queue a job, unless it has ended by now."""
        with self._monitor.lock:
            if self._ledger.advance(job, Phase.QUEUED):
                unsent, self.unsent = self.unsent, ()
                self._put(*unsent, job)
                self._monitor.changed.notify_all()

    def fail(self, job: SubmittedJob, error: str) -> None:
        """End a job because its event could not be recorded or waited for: it is never sent."""
        with self._monitor.changed:
            self._ledger.finish(JobDone(job.number, Outcome.FAILED, EVENT_FAILED, error))
            self._monitor.changed.notify_all()

    def flush(self, flush: Flush, jobs: list[int], seconds: float) -> None:
        """Request an answer when these jobs no longer access their blocks. With the lock held."""
        number = self._ledger.next_number()
        self._flushes[number] = flush, jobs
        mode = pb.Flush.MODE_CANCEL if flush.cancel else pb.Flush.MODE_FINISH
        timeout_ms = max(1, to_milliseconds("timeout", seconds))
        self._put(pb.AttachRequest(flush=pb.Flush(flush=number, jobs=jobs, timeout_ms=timeout_ms, mode=mode)))

    def forget_flush(self, flush: Flush) -> None:
        """Ignore further answers to a flush. With the lock held."""
        self._flushes = {number: each for number, each in self._flushes.items() if each[0] is not flush}

    def set_idle(self, idle: bool) -> None:
        """Report whether the GPU is idle, with the next job or by `send_unsent`. With the lock held."""
        self.unsent = _IDLE[idle]

    def send_unsent(self) -> None:
        """Send what waits for the next job. With the lock held."""
        unsent, self.unsent = self.unsent, ()
        self._put(*unsent)

    def take_event(self, job: SubmittedJob) -> int | None:
        """Reserve a ring entry for this store; None if all are in use. With the lock held."""
        index = self._ring.take(job.number) if self.device_order else None
        if index is not None:
            job.event = index + 1
        return index

    def half_close(self) -> None:
        """Send nothing more. The daemon finishes the jobs, unmaps the memory and ends the stream."""
        self._end_waiting()
        with self._monitor.lock:
            self._send_queue.finish()
            self._stream.pump()

    def cancel(self) -> None:
        """See `DaemonStream.cancel`."""
        self._end_waiting()
        self._stream.cancel()

    def failed(self, what: str) -> None:
        """Break the session off because of an unexpected error that is being handled. As after any other end, the
        supervisor finds out when the jobs are over, and attaches again."""
        _log.exception("kvsidecar: %s because of an unexpected error: the session with the daemon ends", what)
        self.cancel()

    def _end_waiting(self) -> None:
        self._ending = True
        if self._inbox is not None:
            self._inbox.wake()

    def join(self) -> None:
        """Wait for the reading thread: every reply before the end was handled."""
        self._thread.join()

    def _put(self, *items: SubmittedJob | pb.AttachRequest) -> None:
        self._send_queue.put(*items)
        self._stream.pump()

    # -- receiving ---------------------------------------------------------------------------------------------------

    def read_now(self) -> None:
        """Handle what has arrived in this thread: that saves waking another. Never waits. Without the lock held."""
        if self._receive_lock.acquire(blocking=False):
            try:
                for reply in self._stream.receive(helping=True):
                    self._handle(reply)
                if self._stream.ended:
                    self._stream.wake_reader()
            except Exception:  # noqa: BLE001 - an engine's step must not end with it
                self.failed("a reply was not handled")
            finally:
                self._receive_lock.release()

    def wait_readable(self, seconds: float) -> bool:
        """See `DaemonStream.wait_readable`."""
        return not self.ended and self._stream.wait_readable(seconds)

    def _read(self) -> None:
        try:
            while not self._stream.ended:
                if self._inbox is not None:
                    self._inbox.wait_for_room(lambda: self._ending)
                self._stream.wait()
                with self._receive_lock:
                    for reply in self._stream.receive():
                        self._handle(reply)
        except Exception:  # noqa: BLE001 - the thread ends with its session, and the reason is logged
            self.failed("replies were not handled")
        finally:
            self._stream.close()
            # With the first lock: who received the end may still be handling the replies before it.
            with self._receive_lock, self._monitor.changed:
                self.ended = True
                self._send_queue.close()
                self._monitor.changed.notify_all()
            if self._inbox is not None:
                self._inbox.lost()
            self._wake()

    def _tell_readiness(self, registered: bool, before: State) -> None:
        now = self.readiness
        if registered:
            state = "" if now.state is State.READY else f", which is {now.state.value}: no offload until it is ready"
            self._tell(logging.INFO, "kvsidecar: %s (epoch %x)%s", self._greeting, self.epoch, state)
        if now.state is before:
            return
        if now.state is State.FAILED:
            self._tell(logging.WARNING, "kvsidecar: the daemon has failed and stores nothing: %s", now.reason)
        elif now.state is State.DRAINING and not registered:
            self._tell(logging.INFO, "kvsidecar: the daemon is draining, no offload until it is ready: %s", now.reason)
        elif now.state is State.READY:
            size = format_size(now.pool_bytes)
            self._tell(logging.INFO, "kvsidecar: the daemon is ready: a pool of %s", size)

    def _handle(self, reply: pb.AttachReply) -> None:
        if self._inbox is not None and reply.HasField("residency"):
            self._inbox.put(reply.residency)
            return
        before = self.readiness.state
        with self._monitor.lock:
            match reply.WhichOneof("message"):
                case "done":
                    self._ledger.finish(job_done_from(reply.done))
                case "registered":
                    self.epoch, self.id = reply.registered.epoch, reply.registered.session
                    self.readiness = readiness_from_wire(reply.registered.readiness)
                    self.device_order = reply.registered.device_order
                    self.device_order_refused = reply.registered.device_order_refused
                case "wait_issued":
                    self._ring.issued(reply.wait_issued.event - 1)
                    return
                case "flushed":
                    if reply.flushed.flush in self._flushes:
                        flush, jobs = self._flushes.pop(reply.flushed.flush)
                        flush.on_answer(jobs, reply.flushed.pending)
                case "readiness":
                    self.readiness = readiness_from_wire(reply.readiness)
            self._monitor.changed.notify_all()
        if self._inbox is None:
            self._tell_readiness(reply.HasField("registered"), before)
