"""A router's side of one engine's KV events: a subscriber, and what it knows by the rules of llm-d's and Dynamo's."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq


@dataclass
class View:
    """Which blocks of one engine a router believes in, by medium and group. It reads maps by their names."""

    blocks: dict[tuple[str, int], dict[int, tuple[int, ...]]] = field(default_factory=dict)
    """By medium and group: hashes, and the blocks' tokens."""
    ignored: list[dict[str, Any]] = field(default_factory=list)
    """Events without tokens, and those whose parent is unknown."""
    repeated: list[dict[str, Any]] = field(default_factory=list)
    """Events of blocks that were known in this medium."""
    parents: dict[int, int | None] = field(default_factory=dict)
    removed: list[tuple[str, int]] = field(default_factory=list)
    """Media and hashes."""

    def take(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.blocks.clear()
            return
        place = (event["medium"], event.get("group_idx") or 0)
        mine = self.blocks.setdefault(place, {})
        hashes = event["block_hashes"]
        if event["type"] == "BlockRemoved":
            for each in hashes:
                mine.pop(each, None)
            self.removed += [(event["medium"], each) for each in hashes]
            return
        assert event["type"] == "BlockStored"
        size, tokens, parent = event["block_size"], event["token_ids"], event["parent_block_hash"]
        self.parents.update(zip(hashes, [parent, *hashes], strict=False))
        known = {each for blocks in self.blocks.values() for each in blocks}
        if len(tokens) != size * len(hashes) or (parent is not None and parent not in known):
            self.ignored.append(event)
            return
        if event["medium"] != "GPU" and any(each in mine for each in hashes):
            self.repeated.append(event)
        mine.update({each: tuple(tokens[i * size : (i + 1) * size]) for i, each in enumerate(hashes)})

    def of(self, medium: str) -> dict[int, tuple[int, ...]]:
        return {
            each: tokens
            for place, blocks in self.blocks.items()
            if place[0] == medium
            for each, tokens in blocks.items()
        }


class Subscriber:
    """Listens in a thread, from the constructor to `close`.

    Args:
        path: of the socket.
        batch: the engine's own class of a message; None: a list as in msgpack.
        medium: the engine's name of host memory.
        topic: which the messages have to begin with.
    """

    def __init__(self, path: str, batch: type[Any] | None, medium: str = "CPU", topic: str = "") -> None:
        self._by_struct = None if batch is None else msgspec.msgpack.Decoder(batch)
        self._medium = medium
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._socket.setsockopt(zmq.RCVTIMEO, 100)
        self._socket.connect(f"ipc://{path}")
        self._lock = threading.Lock()
        self._view = View()
        self._sequence: int | None = None
        self.batches = 0
        self.topics: set[str] = set()
        self.problems: list[str] = []
        self._ending = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ending:
            try:
                topic, sequence, payload = self._socket.recv_multipart()
            except zmq.Again:
                continue
            with self._lock:
                self.topics.add(topic.decode())
                self._take(int.from_bytes(sequence, "big"), payload)
        self._socket.close(0)
        self._context.term()

    def _take(self, sequence: int, payload: bytes) -> None:
        if self._sequence is not None and sequence != self._sequence + 1:
            self.problems.append(f"{sequence} came after {self._sequence}")
        self._sequence = sequence
        self.batches += 1
        _, maps, *_ = msgspec.msgpack.decode(payload)
        structs = maps if self._by_struct is None else self._by_struct.decode(payload).events
        for one, other in zip(structs, maps, strict=True):
            if self._by_struct is None:
                self._view.take(other)
                continue
            for name, value in other.items():
                if name != "type" and msgspec.to_builtins(getattr(one, name)) != value:
                    self.problems.append(f"{name}: {one} is not {other}")
            self._view.take(other)

    def cpu(self) -> dict[int, tuple[int, ...]]:
        """What the router believes to be in the daemon, with tokens."""
        with self._lock:
            return self._view.of(self._medium)

    def disk(self) -> dict[int, tuple[int, ...]]:
        """What the router believes to be on the node's disk, with tokens."""
        with self._lock:
            return self._view.of("STORAGE")

    def gpu(self) -> dict[int, tuple[int, ...]]:
        with self._lock:
            return self._view.of("GPU")

    def parents(self) -> dict[int, int | None]:
        """The parent of each block that was ever heard of."""
        with self._lock:
            return dict(self._view.parents)

    def removed(self, medium: str) -> list[int]:
        with self._lock:
            return [each for name, each in self._view.removed if name == medium]

    def check(self) -> None:
        """Nothing was lost, without tokens or said twice."""
        with self._lock:
            assert self.problems == []
            assert [each for each in self._view.ignored if not each["token_ids"]] == []
            assert self._view.repeated == []

    def close(self) -> None:
        self._ending = True
        self._thread.join()

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
