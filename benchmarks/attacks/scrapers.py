"""``python -m benchmarks.attacks.scrapers PORT SECONDS``: asks for the pages of the HTTP port again and again, on
connections that it keeps, on new ones, and on some whose answers it never reads. Prints a JSON line of its counts."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from contextlib import suppress
from itertools import cycle

PATHS = cycle([b"/metrics", b"/status", b"/metrics", b"/status", b"/", b"/ready"])
KEPT = 64
"""Connections that ask again when they have an answer."""
NEW = 36
"""Clients that connect again for each request."""
UNREAD = 24
"""Clients that never read, and connect again when they are cut off."""
UNREAD_REQUESTS = 1000
"""Sent at once by each of these."""


async def scrape(port: int, did: Counter[str], *, keep: bool) -> None:
    while True:
        with suppress(OSError, ValueError, asyncio.IncompleteReadError, IndexError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
            did["connections"] += 1
            try:
                while True:
                    close = b"" if keep else b"Connection: close\r\n"
                    writer.write(b"GET " + next(PATHS) + b" HTTP/1.1\r\nHost: x\r\n" + close + b"\r\n")
                    did["requests"] += 1
                    head = await reader.readuntil(b"\r\n\r\n")
                    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                    did["bytes"] += len(head) + len(await reader.readexactly(length))
                    did["responses"] += 1
                    if not keep:
                        break
            finally:
                writer.close()
        await asyncio.sleep(0)


async def ask_unread(port: int, did: Counter[str]) -> None:
    while True:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
            did["unread"] += 1
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * UNREAD_REQUESTS)
            while not writer.is_closing():
                writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                await asyncio.sleep(1.0)
            del reader
        await asyncio.sleep(0)


async def attack(port: int, seconds: float) -> dict[str, int]:
    did = Counter(connections=0, requests=0, responses=0, bytes=0, unread=0)
    scrapers = [asyncio.create_task(scrape(port, did, keep=number < KEPT)) for number in range(KEPT + NEW)]
    scrapers += [asyncio.create_task(ask_unread(port, did)) for _ in range(UNREAD)]
    await asyncio.wait(scrapers, timeout=seconds)
    for scraper in scrapers:
        scraper.cancel()
    return dict(did)


if __name__ == "__main__":
    print(json.dumps(asyncio.run(attack(int(sys.argv[1]), float(sys.argv[2])))), flush=True)
