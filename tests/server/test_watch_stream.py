"""Who may watch, and for how long."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvsidecar.core import sessions
from kvsidecar.core.access import Caller, Grant, Identity
from kvsidecar.core.metrics import Metrics
from kvsidecar.core.peer import Peer
from kvsidecar.core.quota import Quota
from kvsidecar.core.readiness import DaemonReadiness
from kvsidecar.core.watches import Watches
from kvsidecar.errors import KVSidecarError, LimitExceeded, NotPermitted, ProtocolMismatch, UnknownPeer
from kvsidecar.protocol.wire import namespace_to_wire
from kvsidecar.server.handler import Handler
from kvsidecar.server.watch_stream import WatchStream
from kvsidecar.types import PROTOCOL
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.cache.support import namespace, new_cache

EVERYTHING = Grant(("*",))


class Daemon:
    """A handler with one connected client."""

    def __init__(self) -> None:
        self.peer = Peer(b"t", 1, 7, 7, "", (), Caller(Identity(7, frozenset()), EVERYTHING, b"t"))
        self.watches = Watches(new_cache(4), Metrics("host"), lambda *_: None, lambda: True)
        instances = SimpleNamespace(peer=self._find, watches_of=Quota(2, "watches"))
        nothing: Any = None
        self.handler = Handler(
            epoch=5,
            instances=instances,  # type: ignore[arg-type]
            runner=nothing,
            lookups=nothing,
            readiness=DaemonReadiness(1),
            metrics=nothing,
            tasks=nothing,
            make_status=nothing,
            watches=self.watches,
            steps=nothing,
        )
        self.sent: list[pb.AttachReply] = []
        self.lost: list[KVSidecarError] = []

    def _find(self, token: bytes) -> Peer:
        if token != b"t":
            raise UnknownPeer("who?")
        return self.peer

    def watch(self, name: str = "model", *, token: bytes = b"t", protocol: int = PROTOCOL) -> WatchStream:
        first = pb.Watch(protocol=protocol, token=token, namespace=namespace_to_wire(namespace(name)))
        return self.handler.watch(first, self.sent.append, lambda: 0, self.lost.append)

    def grant(self, *patterns: str) -> None:
        self.peer.caller = Caller(self.peer.caller.identity, Grant(patterns), b"t")


def test_a_watcher_is_answered_first_and_leaves_nothing_behind() -> None:
    daemon = Daemon()
    stream = daemon.watch()
    assert (daemon.sent[0].registered.epoch, len(daemon.watches)) == (5, 1)
    assert daemon.sent[0].registered.session
    for _ in range(2):
        stream.close()
    assert len(daemon.watches) == 0
    daemon.handler.end_watches(daemon.peer)
    assert daemon.lost == []


@pytest.mark.parametrize(
    ("how", "error"), [({"token": b"x"}, UnknownPeer), ({"protocol": PROTOCOL + 1}, ProtocolMismatch)]
)
def test_a_watcher_is_refused_like_a_rank(how: dict[str, Any], error: type[Exception]) -> None:
    daemon = Daemon()
    with pytest.raises(error):
        daemon.watch(**how)
    assert daemon.sent == []


def test_the_namespace_must_be_granted_and_stay_so() -> None:
    daemon = Daemon()
    daemon.grant("model")
    with pytest.raises(NotPermitted):
        daemon.watch("another")
    daemon.watch()
    daemon.handler.permit_watches()
    assert daemon.lost == []
    daemon.grant("another")
    daemon.handler.permit_watches()
    assert [type(each) for each in daemon.lost] == [NotPermitted]


def test_a_user_has_so_many_and_gives_them_back() -> None:
    daemon = Daemon()
    first, _ = daemon.watch(), daemon.watch()
    with pytest.raises(LimitExceeded):
        daemon.watch()
    first.close()
    daemon.watch()
    assert len(daemon.watches) == 2
    assert sessions.MAX_WATCHES >= 8, "fewer than the engines of a node"


def test_the_end_of_the_process_ends_its_watches() -> None:
    daemon = Daemon()
    daemon.watch()
    daemon.handler.end_watches(daemon.peer)
    assert [type(each) for each in daemon.lost] == [UnknownPeer]
