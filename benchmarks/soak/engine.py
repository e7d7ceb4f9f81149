"""One engine of the soak, a process of its own: ``python -m benchmarks.soak.engine``. Speaks JSON lines.

It does what an engine does with prompts that share prefixes: look up, load what is there and compare every byte,
compute and store the rest, overwrite blocks as soon as that is allowed. SIGTERM lets it leave in order.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvsidecar.client import (
    Allocation,
    Blocks,
    Client,
    GroupLayout,
    HostBuffer,
    JobDone,
    KVBuffers,
    LookupResult,
    Namespace,
    Outcome,
    PhysicalRange,
    Region,
)

LAYERS, ROW_BYTES, NUM_BLOCKS = 4, 4096, 48
SHARD_BYTES = LAYERS * ROW_BYTES
PROMPTS, PROMPT_BLOCKS = 40, 8
"""Of each namespace. More bytes than the pool of the soak, so that eviction never rests."""
TIMEOUT = 60.0
SAY_SECONDS = 0.5
SLOW_PREFILL = 0.001
"""Tokens a second: everything that is on the disk is worth fetching."""


def namespace_of(name: str, num_ranks: int) -> Namespace:
    return Namespace(name, "bfloat16", "LBNHC", 16, num_ranks, 1, "sha256")


def hashes_of(prompt: int, count: int) -> list[bytes]:
    """Chained, and the same in both namespaces."""
    return [hashlib.sha256(b"%d %d" % (prompt, index)).digest() for index in range(count)]


def content(namespace: str, block_hash: bytes, rank: int) -> npt.NDArray[np.uint8]:
    """What this rank's shard of the block holds, whoever computes it."""
    seed = hashlib.sha256(f"{namespace} {rank} ".encode() + block_hash).digest()
    data = np.random.default_rng(int.from_bytes(seed[:8], "little")).bytes(SHARD_BYTES)
    return np.frombuffer(data, np.uint8).reshape(LAYERS, ROW_BYTES)


def hits_of(found: LookupResult) -> int:
    """0 without an answer, too."""
    return found.groups[0].hits if found.groups else 0


class Memory(Protocol):
    """One rank's KV of ``[layers, num_blocks, row_bytes]``."""

    def kv_buffers(self) -> KVBuffers: ...
    def regions(self) -> tuple[Region, ...]: ...
    def write(self, block_id: int, rows: npt.NDArray[np.uint8]) -> None: ...
    def read(self, block_id: int) -> npt.NDArray[np.uint8]: ...


ONE_ALLOCATION = (Region(0, 0, NUM_BLOCKS * ROW_BYTES, ROW_BYTES, ROW_BYTES, LAYERS),)
ONE_A_LAYER = tuple(Region(layer, 0, ROW_BYTES, ROW_BYTES, ROW_BYTES, 1) for layer in range(LAYERS))


class HostMemory:
    def __init__(self) -> None:
        self._buffer = HostBuffer(SHARD_BYTES * NUM_BLOCKS)
        self._kv = np.frombuffer(self._buffer.memory, np.uint8).reshape(LAYERS, NUM_BLOCKS, ROW_BYTES)

    def kv_buffers(self) -> KVBuffers:
        return self._buffer.kv_buffers()

    def regions(self) -> tuple[Region, ...]:
        return ONE_ALLOCATION

    def write(self, block_id: int, rows: npt.NDArray[np.uint8]) -> None:
        self._kv[:, block_id] = rows

    def read(self, block_id: int) -> npt.NDArray[np.uint8]:
        return self._kv[:, block_id]


class HostRanges:
    """Physical memory: on the host a memfd is what a descriptor of such memory is on a GPU."""

    def __init__(self) -> None:
        self._buffers = [HostBuffer(NUM_BLOCKS * ROW_BYTES) for _ in range(LAYERS)]
        self._kv = [np.frombuffer(each.memory, np.uint8).reshape(NUM_BLOCKS, ROW_BYTES) for each in self._buffers]

    def kv_buffers(self) -> KVBuffers:
        ranges = [PhysicalRange(each.nbytes, fd=each.fd) for each in self._buffers]
        return KVBuffers("host", tuple(Allocation(each.size, ranges=(each,)) for each in ranges))

    def regions(self) -> tuple[Region, ...]:
        return ONE_A_LAYER

    def write(self, block_id: int, rows: npt.NDArray[np.uint8]) -> None:
        for layer, row in zip(self._kv, rows, strict=True):
            layer[block_id] = row

    def read(self, block_id: int) -> npt.NDArray[np.uint8]:
        return np.array([layer[block_id] for layer in self._kv])


class CudaMemory:
    def __init__(self) -> None:
        from kvsidecar.support.cuda_driver import CudaContext, ipc_handle

        self._context = CudaContext(0)
        self._address = self._context.alloc(SHARD_BYTES * NUM_BLOCKS)
        self._handle = ipc_handle(self._address)

    def kv_buffers(self) -> KVBuffers:
        return KVBuffers(self._context.uuid, (Allocation(SHARD_BYTES * NUM_BLOCKS, cuda_ipc_handle=self._handle),))

    def regions(self) -> tuple[Region, ...]:
        return ONE_ALLOCATION

    def write(self, block_id: int, rows: npt.NDArray[np.uint8]) -> None:
        for layer in range(LAYERS):
            self._context.copy_to_device(self._row(layer, block_id), np.ascontiguousarray(rows[layer]))

    def read(self, block_id: int) -> npt.NDArray[np.uint8]:
        rows = np.empty((LAYERS, ROW_BYTES), np.uint8)
        for layer in range(LAYERS):
            self._context.copy_from_device(rows[layer], self._row(layer, block_id))
        return rows

    def _row(self, layer: int, block_id: int) -> int:
        return self._address + (layer * NUM_BLOCKS + block_id) * ROW_BYTES


class CudaRanges(CudaMemory):
    """Physical memory, an allocation for each layer."""

    def __init__(self) -> None:
        from kvsidecar.support.cuda_driver import RANGE_BYTES, CudaContext

        self._context = CudaContext(0)
        self._size = -(-NUM_BLOCKS * ROW_BYTES // RANGE_BYTES) * RANGE_BYTES
        self._addresses = [self._context.alloc_ranges([self._size]) for _ in range(LAYERS)]

    def kv_buffers(self) -> KVBuffers:
        ranges = [PhysicalRange(self._size, address=address) for address in self._addresses]
        return KVBuffers(self._context.uuid, tuple(Allocation(each.size, ranges=(each,)) for each in ranges))

    def regions(self) -> tuple[Region, ...]:
        return ONE_A_LAYER

    def _row(self, layer: int, block_id: int) -> int:
        return self._addresses[layer] + block_id * ROW_BYTES


KINDS: dict[tuple[bool, bool], type[Memory]] = {
    (False, False): HostMemory,
    (False, True): HostRanges,
    (True, False): CudaMemory,
    (True, True): CudaRanges,
}
"""By whether they are on the GPU, and of physical memory."""


@dataclass(eq=False)
class Rank:
    number: int
    memory: Memory
    client: Client
    free: list[int] = field(default_factory=lambda: list(range(NUM_BLOCKS)))
    stores: dict[int, list[int]] = field(default_factory=dict)
    """Block ids of stores that are not known to be over."""


class Engine:
    def __init__(self, options: argparse.Namespace) -> None:
        self.rng = random.Random(options.seed)
        self.name = options.namespace
        self.namespace = namespace_of(options.namespace, options.ranks)
        self.counts: Counter[str] = Counter()
        self.said_at = time.monotonic()
        self.ranks = []
        for number in range(options.ranks):
            physical = bool((options.seed + number) % 2)
            memory: Memory = KINDS[options.cuda, physical]()
            # A machine full of engines is busy: a lookup that comes late is not what the soak looks for.
            client = Client(options.socket, name=f"soak {self.name} {number}", timeout=TIMEOUT, step_budget=5.0)
            client.attach(
                instance=f"soak {self.name}",
                namespace=self.namespace,
                buffers=memory.kv_buffers(),
                groups=[GroupLayout(0, NUM_BLOCKS, number, options.ranks, memory.regions())],
                rank=number,
                world_size=options.ranks,
                retry=True,  # its copier may have been killed just before
            )
            client.wait_attached(TIMEOUT)
            self.ranks.append(Rank(number, memory, client))

    def serve(self) -> None:
        """One request: a prefix that others may have computed, and a tail."""
        hashes = hashes_of(self.rng.randrange(PROMPTS), self.rng.randint(1, PROMPT_BLOCKS))
        scheduler = self.ranks[0].client
        found = self._look_up(scheduler, hashes)
        hits = hits_of(found)
        self.counts["hits"] += hits
        self.counts["misses"] += len(hashes) - hits
        for rank in self.ranks:
            self._collect(rank)
            if hits:
                self._load(rank, hashes[:hits], found.lease)
            if hashes[hits:]:
                self._store(rank, hashes[hits:])
        if found.lease is not None and self.rng.random() < 0.8:  # the others end by time
            scheduler.release(found.lease)

    def _look_up(self, scheduler: Client, hashes: list[bytes]) -> LookupResult:
        """Ask again while more is coming from the disk, or lose patience: then it comes while it is computed, too."""
        patience, first = self.rng.choice((0, 3, 1000)), None
        while True:
            if not scheduler.attached:
                time.sleep(0.01)  # a daemon starts meanwhile
            found = scheduler.lookup(
                self.namespace, {0: hashes}, lease_seconds=2.0, fetch_seconds=TIMEOUT, prefill_rate=SLOW_PREFILL
            )
            if first is None:
                first = hits_of(found)
            if not found.coming or not patience:
                self.counts["disk_hits"] += max(0, hits_of(found) - first)
                return found
            patience -= 1
            if found.lease is not None:
                scheduler.release(found.lease)
            time.sleep(0.001)

    def _load(self, rank: Rank, hashes: list[bytes], lease: int | None) -> None:
        ids = self._take(rank, len(hashes))
        for block_id in ids:
            rank.memory.write(block_id, np.zeros((LAYERS, ROW_BYTES), np.uint8))
        job = rank.client.load([Blocks(0, hashes, ids)], lease=lease)
        done = self._wait(rank, job)
        if done.outcome is Outcome.DONE:
            self.counts["loads"] += 1
            self.counts["loaded_bytes"] += done.nbytes
        else:
            self.counts[f"load {done.outcome} {done.reason}"] += 1
        for block_id, block_hash in zip(ids, hashes, strict=True):
            got = rank.memory.read(block_id)
            # A declined load has touched nothing; of a failed one nobody knows, and nobody uses its blocks.
            expected = content(self.name, block_hash, rank.number) if done.outcome is Outcome.DONE else np.uint8(0)
            if done.outcome is not Outcome.FAILED:
                self._compare(got, expected)
        rank.free += ids

    def _store(self, rank: Rank, hashes: list[bytes]) -> None:
        ids = self._take(rank, len(hashes))
        for block_id, block_hash in zip(ids, hashes, strict=True):
            rank.memory.write(block_id, content(self.name, block_hash, rank.number))
        job = rank.client.store([Blocks(0, hashes, ids)])
        rank.stores[job] = ids
        choice = self.rng.random()
        if choice < 0.3:
            self._stored(rank, self._wait(rank, job))
        elif choice < 0.6:  # preemption: the blocks are wanted back at once
            pending = rank.client.flush([job], timeout=TIMEOUT, cancel=self.rng.random() < 0.5)
            if job not in pending:
                self._overwrite(rank, ids)

    def _collect(self, rank: Rank) -> None:
        """Take note of the stores that are over; never wait for them."""
        for done in rank.client.poll():
            self._stored(rank, done)

    def _stored(self, rank: Rank, done: JobDone) -> None:
        ids = rank.stores.pop(done.job, [])
        self.counts["stores" if done.outcome is Outcome.DONE else f"store {done.outcome} {done.reason}"] += 1
        self.counts["stored_bytes"] += done.nbytes
        self._overwrite(rank, ids)
        rank.free += ids

    def _overwrite(self, rank: Rank, ids: list[int]) -> None:
        for block_id in ids:
            rank.memory.write(block_id, np.full((LAYERS, ROW_BYTES), 0xEE, np.uint8))

    def _take(self, rank: Rank, count: int) -> list[int]:
        while len(rank.free) < count:
            job = next(iter(rank.stores))
            self._stored(rank, self._wait(rank, job))
        self.rng.shuffle(rank.free)
        ids, rank.free = rank.free[:count], rank.free[count:]
        return ids

    def _wait(self, rank: Rank, job: int) -> JobDone:
        done = rank.client.wait([job], TIMEOUT)
        if job not in done:
            self.say(error=f"job {job} did not end in {TIMEOUT:g} s")
            sys.exit(1)
        return done[job]

    def _compare(self, got: npt.NDArray[np.uint8], expected: npt.NDArray[np.uint8] | np.uint8) -> None:
        wrong = int(np.count_nonzero(got != expected))
        self.counts["checked_bytes"] += SHARD_BYTES
        if wrong:
            self.counts["wrong_bytes"] += wrong
            self.say()  # at once: this process may be killed

    def say(self, **more: object) -> None:
        """Everything since the last line."""
        print(json.dumps({**self.counts, **more}), flush=True)
        self.counts.clear()
        self.said_at = time.monotonic()

    def close(self) -> None:
        for rank in self.ranks:
            rank.client.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", required=True)
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--rounds", type=int, default=0, help="leave after so many requests")
    options = parser.parse_args()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    engine = Engine(options)
    engine.say(attached=1)
    rounds = 0
    while not stop.is_set() and (not options.rounds or rounds < options.rounds):
        engine.serve()
        rounds += 1
        if time.monotonic() - engine.said_at > SAY_SECONDS:
            engine.say()
    engine.close()
    engine.say(closed=1)


if __name__ == "__main__":
    main()
