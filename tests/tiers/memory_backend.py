"""A backend that keeps shards in a dict of the tier's process: for tests of what is around a backend."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from kvsidecar.errors import TierFailed
from kvsidecar.tiers.backend import Backend, BackendStats, ReadEnd, ShardSpace, WriteEnd
from kvsidecar.types import Namespace

NAME = "tests.tiers.memory_backend:open_backend"


class MemoryBackend(Backend):
    """Args: broken: while this file exists, every call fails with its text."""

    def __init__(self, capacity: int, broken: str) -> None:
        self._kept: dict[tuple[bytes, bytes], bytes] = {}
        self._spaces: dict[bytes, Namespace] = {}
        self._capacity, self._broken = capacity, Path(broken)
        self._lock = threading.Lock()

    def _check(self) -> None:
        if self._broken.name and self._broken.is_file():
            raise TierFailed(self._broken.read_text())

    def find(self, space: ShardSpace, hashes: Sequence[bytes]) -> list[bool]:
        self._check()
        return [(space.digest, each) in self._kept for each in hashes]

    def read(self, space: ShardSpace, hashes: Sequence[bytes], memory: Sequence[memoryview]) -> list[ReadEnd]:
        self._check()
        ends = []
        for each, window in zip(hashes, memory, strict=True):
            data = self._kept.get((space.digest, each))
            if data is not None:
                window[:] = data
            ends.append(ReadEnd.MISS if data is None else ReadEnd.DONE)
        return ends

    def write(
        self, space: ShardSpace, hashes: Sequence[bytes], memory: Sequence[memoryview], checksums: Sequence[int | None]
    ) -> list[WriteEnd]:
        self._check()
        ends = []
        with self._lock:
            self._spaces[space.digest] = space.namespace
            for each, window in zip(hashes, memory, strict=True):
                key = space.digest, each
                if key in self._kept:
                    ends.append(WriteEnd.PRESENT)
                elif len(self._kept) >= self._capacity:
                    ends.append(WriteEnd.FULL)
                else:
                    self._kept[key] = bytes(window)
                    ends.append(WriteEnd.DONE)
        return ends

    def forget(self, namespace: Namespace | None) -> int:
        with self._lock:
            gone = [key for key in self._kept if namespace in (None, self._spaces[key[0]])]
            for key in gone:
                del self._kept[key]
        return len(gone)

    def probe(self) -> None:
        self._check()

    def stats(self) -> BackendStats:
        return BackendStats(self._capacity, sum(map(len, self._kept.values())), len(self._kept), 0, 0, {})

    def close(self) -> None:
        pass


def open_backend(capacity: int = 1 << 30, broken: str = "", refuses: str = "") -> MemoryBackend:
    if refuses:
        raise TierFailed(refuses)
    return MemoryBackend(capacity, broken)
