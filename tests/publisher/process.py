"""A real ``kvsidecar publish``, an engine whose daemon has it, and a router that listens."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import urllib.request
from array import array
from pathlib import Path
from types import TracebackType
from typing import Any

import zmq

from kvsidecar.client import Blocks
from kvsidecar.integrations.residency.known_blocks import BlockInfo, KnownBlocks
from kvsidecar.publisher.engine_dialects import VLLM
from kvsidecar.publisher.sequence import END
from kvsidecar.support import child_process
from tests import warm
from tests.harness import NAMESPACE, SECONDS, DaemonProcess, Rank, done, environment, eventually
from tests.integrations.engine import chain, full
from tests.router import Subscriber


class PublisherProcess:
    """Publishes what the daemon at this socket holds, on sockets in a directory."""

    def __init__(self, directory: Path, socket: str, *options: str) -> None:
        self.path, self.replay = f"{directory}/kv.events", f"ipc://{directory}/kv.replay"
        self._log = directory / "publish.log"
        arguments = ["publish", "--socket", socket, "--bind", f"ipc://{self.path}", "--replay", self.replay]
        arguments += ["--node", "n1", *options]
        with self._log.open("ab") as log:
            self.process = warm.start(arguments, environment(), stderr=log.fileno()) or child_process.start(
                [sys.executable, "-m", "kvsidecar", *arguments], stderr=log
            )

    def wait_log(self, text: str, count: int = 1) -> None:
        eventually(lambda: self.log.count(text) >= count or self.process.poll() is not None, lambda: self.log)
        assert self.process.poll() is None, self.log

    def metric(self, name: str) -> float:
        """The value of a series, with its labels as they are exported. The publisher has the option ``--metrics``."""
        eventually(lambda: "metrics are served" in self.log, lambda: self.log)
        (url,) = set(re.findall(r"http://[^\s\"]+/metrics", self.log))
        with urllib.request.urlopen(url, timeout=SECONDS) as response:
            values = dict(line.rsplit(" ", 1) for line in response.read().decode().splitlines() if line[:1] != "#")
        return float(values[name])

    def refused(self, endpoint: str, reason: str) -> float:
        return self.metric(f'kvsidecar_publisher_refusals_total{{endpoint="{endpoint}",reason="{reason}"}}')

    @property
    def log(self) -> str:
        return self._log.read_text()

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(SECONDS)

    def __enter__(self) -> PublisherProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        try:
            self.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            print(self.log)
            raise
        if error is not None:
            print(self.log)


TOPIC = f"kv@n1@{NAMESPACE.model}"


class Engine:
    """An attached rank that notes tokens on what it stores, and stores chains of 4 blocks of 4 tokens."""

    def __init__(self, daemon: DaemonProcess, **attach: Any) -> None:
        self.rank = Rank(daemon, **attach)
        self.known = KnownBlocks([full(0)], NAMESPACE.hash_bytes)

    def store(self, number: int, length: int = 4) -> set[int]:
        """Returns the blocks' names."""
        tokens = list(range(1000 * number, 1000 * number + 4 * length))
        hashes = chain(tokens)
        for i, each in enumerate(hashes):
            packed = array("i", tokens[4 * i : 4 * i + 4]).tobytes()
            self.known.add(0, each, BlockInfo(packed, hashes[i - 1] if i else None))
        blocks = Blocks(0, hashes, list(range(length)), notes=self.known.notes(0, hashes))
        done(self.rank.finish(self.rank.client.store([blocks])))
        return {VLLM.number(each) for each in hashes}


def subscribe(publisher: PublisherProcess, topic: str = "kv@") -> Subscriber:
    return Subscriber(publisher.path, None, topic=topic)


def wait_for(router: Subscriber, blocks: set[int]) -> None:
    eventually(lambda: set(router.cpu()) == blocks, lambda: f"{len(router.cpu())} of {len(blocks)} blocks")


def replay(endpoint: str, first: int) -> list[tuple[bytes, int, bytes]]:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.RCVTIMEO, int(SECONDS * 1000))
    socket.connect(endpoint)
    messages: list[tuple[bytes, int, bytes]] = []
    try:
        socket.send_multipart([b"", first.to_bytes(8, "big")])
        while True:
            empty, topic, number, payload = socket.recv_multipart()
            assert empty == b""
            if number == END:
                assert (topic, payload) == (b"", b"")
                return messages
            messages.append((topic, int.from_bytes(number, "big"), payload))
    finally:
        socket.close(0)
        context.term()
