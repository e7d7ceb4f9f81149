"""One Attach stream: one rank registered with one run of the daemon."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from kvsidecar.client.connection import Connection
from kvsidecar.client.jobs import Job, Jobs, Phase
from kvsidecar.client.messages import MAX_REQUEST_BYTES, CarrierError, job_done_from, milliseconds, readiness_from
from kvsidecar.client.ordering import RingSlots
from kvsidecar.client.results import JobDone, Readiness
from kvsidecar.types import Direction, Outcome, Refusal, State
from kvsidecar.v1 import sidecar_pb2 as pb

_log = logging.getLogger("kvsidecar.client")

_IDLE = {idle: (pb.AttachRequest(idle=pb.Idle(idle=idle)),) for idle in (False, True)}
"""Nobody changes the messages."""


class Session:
    """Writes what the engine asks for, reads what the daemon answers, until the stream ends, however it ends.

    Args:
        register: the first message.
        ring_size: entries of the event ring in it.
        wake: called when the stream has ended.
    """

    def __init__(
        self, connection: Connection, register: pb.Register, jobs: Jobs, *, ring_size: int, wake: Callable[[], None]
    ) -> None:
        self._jobs = jobs
        self._wake = wake
        # All below belong to jobs.changed, unless said otherwise.
        self.id = 0
        """Of the daemon; 0 until it has answered."""
        self.epoch = 0
        self.readiness = Readiness(State.STARTING, reason="not attached")
        self.device_order = False
        self.device_order_refused = ""
        self.ended = False
        self.error: CarrierError | None = None
        """Why it has ended; None if the daemon ended it in order."""
        self.unsettled = False
        """A copy of a job that the daemon has given up may still run: only the end of its process ends this session."""
        self.flushed: dict[int, frozenset[int] | None] = {}
        """Flushes that somebody waits for: which of their jobs were still running, or None until that is said."""
        self.unsaid: tuple[pb.AttachRequest, ...] = ()
        """Goes with the next job, or by `say`."""
        self._ring = RingSlots(ring_size)
        self._stream = connection.open_stream(self._fill, self._take, jobs.lock)
        self._stream.put(pb.AttachRequest(register=register))
        self._thread = threading.Thread(target=self._read, name="kvsidecar-read", daemon=True)
        self._thread.start()

    @property
    def settled(self) -> bool:
        """The daemon has said that the session is over: no job of it runs, and the memory is unmapped."""
        return self._stream.settled

    # -- up ----------------------------------------------------------------------------------------------------------

    def send(self, job: Job) -> None:
        """Send a job, unless it has ended by now, behind what was sent before."""
        with self._jobs.lock:
            if self._jobs.is_outstanding(job.number):
                job.phase = Phase.QUEUED
                self._jobs.changed.notify_all()
                unsaid, self.unsaid = self.unsaid, ()
                self._stream.put(*unsaid, job)

    def flush(self, number: int, jobs: list[int], timeout: float, *, cancel: bool) -> None:
        """Send a Flush; the answer appears in `flushed`. The jobs were sent before. With the lock held."""
        self.flushed[number] = None
        mode = pb.Flush.MODE_CANCEL if cancel else pb.Flush.MODE_FINISH
        message = pb.Flush(flush=number, jobs=jobs, timeout_ms=max(1, milliseconds("timeout", timeout)), mode=mode)
        self._stream.put(pb.AttachRequest(flush=message))

    def forget_flush(self, number: int) -> None:
        """Nobody waits for this one any more. With the lock held."""
        self.flushed.pop(number, None)

    def set_idle(self, idle: bool) -> None:
        """Tell whether the GPU has nothing to do, with the next job or by `say`. With the lock held."""
        self.unsaid = _IDLE[idle]

    def say(self) -> None:
        """Send what waits for a job. With the lock held."""
        unsaid, self.unsaid = self.unsaid, ()
        self._stream.put(*unsaid)

    def take_event(self, job: Job) -> int | None:
        """A ring entry to record for this store; None if all are in use. With the lock held."""
        index = self._ring.take(job.number) if self.device_order else None
        if index is not None:
            job.event = index + 1
        return index

    def job_over(self, job: Job) -> None:
        """With the lock held: a job of this session has ended."""
        if job.event:
            self._ring.over(job.number, job.event - 1)

    def half_close(self) -> None:
        """Nothing more is sent. The daemon answers what it owes, unmaps the memory and ends the stream."""
        self._stream.finish()

    def cancel(self) -> None:
        """Break the stream off. The daemon, if it lives, sees that and ends the session."""
        self._stream.cancel()

    def join(self) -> None:
        """Wait for the reader: what the daemon said before the end has been taken."""
        self._thread.join()

    def _fill(self, item: Job | pb.AttachRequest, message: pb.AttachRequest) -> bool:
        """Make the message when it is its turn; False if there is nothing to send any more."""
        if not isinstance(item, Job):
            message.MergeFrom(item)
            return True
        job, now, refused = item, time.monotonic(), ""
        if job.deadline is not None and now >= job.deadline:
            self._jobs.finish(JobDone(job.number, Outcome.DECLINED, Refusal.DEADLINE))
            return False
        try:
            if (size := job.fill(message, now)) > MAX_REQUEST_BYTES:
                refused = f"a message of {size} bytes is over {MAX_REQUEST_BYTES}: make smaller jobs"
        except (TypeError, ValueError, OverflowError) as error:
            refused = f"not blocks: {error}"
        if refused:
            self._jobs.finish(JobDone(job.number, Outcome.DECLINED, Refusal.INVALID_REQUEST, refused))
            return False
        with self._jobs.lock:
            # From here on the daemon may have heard of it. Not before: a job that ended here must never be sent,
            # its blocks may be another request's by now.
            if not self._jobs.is_outstanding(job.number) or self.ended:
                return False
            job.phase = Phase.SENT
            return True

    # -- down --------------------------------------------------------------------------------------------------------

    def read_now(self) -> None:
        """Take what has arrived, in this thread; never waits. Without the lock held."""
        self._stream.read_now()

    def wait_readable(self, seconds: float) -> bool:
        """As `AttachCarrier.wait_readable`."""
        return not self.ended and self._stream.wait_readable(seconds)

    def _read(self) -> None:
        try:
            self._stream.read()
        except CarrierError as error:
            self.error = error
        finally:
            with self._jobs.changed:
                self.ended = True
                self._jobs.changed.notify_all()
            self._wake()

    def _take(self, reply: pb.AttachReply) -> None:
        changed = self._jobs.changed
        match reply.WhichOneof("message"):
            case "done" if reply.done.unsettled:
                _log.error(
                    "job %d has failed and its copy may still run: it ends when the daemon's process has ended: %s",
                    reply.done.job,
                    reply.done.error,
                )
                self._jobs.hold(job_done_from(reply.done))
            case "done":
                self._jobs.finish(job_done_from(reply.done))
            case "registered":
                with changed:
                    self.epoch, self.id = reply.registered.epoch, reply.registered.session
                    self.readiness = readiness_from(reply.registered.readiness)
                    self.device_order = reply.registered.device_order
                    self.device_order_refused = reply.registered.device_order_refused
                    changed.notify_all()
            case "wait_issued":
                with changed:
                    self._ring.issued(reply.wait_issued.event - 1)
            case "flushed":
                with changed:
                    if reply.flushed.flush in self.flushed:
                        self.flushed[reply.flushed.flush] = frozenset(reply.flushed.pending)
                    changed.notify_all()
            case "readiness":
                with changed:
                    self.readiness = readiness_from(reply.readiness)
                    changed.notify_all()


def flush(jobs: Jobs, numbers: Sequence[int], *, timeout: float, cancel: bool) -> frozenset[int]:
    """Wait at most ``timeout`` seconds; see `Client.flush`. Returns the jobs that still touch the device's blocks."""
    deadline = time.monotonic() + timeout
    wanted = frozenset(numbers)
    with jobs.changed:
        if cancel:
            # What waits or is queued here has not begun; the daemon is asked about the rest.
            jobs.cancel_unsent([job.number for job in _named(jobs, wanted)], Refusal.CANCELLED)
        busy = {job.number: job for job in _named(jobs, wanted)}
    asked: set[int] = set()
    flushes: dict[int, tuple[Session, frozenset[int]]] = {}

    def over() -> bool:
        for number, (session, of_flush) in flushes.items():
            pending = session.flushed.get(number)
            for each in of_flush - pending if pending is not None else ():
                if each in busy and busy[each].verdict is None:
                    del busy[each]
        for number in [number for number in busy if not jobs.is_outstanding(number)]:
            del busy[number]
        left = deadline - time.monotonic()
        if not busy or left <= 0:
            return True
        # Jobs that still wait for their events are asked about when they are on their way: the daemon cannot
        # hurry what it has not been told of, and the others need not wait for them.
        known = [job for job in busy.values() if job.number not in asked and job.phase is not Phase.WAITING]
        for session in dict.fromkeys(job.session for job in known):
            of_session = [job.number for job in known if job.session is session]
            number = jobs.number()
            flushes[number] = session, frozenset(of_session)
            session.flush(number, of_session, left, cancel=cancel)
            asked.update(of_session)
        return False

    try:
        jobs.wait_until(over, deadline)
        return frozenset(busy)
    finally:
        with jobs.changed:
            for number, (session, _) in flushes.items():
                session.forget_flush(number)


def _named(jobs: Jobs, wanted: frozenset[int]) -> list[Job]:
    return [job for job in jobs.outstanding() if (job.number in wanted if wanted else job.direction is Direction.STORE)]
