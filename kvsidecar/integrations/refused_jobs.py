"""Jobs that the daemon refused because of their content. Engine-independent."""

from __future__ import annotations

import logging

from kvsidecar.client import JobDone
from kvsidecar.errors import Refusal

UNFIT = frozenset(
    reason.value for reason in (Refusal.INVALID_REQUEST, Refusal.LIMIT, Refusal.DENIED, Refusal.UNIDENTIFIED)
)
"""Reasons that no retry removes: they would otherwise show as hits that never come."""


class UnfitJobs:
    """Logs the first refusal for each of these reasons, and decides which jobs to count.

    An integration never sends an invalid job knowingly: each is a defect of it.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._seen: set[str] = set()

    def note(self, done: JobDone) -> bool:
        """Whether this job was refused for one of the reasons."""
        if done.reason not in UNFIT:
            return False
        if done.reason not in self._seen:
            self._seen.add(done.reason)
            defect = (
                "; this is a defect of kvsidecar: please report it" if done.reason == Refusal.INVALID_REQUEST else ""
            )
            self._log.error("kvsidecar: the daemon refuses a job (%s): %s%s", done.reason, done.error, defect)
        return True
