"""How long this machine itself holds up an answer between two processes, without any of this project's code.

    python -m benchmarks.stalls [--rounds 6] [--seconds 20] [--limit-ms 1.7]

Two servers on an event loop send back what they get. One of them also computes for a third of its time, in slices of a
tenth of a millisecond, and sends each time, as a daemon does that serves many. Both are asked in turns, as
`tests/e2e/test_attacks_at_once.py` asks two daemons, and like there other processes take what the cores have left, and
what a server waits for a core does not count. Printed are the milliseconds of an answer, and how many took longer than
the limit: a stall of a virtual machine by its hypervisor, mostly.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import get_context
from typing import Final

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.attacks.lookup_times import OWN_SECONDS, Waits, longest_wait
from benchmarks.attacks.support import behind_all

SLICE_SECONDS: Final = 0.0001
PAUSE_SECONDS: Final = 0.0002
MESSAGE: Final = bytes(77)
"""As long as a lookup of one block."""
FORK: Final = get_context("fork")


def serve(asked: socket.socket, sink: socket.socket | None) -> None:
    """Send back what comes.

    Args:
        sink: what a slice of computing sends to; None: nothing is computed.
    """

    async def run() -> None:
        loop = asyncio.get_running_loop()

        def slice_() -> None:
            until = time.perf_counter() + SLICE_SECONDS
            while time.perf_counter() < until:
                pass
            if sink is not None:
                with suppress(BlockingIOError):
                    sink.send(MESSAGE, socket.MSG_DONTWAIT)
            loop.call_later(PAUSE_SECONDS, slice_)

        loop.add_reader(asked, lambda: asked.send(asked.recv(len(MESSAGE))))
        if sink is not None:
            slice_()
        await asyncio.Event().wait()

    uvloop.run(run())


def read(source: socket.socket) -> None:
    behind_all()
    while source.recv(4096):
        pass


def spin() -> None:
    behind_all()
    while True:
        pass


@contextmanager
def server(*, busy: bool) -> Iterator[tuple[socket.socket, Waits]]:
    ours, its = socket.socketpair()
    sink, source = socket.socketpair()
    children = [
        FORK.Process(target=serve, args=(its, sink if busy else None)),
        FORK.Process(target=read, args=(source,)),
    ]
    for child in children:
        child.start()
    pid = children[0].pid
    assert pid is not None
    waits = Waits(pid)
    try:
        yield ours, waits
    finally:
        waits.close()
        for child in children:
            child.kill()
            child.join()


def ask(connection: socket.socket, waits: Waits, own: Waits) -> float | None:
    """Seconds of an answer; None: this process itself has waited for a core."""
    own_before, before, began = own.now(), waits.now(), time.perf_counter()
    connection.send(MESSAGE)
    connection.recv(len(MESSAGE))
    took = time.perf_counter() - began - longest_wait(before, waits.now())
    return took if longest_wait(own_before, own.now()) < OWN_SECONDS else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=20.0, help="of a round")
    parser.add_argument("--limit-ms", type=float, default=1.7)
    args = parser.parse_args()
    table = Table("round", "server", "answers", "p50 ms", "p99 ms", "longest three", "over the limit")
    own = Waits(os.getpid())
    with ExitStack() as stack:
        for _ in range(len(os.sched_getaffinity(0))):
            spinning = FORK.Process(target=spin, daemon=True)
            spinning.start()
            stack.callback(spinning.kill)
        servers = {name: stack.enter_context(server(busy=name == "busy")) for name in ("busy", "idle")}
        for number in range(1, args.rounds + 1):
            seconds: dict[str, list[float]] = {name: [] for name in servers}
            until = time.monotonic() + args.seconds
            while time.monotonic() < until:
                for name, (connection, waits) in servers.items():
                    if (took := ask(connection, waits, own)) is not None:
                        seconds[name].append(took * 1e3)
                time.sleep(PAUSE_SECONDS)
            for name, found in seconds.items():
                found.sort()
                longest = " ".join(f"{each:.2f}" for each in found[:-4:-1])
                over = sum(each > args.limit_ms for each in found)
                p50, p99 = (f"{found[int(len(found) * share)]:.2f}" for share in (0.5, 0.99))
                table.add_row(str(number), name, f"{len(found):,}", p50, p99, longest, str(over))
    Console().print(table)


if __name__ == "__main__":
    main()
