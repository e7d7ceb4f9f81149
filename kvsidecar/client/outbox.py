"""What is to be said next on one Attach stream. Does no I/O; with the client's lock held."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from kvsidecar.client.ledger import Job, Ledger, Phase
from kvsidecar.client.messages import MAX_REQUEST_BYTES, fill_job
from kvsidecar.client.results import JobDone
from kvsidecar.errors import Refusal
from kvsidecar.types import Outcome
from kvsidecar.v1 import sidecar_pb2 as pb


class Outbox:
    """Jobs and other messages in the order in which they are sent.

    A job becomes a message when it is its turn, and not before: one that has ended by then, here, is never sent, since
    its blocks may be another request's.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, ledger: Ledger, clock: Callable[[], float] = time.monotonic) -> None:
        self._ledger = ledger
        self._clock = clock
        self.waiting: deque[Job | pb.AttachRequest | None] = deque()
        """None is the end."""
        self.is_finished = False
        """The end was taken: nothing comes behind it."""
        self._takes_more = True

    def put(self, *items: Job | pb.AttachRequest) -> None:
        """Behind what was put before; nothing if that was the end."""
        if self._takes_more:
            self.waiting += items

    def finish(self) -> None:
        """Nothing more is said."""
        if self._takes_more:
            self._takes_more = False
            self.waiting.append(None)

    def close(self) -> None:
        """Nobody listens any more: what waits is never said."""
        self._takes_more = False
        self.waiting.clear()

    def take(self, message: pb.AttachRequest) -> bool:
        """Make the next one into a message: the daemon will hear of it. False if there is nothing to say: it is the
        end, or a job that has ended or ends here."""
        item = self.waiting.popleft()
        if isinstance(item, Job):
            return self._take_job(item, message)
        if item is None:
            self.is_finished = True
            return False
        message.MergeFrom(item)
        return True

    def _take_job(self, job: Job, message: pb.AttachRequest) -> bool:
        if not self._ledger.is_outstanding(job.number):
            return False
        reason, text = Refusal.INVALID_REQUEST, ""
        now = self._clock()
        try:
            if job.deadline is not None and now >= job.deadline:
                reason = Refusal.DEADLINE
            elif (size := fill_job(job, message, now)) > MAX_REQUEST_BYTES:
                text = f"a message of {size} bytes is over {MAX_REQUEST_BYTES}: make smaller jobs"
            else:
                job.phase = Phase.SENT
                return True
        except (TypeError, ValueError, OverflowError) as error:
            text = f"not blocks: {error}"
        self._ledger.finish(JobDone(job.number, Outcome.DECLINED, reason, text))
        return False
