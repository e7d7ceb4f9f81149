"""Begins gRPC calls and resets them at once, over connection after connection: each has a bound of its own.

``python -m benchmarks.attacks.stream_resets DIRECTORY SECONDS [UID]``: as another user, if root runs it.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from contextlib import suppress

from benchmarks.attacks.http2_client import END_HEADERS, HEADERS, PREFACE, RST_STREAM, SETTINGS, frame, request
from benchmarks.attacks.support import become

CALLS = 120
"""Of one connection: with their resets, its own bound holds."""


def main() -> None:
    directory, seconds, *uid = sys.argv[1:]
    if uid:
        become(int(uid[0]))
    calls = b"".join(
        frame(HEADERS, number, request(), END_HEADERS) + frame(RST_STREAM, number, b"\0\0\0\x08")
        for number in range(1, 2 * CALLS, 2)
    )
    connections, until = 0, time.monotonic() + float(seconds)
    while time.monotonic() < until:
        with socket.socket(socket.AF_UNIX) as connection, suppress(OSError):
            connection.settimeout(5)
            connection.connect(f"{directory}/kvs.sock")
            connection.sendall(PREFACE + frame(SETTINGS) + calls)
            connections += 1
    print(json.dumps({"connections": connections}))


if __name__ == "__main__":
    main()
