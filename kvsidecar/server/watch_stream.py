"""The Attach stream of a watcher, which is told what the pool holds. Independent of the transport."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import ClassVar

from kvsidecar import __version__
from kvsidecar.core.changes import Change, Update
from kvsidecar.core.peer import Peer
from kvsidecar.core.quota import Quota
from kvsidecar.core.readiness import DaemonReadiness, Snapshot
from kvsidecar.core.residency import Receiver, Watches
from kvsidecar.core.sessions import ID_BITS
from kvsidecar.errors import InvalidRequest, KVSidecarError
from kvsidecar.server import convert
from kvsidecar.server.attach_stream import Send
from kvsidecar.types import Namespace
from kvsidecar.v1 import sidecar_pb2 as pb

MAX_UNREAD_BYTES = 256 * 1024
"""A watcher that has not read so much is sent nothing, and a snapshot later."""


class WatchStream(Receiver):
    """From the first message to `close`.

    Args:
        unread_bytes: of what was sent, the bytes that the client has not taken yet.
        on_lost: ends the stream with an error.
        quota: of the streams of one user.

    Raises:
        LimitExceeded: the user has too many.
    """

    _shared: ClassVar[tuple[tuple[Change, ...], pb.AttachReply] | None] = None
    """The last changes and their message: all watchers of a namespace are sent the same, one after the other."""

    def __init__(
        self,
        peer: Peer,
        namespace: Namespace,
        send: Send,
        unread_bytes: Callable[[], int],
        on_lost: Callable[[KVSidecarError], object],
        quota: Quota,
        watches: Watches,
        readiness: DaemonReadiness,
    ) -> None:
        self.peer, self.namespace, self.lost = peer, namespace, on_lost
        self._send, self._unread_bytes = send, unread_bytes
        self._quota, self._watches, self._readiness = quota, watches, readiness
        self.on_close: Callable[[WatchStream], object] = lambda _: None
        self._closed = False
        quota.take(peer.uid)

    def begin(self, epoch: int) -> None:
        registered = pb.Registered(
            epoch=epoch,
            session=secrets.randbits(ID_BITS) | 1,  # no rank's: it has nothing that could outlive the stream
            readiness=convert.readiness_to(self._readiness.now),
            version=__version__,
        )
        self._send(pb.AttachReply(registered=registered))
        self._stop_listening = self._readiness.listen(self._send_readiness)
        self._watch = self._watches.begin(self.namespace, self)

    def close(self) -> None:
        """May be called more than once."""
        if not self._closed:
            self._closed = True
            self._stop_listening()
            self._watches.end(self._watch)
            self._quota.give_back(self.peer.uid)
            self.on_close(self)

    def handle(self, _message: pb.AttachRequest) -> None:
        raise InvalidRequest("a watcher sends nothing after its first message")

    def has_room(self) -> bool:
        return self._unread_bytes() < MAX_UNREAD_BYTES

    def send(self, update: Update) -> None:
        shared = WatchStream._shared
        if shared is None or shared[0] is not update.changes:
            shared = WatchStream._shared = update.changes, pb.AttachReply(residency=convert.residency_to(update))
        residency = shared[1].residency
        residency.sequence, residency.reset, residency.complete = update.sequence, update.reset, update.complete
        self._send(shared[1])

    def _send_readiness(self, snapshot: Snapshot) -> None:
        self._send(pb.AttachReply(readiness=convert.readiness_to(snapshot)))
