"""The Attach stream of a watcher, which is sent what the pool holds. Independent of the transport."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from kvsidecar.core.changes import Change, Update
from kvsidecar.core.peer import Peer
from kvsidecar.core.quota import Quota
from kvsidecar.core.readiness import DaemonReadiness
from kvsidecar.core.watches import UpdateReceiver, Watches
from kvsidecar.errors import InvalidRequest, KVSidecarError
from kvsidecar.server import convert
from kvsidecar.server.attach_stream import Send, forward_readiness
from kvsidecar.types import Namespace
from kvsidecar.v1 import sidecar_pb2 as pb

MAX_UNREAD_BYTES = 256 * 1024
"""A watcher with this many unread bytes is sent nothing more, and a snapshot later."""


@dataclass(eq=False)
class WatchStream(UpdateReceiver):
    """One stream, from the first message to `close`.

    Args:
        unread_bytes: returns the bytes sent but not yet read by the client.
        lost: ends the stream with an error.
        quota: limits the streams of one user.

    Raises:
        LimitExceeded: the user has too many.
    """

    peer: Peer
    namespace: Namespace
    reply: Send
    unread_bytes: Callable[[], int]
    lost: Callable[[KVSidecarError], object]
    quota: Quota
    watches: Watches
    readiness: DaemonReadiness
    on_close: Callable[[WatchStream], object] = lambda _: None
    _closed: bool = False
    _shared: ClassVar[tuple[tuple[Change, ...], pb.AttachReply] | None] = None
    """The last changes and their message: all watchers of a namespace are sent the same one, in turn."""

    def __post_init__(self) -> None:
        self.quota.take(self.peer.uid)

    def begin(self, registered: pb.Registered) -> None:
        self.reply(pb.AttachReply(registered=registered))
        self._stop_listening = forward_readiness(self.readiness, self.reply)
        self._watch = self.watches.begin(self.namespace, self)

    def close(self) -> None:
        """May be called more than once."""
        if not self._closed:
            self._closed = True
            self._stop_listening()
            self.watches.end(self._watch)
            self.quota.give_back(self.peer.uid)
            self.on_close(self)

    def handle(self, _message: pb.AttachRequest) -> None:
        raise InvalidRequest("a watcher sends nothing after its first message")

    def has_room(self) -> bool:
        return self.unread_bytes() < MAX_UNREAD_BYTES

    def send(self, update: Update) -> None:
        shared = WatchStream._shared
        if shared is None or shared[0] is not update.changes:
            shared = WatchStream._shared = update.changes, pb.AttachReply(residency=convert.residency_to(update))
        residency = shared[1].residency
        residency.sequence, residency.reset, residency.complete = update.sequence, update.reset, update.complete
        self.reply(shared[1])
