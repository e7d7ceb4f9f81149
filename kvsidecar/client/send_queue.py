"""The messages to send next on one Attach stream. Pure; used with the client's lock held."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from kvsidecar.client.ledger import Ledger, Phase, SubmittedJob
from kvsidecar.client.messages import MAX_REQUEST_BYTES, fill_job
from kvsidecar.client.types import JobDone
from kvsidecar.errors import Refusal
from kvsidecar.types import Outcome
from kvsidecar.v1 import sidecar_pb2 as pb


class SendQueue:
    """Jobs and other messages, first in, first out.

    A job becomes a message when it is taken, not before: a job that has ended by then is never sent, because its blocks
    may be another request's.
    """

    def __init__(self, ledger: Ledger, clock: Callable[[], float] = time.monotonic) -> None:
        self._ledger = ledger
        self._clock = clock
        self.waiting: deque[SubmittedJob | pb.AttachRequest | None] = deque()
        """None marks the end."""
        self.is_finished = False
        """Whether the end was taken."""
        self._open = True

    def put(self, *items: SubmittedJob | pb.AttachRequest) -> None:
        """Append items, unless the queue was finished or closed."""
        if self._open:
            self.waiting += items

    def finish(self) -> None:
        """Append the end."""
        if self._open:
            self._open = False
            self.waiting.append(None)

    def close(self) -> None:
        """Discard everything: the stream has ended."""
        self._open = False
        self.waiting.clear()

    def take(self, message: pb.AttachRequest) -> bool:
        """Write the next item into a message, which is then sent. False if there is none to send: the item is the end,
        or a job that has ended, or that ends here because it cannot be sent."""
        item = self.waiting.popleft()
        if isinstance(item, SubmittedJob):
            return self._take_job(item, message)
        if item is None:
            self.is_finished = True
            return False
        message.MergeFrom(item)
        return True

    def _take_job(self, job: SubmittedJob, message: pb.AttachRequest) -> bool:
        if not self._ledger.is_outstanding(job.number):
            return False
        reason, text = Refusal.INVALID_REQUEST, ""
        now = self._clock()
        try:
            if job.deadline is not None and now >= job.deadline:
                reason = Refusal.DEADLINE
            elif (size := fill_job(job, message, now)) > MAX_REQUEST_BYTES:
                text = f"the job has {size} bytes and at most {MAX_REQUEST_BYTES} are allowed: make smaller jobs"
            else:
                return self._ledger.advance(job, Phase.SENT)
        except (TypeError, ValueError, OverflowError) as error:
            text = f"the blocks are invalid: {error}"
        self._ledger.finish(JobDone(job.number, Outcome.DECLINED, reason, text))
        return False
