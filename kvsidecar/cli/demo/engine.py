"""One engine of the demo: ``python -m kvsidecar.cli.demo.engine store|load CONFIG``, with the arguments of `DemoEngine`
as JSON.

It has two tensor-parallel ranks, each with its own buffer and connection, and writes JSON lines to standard output.
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

import numpy as np

from kvsidecar.bench.driver import Cuda
from kvsidecar.bench.memory import EngineMemory, engine_memory
from kvsidecar.cli.demo.shape import TP_SIZE, DemoShape
from kvsidecar.client import Blocks, Client, JobDone, Outcome

JOB_BLOCKS = 64
"""Blocks per job: a prompt of a thousand tokens."""
TIMEOUT = 60.0


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


class DemoEngine:
    """Two ranks of one instance.

    Args:
        cuda: whether the KV cache is on the GPU.
        seed: determines the order in which this engine allocates block ids.
    """

    def __init__(self, *, name: str, shape: DemoShape, socket: str, cuda: bool, seed: int) -> None:
        self.shape = shape
        self.hashes = shape.hashes()
        self.block_ids = list(range(shape.num_blocks))
        random.Random(seed).shuffle(self.block_ids)
        self.memories: list[EngineMemory] = []
        self.clients: list[Client] = []
        gpu = Cuda() if cuda else None
        for rank in range(TP_SIZE):
            memory = engine_memory(shape.memory(), gpu)
            client = Client(socket, name=f"{name} rank {rank}")
            client.attach(
                instance=name,
                namespace=shape.namespace(),
                buffers=memory.kv_buffers(),
                groups=[shape.layout(rank)],
                rank=rank,
                world_size=TP_SIZE,
            )
            self.memories.append(memory)
            self.clients.append(client)

    def jobs(self) -> list[Blocks]:
        return [
            Blocks(0, self.hashes[start : start + JOB_BLOCKS], self.block_ids[start : start + JOB_BLOCKS])
            for start in range(0, self.shape.num_blocks, JOB_BLOCKS)
        ]

    def hits(self, *, lease_seconds: float = 0.0) -> tuple[int, int | None]:
        """How many blocks are readable, once all that a disk has are fetched, and the lease on them."""
        client, deadline = self.clients[0], time.monotonic() + TIMEOUT
        while True:
            result = client.lookup(
                self.shape.namespace(),
                {0: self.hashes},
                lease_seconds=lease_seconds,
                fetch_seconds=TIMEOUT,
                prefill_rate=1e-3,  # it computes nothing: whatever the disk needs is worth it
            )
            if not result.coming or time.monotonic() > deadline:
                return result.groups[0].hits, result.lease
            if result.lease is not None:
                client.release(result.lease)
            time.sleep(0.001)

    def store(self) -> None:
        """Fill the buffers with a pattern and store everything."""
        for rank, memory in enumerate(self.memories):
            for block_hash, block_id in zip(self.hashes, self.block_ids, strict=True):
                content = self.shape.content(rank, block_hash)
                memory.write(block_id, content)
                memory.settle()
        for rank, client in enumerate(self.clients):
            started = time.perf_counter()
            done = finish(client, [client.store([blocks]) for blocks in self.jobs()])
            say(rank=rank, hits=self.hits()[0], **summary(done, time.perf_counter() - started))

    def load(self) -> None:
        """Load everything into other block ids of empty memory, and compare every byte."""
        hits, lease = self.hits(lease_seconds=30)
        for rank, (client, memory) in enumerate(zip(self.clients, self.memories, strict=True)):
            started = time.perf_counter()
            done = finish(client, [client.load([blocks], lease=lease) for blocks in self.jobs()])
            seconds = time.perf_counter() - started
            wrong = sum(
                self._wrong_bytes(rank, memory, *each) for each in zip(self.hashes, self.block_ids, strict=True)
            )
            say(rank=rank, hits=hits, wrong_bytes=wrong, **summary(done, seconds))
        if lease is not None:
            self.clients[0].release(lease)
        for client in self.clients:
            client.close()

    def _wrong_bytes(self, rank: int, memory: EngineMemory, block_hash: bytes, block_id: int) -> int:
        loaded = np.empty(self.shape.shard_bytes, np.uint8)
        memory.read(block_id, loaded)
        memory.settle()
        return int(np.count_nonzero(loaded != self.shape.content(rank, block_hash)))


def finish(client: Client, jobs: list[int]) -> list[JobDone]:
    """Wait for the jobs. Exits with the reason if one does not succeed."""
    done = client.wait(jobs, TIMEOUT)
    for job in jobs:
        if job not in done:
            sys.exit(f"job {job} did not end in {TIMEOUT:g} s")
        if done[job].outcome is not Outcome.DONE:
            sys.exit(f"job {job} was {done[job].outcome}: {done[job].reason} {done[job].error}")
    return [done[job] for job in jobs]


def summary(done: list[JobDone], seconds: float) -> dict[str, Any]:
    return {
        "blocks": sum(job.copied_blocks for job in done),
        "bytes": sum(job.nbytes for job in done),
        "seconds": seconds,
        "copy_seconds": sum(job.copy_seconds for job in done),
    }


def main() -> None:
    action, config = sys.argv[1], json.loads(sys.argv[2])
    engine = DemoEngine(shape=DemoShape(**config.pop("shape")), **config)
    say(attached=True)
    if action == "store":
        engine.store()
        say(finished=True)
        sys.stdin.read()  # a serving engine does not exit by itself: it is killed
    else:
        engine.load()
        say(finished=True)


if __name__ == "__main__":
    main()
