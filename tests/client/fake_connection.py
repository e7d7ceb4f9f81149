"""The far end of a connection of the local protocol, in the test's own hands."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from kvsidecar.client.connection import Connection
from kvsidecar.protocol.framing import frame
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.frames import frames
from tests.harness import SECONDS


class FakeConnection:
    """A `Connection` to the test itself."""

    def __init__(self) -> None:
        self.sock, self.far = socket.socketpair()
        self.far.settimeout(SECONDS)

    shut_down = Connection.shut_down

    def close(self) -> None:
        self.sock.close()

    def requests(self) -> Iterator[pb.LocalRequest]:
        return map(pb.LocalRequest.FromString, frames(self.far))


def found(hits: int) -> pb.LookupReply:
    return pb.LookupReply(ready=True, groups=[pb.GroupHits(group=0, hits=hits)])


def lookup_reply(call: int, hits: int) -> bytes:
    return frame(pb.LocalReply(call=call, lookup=found(hits)).SerializeToString())
