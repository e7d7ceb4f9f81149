"""An engine rank with a client of whichever version of the code runs this, as a `Script` of `benchmarks.turns`.

It first says whether its lookups know tails. ["prepare", kind, blocks, times] makes what operations need; ["go", times]
does the next ones, and is answered with the seconds that each took.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from kvsidecar.client import Blocks, Client, GroupLayout, HostBuffer, LookupMode, Namespace, Outcome, Region

GROUPS, BLOCKS, BLOCK_BYTES, WINDOW = 7, 512, 4096, 64
SECONDS = 60.0
NAMESPACE = Namespace("turns", "bf16", "LBNHC", 16, 1, 1, "sha256")


class Asker:
    def __init__(self, socket: str, local: bool, pool_bytes: int) -> None:
        self._client = Client(socket, timeout=SECONDS, step_budget=SECONDS, local_protocol=local)
        nbytes = BLOCKS * BLOCK_BYTES
        self._buffer = HostBuffer(GROUPS * nbytes)
        groups = [
            GroupLayout(group, BLOCKS, 0, 1, (Region(0, group * nbytes, 0, BLOCK_BYTES, BLOCK_BYTES, 1),))
            for group in range(GROUPS)
        ]
        self._client.attach(instance="turns", namespace=NAMESPACE, buffers=self._buffer.kv_buffers(), groups=groups)
        assert self._client.wait_ready(SECONDS).ready
        for _ in range(1 + pool_bytes // nbytes):  # from now on, every store evicts
            self._stored(BLOCKS)

    def prepare(self, kind: str, blocks: int, times: int) -> list[Callable[[], object]]:
        if kind == "store":
            return [self._job(self._client.store, os.urandom(32 * blocks)) for _ in range(times)]
        if kind == "load":
            return [self._job(self._client.load, self._stored(blocks))] * times
        if kind == "misses":
            return [self._lookup({0: os.urandom(32 * blocks)}, 0)] * times
        if kind == "windows":
            groups = dict.fromkeys(range(GROUPS), self._stored(blocks, GROUPS))
            tails = dict.fromkeys(range(1, GROUPS), WINDOW)
            return [self._lookup(groups, blocks, mode=LookupMode.BITMAP, tails=tails)] * times
        leased = {"lease_seconds": SECONDS} if kind == "lease" else {}
        return [self._lookup({0: self._stored(blocks)}, blocks, **leased)] * times

    def _lookup(self, groups: dict[int, bytes], hits: int, **how: Any) -> Callable[[], object]:
        def lookup() -> None:
            found = self._client.lookup(NAMESPACE, groups, **how)
            assert found.groups[0].hits == hits, found
            if "lease_seconds" in how:
                assert self._client.release(found.lease)

        return lookup

    def _job(self, submit: Callable[[list[Blocks]], int], hashes: bytes, groups: int = 1) -> Callable[[], object]:
        ids = list(range(len(hashes) // 32))
        parts = [Blocks(group, hashes, ids) for group in range(groups)]

        def job() -> None:
            number = submit(parts)
            done = self._client.wait([number], SECONDS)[number]
            assert done.outcome is Outcome.DONE, done
            assert done.copied_blocks == groups * len(ids), done

        return job

    def _stored(self, blocks: int, groups: int = 1) -> bytes:
        hashes = os.urandom(32 * blocks)
        self._job(self._client.store, hashes, groups)()
        return hashes


def main() -> None:
    socket, local, pool_bytes = json.loads(sys.argv[1])
    asker = Asker(socket, local, pool_bytes)
    print(json.dumps("tails" in inspect.signature(Client.lookup).parameters), flush=True)
    operations: list[Callable[[], object]] = []
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        taken = []
        if what == "prepare":
            operations = asker.prepare(*arguments)
            operations[0]() if arguments[0] != "store" else None  # so that none is the first of its kind
        else:
            for operation in operations[: arguments[0]]:
                began = time.perf_counter()
                operation()
                taken.append(time.perf_counter() - began)
            del operations[: arguments[0]]
        print(json.dumps(taken), flush=True)


if __name__ == "__main__":
    main()
