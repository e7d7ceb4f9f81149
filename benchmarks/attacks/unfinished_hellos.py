"""``python -m benchmarks.attacks.unfinished_hellos DIRECTORY SECONDS``: begins Hellos with as many descriptors as a
message carries, on as many connections as it gets, and ends none. Prints a JSON line of what it did."""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
import time
from collections import Counter, deque
from contextlib import suppress
from pathlib import Path

from kvsidecar.protocol.framing import frame
from kvsidecar.support.peer import MAX_FDS

CONNECTIONS = 1500
"""More than one user may have."""
PIECES = (1, 1, 1, 8)
"""Messages with descriptors on a connection: what one may have, on others more."""


def attack(path: str, seconds: float) -> dict[str, int]:
    did = Counter(connections=0, messages=0, descriptors=0, refused=0)
    hello = frame(bytes(2000))  # there are always bytes missing
    fds = [os.open(os.devnull, os.O_RDONLY)] * MAX_FDS
    open_: deque[socket.socket] = deque()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(0.5)
        try:
            connection.connect(path)
            for piece in range(PIECES[did["connections"] % len(PIECES)]):
                socket.send_fds(connection, [hello[piece : piece + 1]], fds)
                did["messages"] += 1
                did["descriptors"] += len(fds)
            did["connections"] += 1
        except OSError:
            did["refused"] += 1
            time.sleep(0.001)
        open_.append(connection)
        if len(open_) > CONNECTIONS:
            open_.popleft().close()
    for connection in open_:
        connection.close()
    return dict(did)


if __name__ == "__main__":
    with suppress(OSError, ValueError):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(json.dumps(attack(f"{Path(sys.argv[1]) / 'kvs.sock'}.attach", float(sys.argv[2]))), flush=True)
