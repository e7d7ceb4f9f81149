"""The far end of a connection of the fast lane, in the test's own hands."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from kvsidecar.client.link import Link
from kvsidecar.protocol.wire import FRAME_LENGTH
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.harness import SECONDS


class FakeLink:
    """A `Link` to the test itself."""

    def __init__(self) -> None:
        self.connection, self.far = socket.socketpair()
        self.far.settimeout(SECONDS)

    shut_down = Link.shut_down

    def close(self) -> None:
        self.connection.close()

    def requests(self) -> Iterator[pb.LaneRequest]:
        with self.far.makefile("rb") as arriving:
            while head := arriving.read(FRAME_LENGTH.size):
                yield pb.LaneRequest.FromString(arriving.read(*FRAME_LENGTH.unpack(head)))


def found(hits: int) -> pb.LookupReply:
    return pb.LookupReply(ready=True, groups=[pb.GroupHits(group=0, hits=hits)])


def lookup_reply(call: int, hits: int) -> bytes:
    payload = pb.LaneReply(call=call, lookup=found(hits)).SerializeToString()
    return FRAME_LENGTH.pack(len(payload)) + payload
