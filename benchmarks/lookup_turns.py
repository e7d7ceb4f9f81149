"""Lookups of two versions of the code: a daemon of each runs, and both are asked in turns.

  git worktree add ../old COMMIT && make -C ../old venv
  python -m benchmarks.lookup_turns --old ../old/.venv/bin/python [--rounds 20] [--lookups 300] [--busy] [--pause 0.005]

Hits only, without a lease, of the host device. "daemon": one process sends the same bytes to both daemons and reads the
answers, so that the time is theirs. "client": `Client.lookup` of each version, in a process of its own. Printed are the
median over the rounds of each round's median, in microseconds, and new / old of the same round: its median, and the
first and the last tenth. ``--busy``: four ranks of each keep jobs of 32 blocks outstanding while its daemon is asked.
``--pause``: seconds between two lookups, as a scheduler makes them; without, they take their share of the loop.
"""

from __future__ import annotations

import argparse
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import grpc

from benchmarks.turns import Script, ratio, turns
from kvsidecar.bench.processes import private_daemon
from kvsidecar.client import Namespace
from kvsidecar.protocol.framing import frame
from kvsidecar.protocol.wire import namespace_to_wire
from kvsidecar.support.units import MiB
from kvsidecar.v1 import sidecar_pb2 as pb
from kvsidecar.v1 import sidecar_pb2_grpc as pb_grpc

COUNTS = (64, 512)
NAMESPACE = ("m", "bf16", "LBNHC", 16, 1, 1, "sha256")

CHILD = """
import hashlib, json, sys, threading, time
from statistics import median
from kvsidecar.client import Blocks, Client, GroupLayout, HostBuffer, Namespace, Region
from kvsidecar.types import PROTOCOL

socket, role, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
namespace = Namespace("m", "bf16", "LBNHC", 16, 1, 1, "sha256")
COUNT, JOB, ROW = 512, 32, 4096
names = [hashlib.sha256(f"{number} {each}".encode()).digest() for each in range(COUNT)]
buffer = HostBuffer(COUNT * ROW)
client = Client(socket, timeout=60.0, step_budget=60.0)
client.attach(instance=f"{role} {number}", namespace=namespace, buffers=buffer.kv_buffers(),
              groups=[GroupLayout(0, COUNT, 0, 1, (Region(0, 0, 0, ROW, ROW, 1),))])
client.wait_ready(60.0)
first = client.store([Blocks(0, names, list(range(COUNT)))])
assert client.wait([first], 60.0)[first].copied_blocks == COUNT
clients = {"local": client, "grpc": Client(socket, timeout=60.0, step_budget=60.0, local_protocol=False)}
print(json.dumps({"protocol": PROTOCOL, "hashes": [name.hex() for name in names]}), flush=True)


def ask(way, count, lookups, pause):
    taken = []
    for _ in range(lookups):
        began = time.perf_counter()
        found = clients[way].lookup(namespace, {0: names[:count]})
        taken.append(time.perf_counter() - began)
        assert found.groups[0].hits == count
        time.sleep(pause)
    return median(taken)


def work():
    jobs, done, turn = [], 0, 0
    while working:
        while len(jobs) < 4:
            at = turn * JOB % COUNT
            turn += 1
            blocks = list(range(at, at + JOB))
            if turn % 2:
                jobs.append(client.load([Blocks(0, names[at:at + JOB], blocks)]))
            else:
                fresh = [hashlib.sha256(f"{number} {turn} {each}".encode()).digest() for each in blocks]
                jobs.append(client.store([Blocks(0, fresh, blocks)]))
        ended = client.wait(jobs[:1], 60.0)
        jobs, done = jobs[1:], done + len(ended)
    client.wait(jobs, 60.0)
    counted.append(done)


for line in sys.stdin:
    client.lookup(namespace, {0: names}, lease_seconds=300.0)  # what others store does not evict them
    what, *arguments = json.loads(line)
    answer = None
    if what == "ask":
        answer = ask(*arguments)
    elif what == "work":
        working, counted = True, []
        thread = threading.Thread(target=work)
        thread.start()
    elif what == "rest":
        working = False
        thread.join()
        answer = counted[0]
    print(json.dumps(answer), flush=True)
"""


class Side:
    """One version: its daemon, and who asks it."""

    def __init__(self, python: str, directory: Path, stack: ExitStack, *, workers: int) -> None:
        directory.mkdir()
        started = (python, "-P")
        flags = ("--memory-check", "off")
        self._daemon = stack.enter_context(private_daemon(directory, "host", 64 * MiB, flags, python=started))
        address = self._daemon.socket
        self.asker = Script(stack, started, CHILD, address, "asker", 0)
        said = self.asker.answer()
        self.workers = [Script(stack, started, CHILD, address, "worker", number) for number in range(1, workers + 1)]
        for worker in self.workers:
            worker.answer()
        self.hashes = b"".join(map(bytes.fromhex, said["hashes"]))
        self._local = socket.socket(socket.AF_UNIX)
        stack.callback(self._local.close)
        self._local.connect(f"{address}.attach")
        self._send(pb.Hello(protocol=said["protocol"]).SerializeToString())
        if not pb.Welcome.FromString(self._receive()).local_protocol:
            raise SystemExit(f"the daemon of {python} has no local protocol")
        channel = stack.enter_context(grpc.insecure_channel(f"unix:{address}"))
        self._grpc = pb_grpc.SidecarStub(channel)

    def _send(self, message: bytes) -> None:
        self._local.sendall(frame(message))

    def _receive(self) -> bytes:
        data = b""
        while len(data) < 4 or len(data) < 4 + int.from_bytes(data[:4], "little"):
            if not (more := self._local.recv(65536)):
                raise SystemExit("the daemon closed the connection")
            data += more
        return data[4:]

    def of_the_daemon(self, way: str, count: int, lookups: int, pause: float) -> float:
        """Median seconds of the round trips of one request."""
        request = pb.LookupRequest(
            namespace=namespace_to_wire(Namespace(*NAMESPACE)), mode=pb.LookupRequest.MODE_PREFIX
        )
        request.groups.add(group=0, hashes=self.hashes[: 32 * count])
        once: Callable[[], pb.LookupReply]
        if way == "local":
            message = pb.LocalRequest(call=1, lookup=request).SerializeToString()

            def once() -> pb.LookupReply:
                self._send(message)
                return pb.LocalReply.FromString(self._receive()).lookup
        else:

            def once() -> pb.LookupReply:
                return self._grpc.Lookup(request)

        taken = []
        for _ in range(lookups):
            began = time.perf_counter()
            found = once()
            taken.append(time.perf_counter() - began)
            assert found.groups[0].hits == count
            time.sleep(pause)
        return median(taken)

    def measure(self, who: str, way: str, count: int, lookups: int, pause: float) -> float:
        if who == "daemon":
            return self.of_the_daemon(way, count, lookups, pause)
        return float(self.asker.ask("ask", way, count, lookups, pause))

    @contextmanager
    def at_work(self, jobs: list[float]) -> Iterator[None]:
        """Its workers' jobs a second within the block are appended."""
        self.asker.ask("hold")
        began = time.monotonic()
        for worker in self.workers:
            worker.ask("work")
        yield
        for worker in self.workers:
            worker.tell("rest")
        done = sum(worker.answer() for worker in self.workers)
        if self.workers:
            jobs.append(done / (time.monotonic() - began))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", required=True, metavar="PYTHON", help="of the other version's environment")
    parser.add_argument("--new", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--lookups", type=int, default=300, help="of each kind in a round")
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--pause", type=float, default=0.0, metavar="SECONDS")
    options = parser.parse_args()
    ways = [(who, way, count) for who in ("daemon", "client") for way in ("local", "grpc") for count in COUNTS]
    taken: dict[tuple[str, str, int], list[tuple[float, float]]] = {way: [] for way in ways}
    jobs: tuple[list[float], list[float]] = ([], [])
    with tempfile.TemporaryDirectory(prefix="kvs-") as directory, ExitStack() as stack:
        workers = 4 if options.busy else 0
        sides = [
            Side(python, Path(directory) / name, stack, workers=workers)
            for name, python in (("old", options.old), ("new", options.new))
        ]
        for counts, order in turns(options.rounds, (0, 1)):
            seconds: dict[tuple[str, str, int], list[float]] = {way: [0.0, 0.0] for way in ways}
            if options.busy:
                for side in order:
                    with sides[side].at_work(jobs[side]):
                        for way in ways:
                            seconds[way][side] = sides[side].measure(*way, options.lookups, options.pause)
            else:
                for way in ways:
                    for side in order:
                        seconds[way][side] = sides[side].measure(*way, options.lookups, options.pause)
            if counts:
                for way, (old, new) in seconds.items():
                    taken[way].append((old, new))
    print(f"{'time of':8} {'protocol':8} {'hashes':>6} {'old us':>8} {'new us':>8}  new / old (tenths)")
    for (who, protocol, count), pairs in taken.items():
        before, after = zip(*pairs, strict=True)
        medians = f"{1e6 * median(before):8.1f} {1e6 * median(after):8.1f}"
        print(f"{who:8} {protocol:8} {count:6} {medians}  {ratio(before, after)}")
    if options.busy:
        old, new = (median(each[1:]) for each in jobs)
        print(f"jobs of 32 blocks a second meanwhile: {old:.0f} old, {new:.0f} new")


if __name__ == "__main__":
    main()
