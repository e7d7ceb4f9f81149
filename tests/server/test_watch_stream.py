"""Who may watch, and for how long."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Generator
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
from kvsidecar.support.loop_time import LoopTime
from kvsidecar.support.steps import Steps
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


STEPS = 20


async def test_one_step_of_one_status_in_each_turn_of_the_loop() -> None:
    iteration, steps = 0, Counter[int]()

    def tick() -> None:
        nonlocal iteration
        iteration += 1
        asyncio.get_running_loop().call_soon(tick)

    def status(_caller: Caller, _page: pb.StatusPage | None) -> Generator[None, None, pb.StatusReply]:
        for _ in range(STEPS):
            steps[iteration] += 1
            yield
        return pb.StatusReply(epoch=7)

    nothing: Any = None
    handler = Handler(
        epoch=7,
        instances=nothing,
        runner=nothing,
        lookups=nothing,
        readiness=nothing,
        metrics=nothing,
        tasks=nothing,
        make_status=status,
        watches=nothing,
        steps=Steps(LoopTime(seconds=0.0)),
    )
    tick()
    admin = Caller(None, Grant(("*",), admin=True))
    replies = await asyncio.gather(*(handler.status(pb.StatusRequest(), admin) for _ in range(5)))
    assert [reply.epoch for reply in replies] == [7] * 5
    assert steps.total() == 5 * STEPS
    assert max(steps.values()) == 1, "several steps in one iteration of the loop"
