"""Looks up, as another user, over many connections of the local protocol, more than the daemon can answer. Takes the
directory of ``kvs.sock``."""

from __future__ import annotations

import itertools
import json
import select
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.attacks.support import become
from kvsidecar.protocol.framing import frame
from kvsidecar.protocol.wire import namespace_to_wire
from kvsidecar.types import PROTOCOL
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.harness import NAMESPACE, hashes

UID = 65533
CONNECTIONS = 32
HASHES = 1024


def flood(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(path)
    sock.sendall(frame(pb.Hello(protocol=PROTOCOL, client="flood").SerializeToString()))
    sock.setblocking(False)
    return sock


def lookup(packed: bytes, **fields: Any) -> bytes:
    """A request as it is sent."""
    groups = [pb.LookupGroup(group=0, hashes=packed)]
    wire = namespace_to_wire(NAMESPACE)
    message = pb.LookupRequest(namespace=wire, mode=pb.LookupRequest.MODE_PREFIX, groups=groups, **fields)
    return frame(pb.LocalRequest(call=1, lookup=message).SerializeToString())


def main(directory: str, seconds: float, requests: Sequence[bytes] = ()) -> dict[str, int]:
    """
    Args:
        requests: to send in turns; by default one lookup.
    """
    become(UID)
    end = time.monotonic() + seconds
    turns = itertools.cycle(requests or [lookup(b"".join(hashes("a")) * HASHES)])
    rest: dict[int, bytes] = {}
    socks: dict[int, socket.socket] = {}
    poll = select.poll()
    for _ in range(CONNECTIONS):
        sock = flood(f"{directory}/kvs.sock.attach")
        socks[sock.fileno()], rest[sock.fileno()] = sock, next(turns)
        poll.register(sock, select.POLLIN | select.POLLOUT)
    sent = 0
    while time.monotonic() < end:
        for fd, events in poll.poll(1000):
            if events & select.POLLIN:
                socks[fd].recv(1 << 16)
            if events & select.POLLOUT:
                unsent = rest[fd][socks[fd].send(rest[fd]) :]
                sent += not unsent
                rest[fd] = unsent or next(turns)
    return {"lookups": sent}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], float(sys.argv[2]))))
