"""Leases that nobody waits for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

from kvsidecar.client.connection import Connection
from kvsidecar.client.messages import CarrierError
from kvsidecar.v1 import sidecar_pb2 as pb

_log = logging.getLogger("kvsidecar.client")


class PendingLease:
    """A lease that was asked for by `Client.lease`. Neither who asked nor who releases it waits for the daemon: it may
    be released before the daemon has answered, and one whose answer never comes ends by time.

    Args:
        connection: that it was asked on; None if it could not be asked for.
    """

    def __init__(self, connection: Connection | None) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        # Under the lock: with gRPC the answer comes in another thread.
        self._lease = 0
        self._released = False
        self._hits: Mapping[int, int] | None = None

    @property
    def asked(self) -> bool:
        """False: the daemon could not be asked for it at once, and there is none."""
        return self._connection is not None

    @property
    def hits(self) -> Mapping[int, int] | None:
        """By group, how many of the blocks it keeps, from the first; None: not known, or not yet."""
        return self._hits

    def release(self) -> None:
        """End it. Never waits, never raises."""
        if self._connection is None:
            return
        with self._lock:
            self._released = True
        self._connection.collect()
        self._end()

    def answered(self, answer: Any) -> None:
        """The daemon has answered, or refused it."""
        if isinstance(answer, CarrierError):
            _log.warning("the daemon gives no lease: %s", answer.text)
            return
        with self._lock:
            self._lease, self._hits = answer.lease, {each.group: each.hits for each in answer.groups}
        self._end()

    def _end(self) -> None:
        """If it is known and not needed any more."""
        with self._lock:
            if not self._released:
                return
            lease, self._lease = self._lease, 0
        if lease and self._connection is not None:
            request = pb.LaneRequest(release=pb.ReleaseRequest(lease=lease))
            self._connection.post(request, None)
