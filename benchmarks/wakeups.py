"""How long an idle core of this machine takes to come back: it is part of every latency that is measured on it.

    python benchmarks/wakeups.py

64 bytes to another process (uvloop) and back over a Unix socket, and a hand-over to another thread and back; without a
pause between two of them, and with one of a millisecond, in which the cores fall asleep.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop

ROUNDS = 1000
PAUSES = (0.0, 0.001)


class Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


def serve(path: str, ready: Any) -> None:
    async def run() -> None:
        await asyncio.get_running_loop().create_unix_server(Echo, path)
        ready.set()
        await asyncio.sleep(3600)

    uvloop.run(run())


def report(name: str, once: Callable[[], object]) -> None:
    for pause in PAUSES:
        seconds = []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            once()
            seconds.append(time.perf_counter() - started)
            time.sleep(pause) if pause else None
        seconds.sort()
        p50, p90 = seconds[ROUNDS // 2] * 1e6, seconds[ROUNDS * 9 // 10] * 1e6
        print(f"{name:<34} pause {pause * 1e3:.0f} ms: p50 {p50:4.0f} us, p90 {p90:4.0f} us")


def main() -> None:
    path = str(Path(tempfile.mkdtemp()) / "echo")
    ready = multiprocessing.Event()
    server = multiprocessing.Process(target=serve, args=(path, ready), daemon=True)
    server.start()
    ready.wait()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)

    def over_the_socket() -> None:
        connection.send(b"x" * 64)
        connection.recv(100)

    asked, answered = threading.Event(), threading.Event()

    def other_thread() -> None:
        while True:
            asked.wait()
            asked.clear()
            answered.set()

    threading.Thread(target=other_thread, daemon=True).start()

    def over_to_a_thread() -> None:
        asked.set()
        answered.wait()
        answered.clear()

    report("another process, Unix socket", over_the_socket)
    report("another thread", over_to_a_thread)
    server.terminate()


if __name__ == "__main__":
    main()
