"""An engine whose daemon has a publisher, and a router that listens."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kvsidecar.client import Blocks
from kvsidecar.integrations.residency.known_blocks import BlockInfo, KnownBlocks
from kvsidecar.publisher.engine_dialects import VLLM
from kvsidecar.publisher.sequence import END
from tests.harness import NAMESPACE, SECONDS, DaemonProcess, Rank, done, eventually
from tests.integrations.engine import chain, full
from tests.publisher.process import PublisherProcess
from tests.router import Subscriber

TOPIC = f"kv@n1@{NAMESPACE.model}"


class Engine:
    """An attached rank that notes tokens on what it stores, and stores chains of 4 blocks of 4 tokens."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.rank = Rank(daemon)
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


@pytest.fixture
def daemon(short_dir: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(short_dir, "--pool-size", "1MiB") as daemon:
        yield daemon.wait_ready()


def subscribe(publisher: PublisherProcess) -> Subscriber:
    return Subscriber(publisher.path, None, topic="kv@")


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
