"""A tier whose calls end when and how a test says. What it keeps are the contents of slots, as the test gives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvsidecar.errors import TierFailed
from kvsidecar.tiers.backend import BackendStats, ReadEnd, ShardSpace, WriteEnd
from kvsidecar.types import Namespace


@dataclass(eq=False)
class Call:
    space: ShardSpace
    hashes: list[bytes]
    on_end: Callable[[Any], None]
    slots: list[int] = field(default_factory=list)
    on_late: Callable[[], None] | None = None
    contents: list[Any] = field(default_factory=list)
    """Of a write: what the slots had when it began."""


class ScriptedTier:
    """Implements what `kvsidecar.core` uses of `kvsidecar.tiers.tier.Tier`.

    Args:
        memory: the contents of the pool, by slot.
    """

    def __init__(self, memory: dict[int, Any], name: str = "scripted") -> None:
        self.name = name
        self.off = ""
        self.read_rate = 1e12
        self.stats: BackendStats | None = None
        self.memory = memory
        self.kept: dict[tuple[ShardSpace, bytes], Any] = {}
        self.finds: list[Call] = []
        self.reads: list[Call] = []
        self.writes: list[Call] = []
        self.forgotten: list[Namespace | None] = []

    def _split(self, space: ShardSpace, hashes: bytes) -> list[bytes]:
        if self.off:
            raise TierFailed(self.off)
        width = space.namespace.hash_bytes
        return [hashes[at : at + width] for at in range(0, len(hashes), width)]

    def may_have(self, digest: bytes, block_hash: bytes) -> bool:
        return True

    def may_have_each(self, digest: bytes, words: Any) -> Any:
        return np.full(len(words), not self.off)

    def find(self, space: ShardSpace, hashes: bytes, on_end: Callable[[list[bool]], None]) -> None:
        self.finds.append(Call(space, self._split(space, hashes), on_end))

    def read(self, space: ShardSpace, hashes: bytes, slots: Any, on_end: Any, on_late: Callable[[], None]) -> None:
        self.reads.append(Call(space, self._split(space, hashes), on_end, slots.tolist(), on_late))

    def write(self, space: ShardSpace, hashes: bytes, slots: Any, checksums: Sequence[int | None], on_end: Any) -> None:
        assert len(checksums) == len(slots)
        call = Call(space, self._split(space, hashes), on_end, np.asarray(slots).tolist())
        call.contents = [self.memory[slot] for slot in call.slots]
        self.writes.append(call)

    def forget(self, namespace: Namespace | None) -> None:
        self.forgotten.append(namespace)
        self.kept = {key: value for key, value in self.kept.items() if namespace not in (None, key[0].namespace)}

    # -- what the test says --------------------------------------------------------------------------------------------

    def end_find(self, call: Call, *, ok: bool = True) -> None:
        self.finds.remove(call)
        call.on_end([(call.space, each) in self.kept for each in call.hashes] if ok else [])

    def end_read(self, call: Call, *, ok: bool = True) -> None:
        self.reads.remove(call)
        ends = []
        for each, slot in zip(call.hashes, call.slots, strict=True):
            present = (call.space, each) in self.kept
            self.memory[slot] = self.kept[call.space, each] if ok and present else "garbage"
            ends.append(ReadEnd.DONE if present else ReadEnd.MISS)
        call.on_end(ends if ok else [])

    def late(self, call: Call) -> None:
        assert call.on_late is not None
        call.on_late()

    def end_write(self, call: Call, *, ok: bool = True, full: bool = False) -> None:
        self.writes.remove(call)
        ends = []
        for each, slot, content in zip(call.hashes, call.slots, call.contents, strict=True):
            assert self.memory[slot] == content, "a slot changed while it was being written"
            if ok and not full:
                self.kept[call.space, each] = content
            ends.append(WriteEnd.FULL if full else WriteEnd.DONE)
        call.on_end(ends if ok else [])
