"""Leases that are kept and given up without waiting for the daemon."""

from __future__ import annotations

import logging
from typing import Any

from kvsidecar.client.messages import UNANSWERED, CarrierError, milliseconds
from kvsidecar.client.transport import Transport
from kvsidecar.v1 import sidecar_pb2 as pb

_log = logging.getLogger("kvsidecar.client")


class KeptLease:
    """A lease that `Client.keep` asked to be renewed. Neither who asked nor who releases it waits for the daemon; one
    whose renewal or release is lost ends by time.

    Args:
        transport: that it was asked on; None if it could not be asked for.
        lease: its id.
    """

    def __init__(self, transport: Transport | None, lease: int = 0) -> None:
        self._transport, self._lease = transport, lease
        self._kept: bool | None = None

    @property
    def asked(self) -> bool:
        """False: the daemon could not be asked at once, and the lease ends when it would have ended."""
        return self._transport is not None

    @property
    def kept(self) -> bool | None:
        """False: it had ended before; None: not known, or not yet."""
        return self._kept

    def release(self) -> None:
        """End it. Never waits, never raises."""
        transport, self._transport = self._transport, None
        if transport is None:
            return
        transport.collect()
        transport.post(release_request(self._lease), None)

    def answered(self, answer: Any) -> None:
        """The daemon has answered, has refused it, or is lost."""
        if isinstance(answer, CarrierError):
            if answer.code in UNANSWERED:
                return  # it ends by time
            _log.warning("the daemon does not renew a lease: %s", answer.text)
        else:
            self._kept = answer.renewed


def release_request(lease: int) -> pb.LocalRequest:
    return pb.LocalRequest(release=pb.ReleaseRequest(lease=lease))


def renew_request(lease: int, seconds: float) -> pb.LocalRequest:
    """Raises ValueError for what is no number of seconds."""
    return pb.LocalRequest(renew=pb.RenewRequest(lease=lease, lease_ms=milliseconds("lease_seconds", seconds)))
