"""One Attach stream: one rank registered with one run of the daemon."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvsidecar.client.flushing import Flush
from kvsidecar.client.ledger import Job, Ledger, Phase
from kvsidecar.client.messages import CarrierError, job_done_from, milliseconds, readiness_from
from kvsidecar.client.ordering import RingSlots
from kvsidecar.client.outbox import Outbox
from kvsidecar.client.results import EVENT_FAILED, JobDone, Readiness
from kvsidecar.client.transport import Transport
from kvsidecar.client.waiting import Monitor
from kvsidecar.types import Outcome, State
from kvsidecar.v1 import sidecar_pb2 as pb

_log = logging.getLogger("kvsidecar.client")

_IDLE = {idle: (pb.AttachRequest(idle=pb.Idle(idle=idle)),) for idle in (False, True)}
"""Nobody changes the messages."""


class Session:
    """Says what the engine asks for, takes what the daemon answers, until the stream ends, however it ends.

    Its fields belong to the client's lock.

    Args:
        register: the first message.
        ring_size: entries of the event ring in it.
        wake: called when the stream has ended.
    """

    def __init__(
        self,
        transport: Transport,
        register: pb.Register,
        ledger: Ledger,
        monitor: Monitor,
        *,
        ring_size: int,
        wake: Callable[[], None],
    ) -> None:
        self._ledger = ledger
        self._monitor = monitor
        self._wake = wake
        self.id = 0
        """The session's number, given by the daemon; 0 until it has answered."""
        self.epoch = 0
        self.readiness = Readiness(State.STARTING, reason="not attached")
        self.device_order = False
        self.device_order_refused = ""
        self.ended = False
        self.copy_may_run = False
        """A copy of a job that the daemon has given up: only the end of its process proves that it is over."""
        self.unsaid: tuple[pb.AttachRequest, ...] = ()
        """Goes with the next job, or by `say`."""
        self._flushes: dict[int, tuple[Flush, list[int]]] = {}
        """Those that the daemon was asked for, and of which jobs."""
        self._ring = RingSlots(ring_size)
        self._reading = threading.Lock()
        """Held from the receipt of answers until they are taken, so that they are taken in order. Comes before the
        client's lock."""
        self._outbox = Outbox(ledger)
        self._stream = transport.open_stream(self._outbox, monitor)
        with monitor.lock:
            self._put(pb.AttachRequest(register=register))
        self._thread = threading.Thread(target=self._read, name="kvsidecar-read", daemon=True)
        self._thread.start()

    @property
    def error(self) -> CarrierError | None:
        """Why it has ended; None if the daemon ended it in order."""
        return self._stream.error

    @property
    def quiesced(self) -> bool:
        """The daemon has said that the session is over: no copy of it runs, and the memory is unmapped."""
        return self._stream.quiesced and not self.copy_may_run

    # -- up ----------------------------------------------------------------------------------------------------------

    def expects(self, job: Job) -> bool:
        """Whether a job has not ended."""
        with self._monitor.lock:
            return self._ledger.is_outstanding(job.number)

    def send(self, job: Job) -> None:
        """Send a job, unless it has ended by now, behind what was sent before."""
        with self._monitor.lock:
            if self._ledger.is_outstanding(job.number):
                job.phase = Phase.QUEUED
                unsaid, self.unsaid = self.unsaid, ()
                self._put(*unsaid, job)
                self._monitor.changed.notify_all()

    def fail(self, job: Job, error: str) -> None:
        """The event that a job comes after could not be recorded or waited for: it is never sent."""
        with self._monitor.changed:
            self._ledger.finish(JobDone(job.number, Outcome.FAILED, EVENT_FAILED, error))
            self._monitor.changed.notify_all()

    def flush(self, flush: Flush, jobs: list[int], seconds: float) -> None:
        """Ask when these jobs no longer touch their blocks, which ``flush`` is told. With the lock held."""
        number = self._ledger.number()
        self._flushes[number] = flush, jobs
        mode = pb.Flush.MODE_CANCEL if flush.cancel else pb.Flush.MODE_FINISH
        timeout_ms = max(1, milliseconds("timeout", seconds))
        self._put(pb.AttachRequest(flush=pb.Flush(flush=number, jobs=jobs, timeout_ms=timeout_ms, mode=mode)))

    def forget(self, flush: Flush) -> None:
        """Nobody waits for this one any more. With the lock held."""
        self._flushes = {number: each for number, each in self._flushes.items() if each[0] is not flush}

    def set_idle(self, idle: bool) -> None:
        """Tell whether the GPU has nothing to do, with the next job or by `say`. With the lock held."""
        self.unsaid = _IDLE[idle]

    def say(self) -> None:
        """Send what waits for a job. With the lock held."""
        unsaid, self.unsaid = self.unsaid, ()
        self._put(*unsaid)

    def take_event(self, job: Job) -> int | None:
        """A ring entry to record for this store; None if all are in use. With the lock held."""
        index = self._ring.take(job.number) if self.device_order else None
        if index is not None:
            job.ring, job.event = self._ring, index + 1
        return index

    def half_close(self) -> None:
        """Nothing more is sent. The daemon answers what it owes, unmaps the memory and ends the stream."""
        with self._monitor.lock:
            self._outbox.finish()
            self._stream.pump()

    def cancel(self) -> None:
        """Break the stream off. The daemon, if it lives, sees that and ends the session."""
        self._stream.cancel()

    def join(self) -> None:
        """Wait for the reader: what the daemon said before the end has been taken."""
        self._thread.join()

    def _put(self, *items: Job | pb.AttachRequest) -> None:
        self._outbox.put(*items)
        self._stream.pump()

    # -- down --------------------------------------------------------------------------------------------------------

    def read_now(self) -> None:
        """Take what has arrived, in this thread: who waits for an answer need not wait for another thread to be woken.
        Never waits. Without the lock held."""
        if self._reading.acquire(blocking=False):
            try:
                for reply in self._stream.receive(helping=True):
                    self._take(reply)
                if self._stream.ended:
                    self._stream.wake_reader()
            finally:
                self._reading.release()

    def wait_readable(self, seconds: float) -> bool:
        """As `AttachStream.wait_readable`."""
        return not self.ended and self._stream.wait_readable(seconds)

    def _read(self) -> None:
        try:
            while not self._stream.ended:
                self._stream.wait()
                with self._reading:
                    for reply in self._stream.receive():
                        self._take(reply)
        finally:
            self._stream.close()
            with self._reading, self._monitor.changed:  # who has read the end may still be taking what came before it
                self.ended = True
                self._outbox.close()
                self._monitor.changed.notify_all()
            self._wake()

    def _take(self, reply: pb.AttachReply) -> None:
        with self._monitor.lock:
            match reply.WhichOneof("message"):
                case "done" if reply.done.unsettled:
                    _log.error(
                        "job %d has failed and its copy may still run: it ends when the daemon's process has ended: %s",
                        reply.done.job,
                        reply.done.error,
                    )
                    self.copy_may_run |= self._ledger.hold(job_done_from(reply.done))
                case "done":
                    self._ledger.finish(job_done_from(reply.done))
                case "registered":
                    self.epoch, self.id = reply.registered.epoch, reply.registered.session
                    self.readiness = readiness_from(reply.registered.readiness)
                    self.device_order = reply.registered.device_order
                    self.device_order_refused = reply.registered.device_order_refused
                case "wait_issued":
                    self._ring.issued(reply.wait_issued.event - 1)
                    return
                case "flushed":
                    if reply.flushed.flush in self._flushes:
                        flush, jobs = self._flushes.pop(reply.flushed.flush)
                        flush.answered(jobs, reply.flushed.pending)
                case "readiness":
                    self.readiness = readiness_from(reply.readiness)
            self._monitor.changed.notify_all()
