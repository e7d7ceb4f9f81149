"""One Attach stream: one rank registered with one run of the daemon."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator

import grpc

from kvsidecar.client.connection import Connection
from kvsidecar.client.jobs import Job, Jobs, Phase
from kvsidecar.client.messages import MAX_MESSAGE_BYTES, job_done_from, readiness_from
from kvsidecar.client.ordering import RingSlots
from kvsidecar.client.results import JobDone, Readiness
from kvsidecar.types import Outcome, Refusal, State
from kvsidecar.v1 import sidecar_pb2 as pb


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
        self.orderly = False
        """The daemon ended the stream itself, without an error: it does that after it has unmapped the memory."""
        self.error: grpc.RpcError | None = None
        self.flushed: dict[int, frozenset[int] | None] = {}
        """Flushes that somebody waits for: which of their jobs were still running, or None until that is said."""
        self._ring = RingSlots(ring_size)
        self._outgoing: queue.SimpleQueue[Job | pb.AttachRequest | None] = queue.SimpleQueue()
        self._outgoing.put(pb.AttachRequest(register=register))
        self._replies = connection.stub.Attach(self._requests())
        self._thread = threading.Thread(target=self._read, name="kvsidecar-read", daemon=True)
        self._thread.start()

    # -- up ----------------------------------------------------------------------------------------------------------

    def send(self, job: Job) -> None:
        """Queue a job, unless it has ended by now."""
        with self._jobs.changed:
            if self._jobs.is_outstanding(job.number):
                job.phase = Phase.QUEUED
                self._outgoing.put(job)
                self._jobs.changed.notify_all()

    def flush(self, number: int, jobs: list[int], timeout: float, *, cancel: bool) -> None:
        """Queue a Flush; the answer appears in `flushed`. The jobs were queued before. With the lock held."""
        self.flushed[number] = None
        mode = pb.Flush.MODE_CANCEL if cancel else pb.Flush.MODE_FINISH
        message = pb.Flush(flush=number, jobs=jobs, timeout_ms=max(1, int(timeout * 1000)), mode=mode)
        self._outgoing.put(pb.AttachRequest(flush=message))

    def forget_flush(self, number: int) -> None:
        """Nobody waits for this one any more. With the lock held."""
        self.flushed.pop(number, None)

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
        self._outgoing.put(None)

    def cancel(self) -> None:
        """Break the stream off. The daemon, if it lives, sees that and ends the session."""
        self._replies.cancel()

    def join(self) -> None:
        """Wait for the reader: what the daemon said before the end has been taken."""
        self._thread.join()

    def _requests(self) -> Iterator[pb.AttachRequest]:
        """Iterated in a thread of gRPC; its end half-closes the stream."""
        while (item := self._outgoing.get()) is not None:
            message = self._build(item) if isinstance(item, Job) else item
            if message is not None:
                yield message

    def _build(self, job: Job) -> pb.AttachRequest | None:
        """A job's message, here and not in `send`: the engine's thread pays for a queue's put, not for protobuf."""
        now = time.monotonic()
        refused, message = "", None
        if job.deadline is not None and now >= job.deadline:
            self._jobs.finish(JobDone(job.number, Outcome.DECLINED, Refusal.DEADLINE))
            return None
        try:
            message = job.message(now)
            if message.ByteSize() > MAX_MESSAGE_BYTES:
                refused = f"a message of {message.ByteSize()} bytes is over {MAX_MESSAGE_BYTES}: make smaller jobs"
        except (TypeError, ValueError) as error:
            refused = f"not blocks: {error}"
        if refused:
            self._jobs.finish(JobDone(job.number, Outcome.DECLINED, Refusal.INVALID_REQUEST, refused))
            return None
        with self._jobs.changed:
            # From here on the daemon may have heard of it. Not before: a job that ended here must never be sent,
            # its blocks may be another request's by now.
            if not self._jobs.is_outstanding(job.number) or self.ended:
                return None
            job.phase = Phase.SENT
            self._jobs.changed.notify_all()
            return message

    # -- down --------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        error: grpc.RpcError | None = None
        try:
            for reply in self._replies:
                self._take(reply)
        except grpc.RpcError as broken:
            error = broken
        with self._jobs.changed:
            self.ended = True
            self.error = error
            self.orderly = error is None
            self._jobs.changed.notify_all()
        # Ends the generator that gRPC iterates: nobody listens to it any more.
        self._outgoing.put(None)
        self._wake()

    def _take(self, reply: pb.AttachReply) -> None:
        changed = self._jobs.changed
        match reply.WhichOneof("message"):
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
